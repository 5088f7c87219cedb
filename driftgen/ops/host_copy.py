"""Copy results to the host without waiting for the GPU, so that it can begin the next batch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopy"]


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
