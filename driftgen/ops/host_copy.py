"""Copies to and from the GPU for which the host does not wait, so that the next batch can be queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["HostCopy", "delayed", "device_tensor", "gather"]

# Batches that a device is given before the host handles the results of the last one: a GPU never waits.
AHEAD = {"cuda": 1}


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

    @property
    def pinned(self) -> bool:
        """True if the tensor comes from a GPU, by way of pinned memory."""
        return self._event is not None

    def __len__(self) -> int:
        return len(self._host)

    def wait(self, out: Tensor | None = None) -> Tensor:
        """Return the tensor in host memory, when it has arrived; written to ``out`` if given."""
        if self._event is not None:
            self._event.synchronize()
        if out is not None:
            return out.copy_(self._host)
        # Callers may keep results: pinned memory is for copies on their way.
        return self._host.cpu() if self._event is None else self._host.clone()

    def room(self, rows: int) -> Tensor:
        """Return host memory for ``rows`` rows of such tensors, all of it already claimed.

        The system claims memory page by page at the first write, which takes longer than the copy.
        """
        return torch.zeros(rows, *self._host.shape[1:], dtype=self._host.dtype)


def delayed(copies: Iterable[HostCopy], device: torch.device) -> Iterator[HostCopy]:
    """Yield the copies in order, each when the device has been given as many more as it needs not to wait."""
    queued: deque[HostCopy] = deque()
    for copy in copies:
        queued.append(copy)
        if len(queued) > AHEAD.get(device.type, 0):
            yield queued.popleft()
    yield from queued


def gather(copies: Iterable[HostCopy], rows: int) -> Tensor:
    """Return the tensors ``[n, ...]`` of the copies as one ``[rows, ...]``."""
    out, first = None, 0
    for copy in copies:
        if len(copy) == rows and not copy.pinned:
            return copy.wait()
        out = copy.room(rows) if out is None else out  # while the device computes the first one
        first += len(copy.wait(out[first : first + len(copy)]))
    assert out is not None
    return out
