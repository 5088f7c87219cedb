"""The command, versions and machine behind a number."""

from __future__ import annotations

import platform

import torch

import driftgen

__all__ = ["provenance"]


def provenance(command: str) -> dict[str, str]:
    """Where a number comes from: the command, the versions, the machine."""
    return {
        "command": command,
        "driftgen": driftgen.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
    }
