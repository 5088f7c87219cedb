"""The passes as GPU kernels, for the cases that training meets; PyTorch does the others."""

from driftgen.fused.engine import FusedEngine
from driftgen.fused.passes import FusedPasses
from driftgen.fused.shapes import covers

__all__ = ["FusedEngine", "FusedPasses", "covers"]
