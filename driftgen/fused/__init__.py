"""The passes as GPU kernels, for the cases that training meets; PyTorch does the others."""

from driftgen.fused.engine import FusedEngine, covers

__all__ = ["FusedEngine", "covers"]
