"""The ``driftgen`` command: one thin function per verb, no logic.

Commands import their dependencies when they are called, so that ``driftgen`` starts fast.
"""

from driftgen.cli.root import app, main

__all__ = ["app", "main"]
