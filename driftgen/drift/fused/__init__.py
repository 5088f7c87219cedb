"""The passes as GPU kernels, for the cases that training meets; PyTorch does the others."""

from driftgen.drift.fused.engine import FusedEngine
from driftgen.drift.fused.shapes import supports_fused
from driftgen.drift.fused.single_process import FusedPasses

__all__ = ["FusedEngine", "FusedPasses", "supports_fused"]
