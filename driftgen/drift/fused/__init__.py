"""The passes as GPU kernels, for the shapes and options that training uses."""

from driftgen.drift.fused.coverage import unsupported_reason
from driftgen.drift.fused.engine import FusedEngine

__all__ = ["FusedEngine", "unsupported_reason"]
