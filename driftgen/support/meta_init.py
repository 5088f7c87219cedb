"""Build modules on the meta device, to load weights into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["on_meta_device"]

# In-place initializers: functions of torch.nn.init and tensor methods.
INITIALIZERS = {
    *("uniform_", "normal_", "constant_", "kaiming_uniform_", "xavier_uniform_", "zeros_", "ones_"),
    *("trunc_normal_", "zero_", "fill_", "copy_", "mul_", "add_", "erfinv_", "clamp_"),
}


class _SkipInitialization(TorchFunctionMode):
    """Skips in-place initialization of parameters.

    It would have no effect on the meta device, but the first random draw there imports PyTorch's compiler,
    which takes 1.5 s and 70 MB.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in INITIALIZERS:
            target = args[0] if args else kwargs["tensor"]
            if isinstance(target, nn.Parameter):
                return target
        return func(*args, **kwargs)


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build modules on the meta device, without memory; load a state dict with ``assign=True`` afterwards."""
    with torch.device("meta"), _SkipInitialization():
        yield
