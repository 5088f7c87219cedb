"""Build modules on the meta device, to load weights into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from driftgen.errors import InputError

__all__ = ["on_meta_device"]

# In-place initializers: functions of torch.nn.init and tensor methods.
INITIALIZERS = {
    *("uniform_", "normal_", "constant_", "kaiming_uniform_", "xavier_uniform_", "zeros_", "ones_"),
    *("trunc_normal_", "zero_", "fill_", "copy_", "mul_", "add_", "erfinv_", "clamp_"),
}


CREATORS = {"empty", "zeros", "ones", "tensor", "full", "arange", "randn", "rand"}
# Tensors made per tensor of the file, and for small models. A network of the package makes fewer than 3.
CREATED_PER_STORED, CREATED = 10, 2000


class _SkipInitialization(TorchFunctionMode):
    """Skips in-place initialization of parameters.

    It would have no effect on the meta device, but the first random draw there imports PyTorch's compiler,
    which takes 1.5 s and 70 MB.
    """

    def __init__(self, stored: int | None) -> None:
        super().__init__()
        self.limit = None if stored is None else CREATED + CREATED_PER_STORED * stored
        self.stored, self.created = stored, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", None)
        if self.limit is not None and name in CREATORS:
            self.created += 1
            if self.created > self.limit:
                raise InputError(
                    f"the options describe a network of more than {self.limit:,} tensors, the weights hold "
                    f"{self.stored:,}: correct its depth"
                )
        if name in INITIALIZERS:
            target = args[0] if args else kwargs["tensor"]
            if isinstance(target, nn.Parameter):
                return target
        return func(*args, **kwargs)


@contextmanager
def on_meta_device(stored: int | None = None) -> Iterator[None]:
    """Build modules on the meta device, without memory; load a state dict with ``assign=True`` afterwards.

    ``stored`` is the number of tensors of the state dict. A network with many times as many is refused while
    it is built: a depth of a billion would take days.
    """
    with torch.device("meta"), _SkipInitialization(stored):
        yield
