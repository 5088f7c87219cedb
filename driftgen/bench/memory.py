"""Count launches and peak memory on the CPU, where PyTorch keeps no peak statistics."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["Meter", "count_bytes"]


class Meter(TorchDispatchMode):
    """Counts ``launches`` (operators, not views) and ``peak`` (bytes of new storage alive at once)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self.peak = self._alive = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        before = {t.untyped_storage()._cdata for t in inputs}
        result = func(*args, **(kwargs or {}))
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        inplace = func._schema.is_mutable
        new = [t.untyped_storage() for t in outputs if t.untyped_storage()._cdata not in before]
        if new or inplace:
            self.launches += 1
        for storage in new:
            key = storage._cdata
            if key in self._seen:
                continue
            self._seen.add(key)
            self._alive += storage.nbytes()
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.peak = max(self.peak, self._alive)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._alive -= size


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors; a view counts like a copy."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
