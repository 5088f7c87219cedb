"""The command, versions and machine behind a number."""

from __future__ import annotations

import platform

import torch

import driftgen

__all__ = ["provenance"]


def provenance(command: str) -> dict[str, str]:
    """Return the command, the package versions and the hardware, to store with a result."""
    return {
        "command": command,
        "driftgen": driftgen.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
    }
