"""The passes as GPU kernels, for the cases that training meets; PyTorch does the others."""

from driftgen.fused.engine import FusedEngine, FusedPasses, covers

__all__ = ["FusedEngine", "FusedPasses", "covers"]
