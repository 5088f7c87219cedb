"""The command, versions and machine behind a number."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import torch

import driftgen

__all__ = ["command_line", "count_threads", "environment", "provenance"]


def provenance(command: str) -> dict[str, str]:
    """Return the command, the package versions and the hardware, to store with a result."""
    return {
        "command": command,
        "driftgen": driftgen.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": f"{platform.machine()} CPU, {count_threads()}",
    }


def count_threads() -> str:
    """Return the number of threads that PyTorch computes with: ``1 thread``, ``2 threads``."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def command_line() -> str:
    """Return the command of this process, such as ``driftgen train digits``; "" in another program."""
    program = Path(sys.argv[0])
    own = program.stem == "driftgen" or (program.name == "__main__.py" and program.parent.name == "driftgen")
    return shlex.join(["driftgen", *sys.argv[1:]]) if own else ""


def environment(device: torch.device, processes: int = 1) -> dict[str, str]:
    """Return the versions and the hardware of a run."""
    about = provenance("")
    del about["command"]
    if device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(device)
        about["CUDA"] = torch.version.cuda or ""
    else:
        about["device"] = device.type
    if processes > 1:
        about["processes"] = str(processes)
    return about | {"system": platform.platform()}
