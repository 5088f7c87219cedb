"""Copies to and from the GPU for which the host does not wait, so that the next batch can be queued."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostCopy", "device_tensor"]


def device_tensor(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor of a device.

    ``torch.tensor(values, device="cuda")`` would wait for all kernels that are queued: PyTorch copies from
    memory that is not pinned and synchronizes.
    """
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


class HostCopy:
    """A tensor on its way to host memory.

    On a GPU the copy to pinned memory is queued behind the kernels that compute the tensor. Kernels that are
    queued later do not delay it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return the tensor in host memory, when it has arrived."""
        if self._event is None:
            return self._host.cpu()
        self._event.synchronize()
        return self._host.clone()  # callers may keep results: pinned memory is for copies on their way
