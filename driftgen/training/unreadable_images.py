"""Record the unreadable images of a run in its metrics."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from driftgen.data.images import RealData
from driftgen.support.distributed import Distributed

__all__ = ["UnreadableImages"]

NAMED = 20  # images named in a row


class UnreadableImages:
    """Entries of ``metrics.jsonl`` about images that cannot be read.

    Training leaves out an image with a damaged header, and replaces one that cannot be decoded by another of
    its class. The second kind is found when an image is drawn for the first time.
    """

    def __init__(self, data: RealData, processes: Distributed) -> None:
        self.data, self.processes, self._recorded = data, processes, 0

    def update(self) -> dict[str, Any]:
        """Return ``{"unreadable": {"count": n, "names": [...]}}`` if images were found since the last call.

        Collective: every process calls it, since each decodes other images.
        """
        names = getattr(self.data, "unreadable", None)
        if names is None:
            return {}
        if self.processes.group is not None:
            gathered: list[Any] = [None] * self.processes.world_size
            dist.all_gather_object(gathered, list(names), group=self.processes.group)
            names = list(dict.fromkeys(name for part in gathered for name in part))
        if len(names) == self._recorded:
            return {}
        self._recorded = len(names)
        return {"unreadable": {"count": len(names), "names": list(names[:NAMED])}}
