"""Networks without numbers, to be filled from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["on_meta_device"]

# What fills a tensor in place, of torch.nn.init or by hand.
FILLING = {
    *("uniform_", "normal_", "constant_", "kaiming_uniform_", "xavier_uniform_", "zeros_", "ones_"),
    *("trunc_normal_", "zero_", "fill_", "copy_", "mul_", "add_", "erfinv_", "clamp_"),
}


class _NoInitialisation(TorchFunctionMode):
    """Draws no numbers: on the device "meta" there is no place for them, and the first draw would load
    PyTorch's compiler, which takes a second and a half, and 70 MB.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in FILLING:
            target = args[0] if args else kwargs["tensor"]
            if isinstance(target, nn.Parameter):
                return target
        return func(*args, **kwargs)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Modules built inside have shapes and types, but no memory: load a state with ``assign=True``."""
    with torch.device("meta"), _NoInitialisation():
        yield
