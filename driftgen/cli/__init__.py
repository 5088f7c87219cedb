"""The ``driftgen`` command: one thin verb each, no logic.

Commands import what they need when they are called, so that the command starts fast.
"""

from driftgen.cli.root import app, main

__all__ = ["app", "main"]
