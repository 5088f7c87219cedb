"""Images that are indexed, converted and augmented on the GPU instead of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from driftgen.data.arrays import ArrayImages
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data
    from driftgen.data.images import RealData

__all__ = ["is_on_gpu", "place_data"]

GPU_SHARE = 1 / 16  # of the GPU's memory that on_device=auto may take


def place_data(data: RealData, config: Data, device: torch.device, *, queue: bool = False) -> RealData:
    """Return the data on the device if ``config.on_device`` asks for it, else the data.

    ``auto`` moves uint8 images to a GPU if they fit into a sixteenth of its memory and if the augmentation
    has the same bits there: flips only. Queues of samples are in host memory, so their data stays there.
    """
    wanted = config.on_device
    if wanted is False or (wanted == "auto" and device.type != "cuda"):
        return data
    if not isinstance(data, ArrayImages) or queue:
        if wanted == "auto":
            return data
        reason = "queue.kind=queue holds samples in host memory" if queue else "the data is read from files"
        raise InputError(f"data.on_device=true: {reason}; set data.on_device=auto")
    if wanted == "auto":
        memory = torch.cuda.get_device_properties(device).total_memory
        if not data.is_exact_on_gpu or data.pixels.numel() > GPU_SHARE * memory:
            return data
    return data.to(device)


def is_on_gpu(data: RealData) -> bool:
    """Return True if the samples of the data are on a GPU, where no thread needs to load them ahead."""
    return isinstance(data, ArrayImages) and data.pixels.is_cuda
