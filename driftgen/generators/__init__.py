"""f: what turns noise into samples, in one call."""

from driftgen.generators.mlp import MLP

__all__ = ["MLP"]
