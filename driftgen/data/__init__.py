"""Where samples come from."""

from driftgen.data import toy

__all__ = ["toy"]
