"""One process or many: which share of the work is ours, and who writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from driftgen.errors import InputError

__all__ = ["Distributed"]


@dataclass(frozen=True)
class Distributed:
    """The processes that train together; alone unless ``torchrun`` started this one.

    Attributes:
        rank: position of this one; 0 writes.
        world_size: how many there are.
        device: where this one computes.
        group: for collectives; None when alone.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def start(cls, device: str | None = None) -> Distributed:
        """Joins the others (NCCL on GPUs, gloo on CPUs). ``device`` is the best there is if None."""
        try:
            chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            if chosen.type == "cuda" and not torch.cuda.is_available():
                raise InputError(f"device={device}: torch finds no NVIDIA GPU here, see driftgen doctor")
        except RuntimeError as error:
            raise InputError(f"device={device}: {str(error).splitlines()[0]}") from None
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(0, 1, chosen, None)
        if chosen.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if local >= torch.cuda.device_count():
                raise InputError(
                    f"process {local} of this machine has no GPU of its own: there are "
                    f"{torch.cuda.device_count()}, start so many with --nproc-per-node"
                )
            chosen = torch.device("cuda", local)
            torch.cuda.set_device(chosen)
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
        return cls(dist.get_rank(), world, chosen, dist.group.WORLD)

    @property
    def is_main(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def shard(self, n: int, what: str) -> slice:
        """Those of n things that are this process's; each gets as many."""
        if n % self.world_size:
            raise InputError(f"{what}={n} must be a multiple of the {self.world_size} processes")
        each = n // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)

    def any(self, flag: bool) -> bool:
        """Whether the flag is raised in any process."""
        if self.group is None:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def barrier(self) -> None:
        """Until all are here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def close(self) -> None:
        """Ends the group."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()
