"""Memory that is free on a device. Where the system is vague, the answer is the larger one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["free_memory"]

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of the two versions of control groups: limit, usage, and the entry of memory.stat for cached files.
VERSIONS = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    "": ("memory.max", "memory.current", "file"),
}


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate; None if the system does not tell.

    - On a GPU: free memory, and what PyTorch holds without using it.
    - On Linux: available memory and swap, but no more than the control groups of the process leave, such as
      that of its container. Cached files do not count as used.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return None
    return min((size for size in (_available(), *_left_in_groups()) if size is not None), default=None)


def _available() -> int | None:
    """Return available memory and free swap of the machine."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (sizes["MemAvailable"] + sizes.get("SwapFree", 0))
    except (OSError, ValueError, LookupError):
        return None


def _left_in_groups() -> Iterator[int]:
    """Yield what each control group with a limit leaves: those of the process and the groups around them."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        controller = "memory" if "memory" in controllers.split(",") else controllers
        if controller not in VERSIONS:
            continue
        limit, usage, cached = VERSIONS[controller]
        # A container sees its own group as the root, whatever the path.
        place = Path(path.lstrip("/"))
        for group in (CGROUPS / controller / part for part in (place, *place.parents)):
            with suppress(OSError, ValueError, LookupError):  # no such group, or "max": no limit
                most = int((group / limit).read_text())
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                yield most - int((group / usage).read_text()) + int(stat[cached])
