"""The passes as GPU kernels, for the cases that training meets; PyTorch does the others."""

from driftgen.fused.engine import FusedEngine, covers
from driftgen.fused.passes import FusedPasses

__all__ = ["FusedEngine", "FusedPasses", "covers"]
