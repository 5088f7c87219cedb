"""The processes of a run: rank, device, process group and shard of the work."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from driftgen.errors import InputError

__all__ = ["Distributed", "choose_device"]


DEVICES = ("cpu", "cuda", "mps", "xpu")  # types of devices that networks can run on


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device of this name; by default a GPU if there is one, else the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
    except RuntimeError:
        raise InputError(
            f"device={name or repr(name)} is not a device: choose from {', '.join(DEVICES)}, with a number "
            "such as cuda:1"
        ) from None
    if device.type not in DEVICES:
        raise InputError(f"device={name} is not supported: choose from {', '.join(DEVICES)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device={name}: torch finds no NVIDIA GPU here, see driftgen doctor", topic="no-gpu"
        )
    if device.type == "cpu" and device.index:
        raise InputError(f"device={name}: the CPU is one device, give cpu")
    return device


def _join_group(backend: str, timeout: timedelta) -> None:
    """Join the process group that the environment describes.

    ``torchrun --max-restarts`` keeps one store for all attempts, and with it the addresses of processes that
    have ended. A prefix keeps the attempts apart. The machines of a group may count their restarts
    differently, so that only groups on one machine have it.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=timeout)


@dataclass(frozen=True)
class Distributed:
    """The processes that train together: one, unless ``torchrun`` started several.

    Attributes:
        rank: of this process; rank 0 writes files.
        world_size: number of processes.
        device: of this process.
        group: for collectives; None for one process.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def start(cls, device: str | None = None) -> Distributed:
        """Join the process group (NCCL on GPUs, gloo on CPUs); ``device`` defaults to a GPU if any."""
        chosen = choose_device(device)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(0, 1, chosen, None)
        if chosen.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if local >= torch.cuda.device_count():
                raise InputError(
                    f"local rank {local} has no GPU: this machine has {torch.cuda.device_count()}, "
                    f"use --nproc-per-node {torch.cuda.device_count()}",
                    topic="no-gpu",
                )
            chosen = torch.device("cuda", local)
            torch.cuda.set_device(chosen)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        _join_group(backend, timedelta(minutes=30))
        return cls(dist.get_rank(), world, chosen, dist.group.WORLD)

    @property
    def is_main(self) -> bool:
        """True in the process that writes files."""
        return self.rank == 0

    def shard(self, n: int, name: str) -> slice:
        """Return this process's slice of n items; all processes get the same number."""
        if n % self.world_size:
            raise InputError(f"{name}={n} must be a multiple of the number of processes, {self.world_size}")
        each = n // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        if self.group is None:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def run_main(self, work: Callable[[], None]) -> None:
        """Do work in the main process. If it raises an InputError, every process raises the same one."""
        message: list[str | None] = [None, None]  # and its topic
        if self.is_main:
            try:
                work()
            except InputError as error:
                if self.group is None:
                    raise
                message = [str(error), error.topic]
        if self.group is not None:
            dist.broadcast_object_list(message, src=0, group=self.group, device=self.device)
            if message[0] is not None:
                raise InputError(message[0], topic=message[1])

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def close(self) -> None:
        """Destroy the process group."""
        if self.group is not None and dist.is_initialized():
            with suppress(RuntimeError):  # another process has ended
                dist.destroy_process_group()
