"""Build modules on the meta device, to load weights into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from driftgen.errors import InputError
from driftgen.support.peak_memory import check_fits, total_memory

__all__ = ["check_network_size", "on_meta_device"]

# In-place initializers: functions of torch.nn.init and tensor methods.
INITIALIZERS = {
    *("uniform_", "normal_", "constant_", "kaiming_uniform_", "xavier_uniform_", "zeros_", "ones_"),
    *("trunc_normal_", "zero_", "fill_", "copy_", "mul_", "add_", "erfinv_", "clamp_"),
}


CREATORS = {"empty", "zeros", "ones", "tensor", "full", "arange", "randn", "rand"}
# Tensors made per tensor of the file, and for small models. A network of the package makes fewer than 3.
CREATED_PER_STORED, CREATED = 10, 2000
LARGEST = 10_000  # tensors of a network; a DiT with 28 blocks has 500


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


class _LimitSize(TorchFunctionMode):
    """Stops a constructor whose tensors would not fit into the memory, or that makes too many."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies, self.bytes, self.created = copies, 0, 0
        self.memory = total_memory(torch.device("cpu")) or math.inf

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", None) in CREATORS and isinstance(result, torch.Tensor):
            self.created += 1
            self.bytes += result.numel() * result.element_size()
            if self.copies * self.bytes > self.memory:
                self.check()
            if self.created > LARGEST:
                raise InputError(f"the network has more than {LARGEST:,} tensors: lower its depth")
        return result

    def check(self) -> None:
        what = "the network with its weights" + (", gradients and moments" if self.copies > 1 else "")
        check_fits(what, self.copies * self.bytes, torch.device("cpu"), "lower its width or depth")


def check_network_size(build: Callable[[], object]) -> None:
    """Run a constructor on the meta device and raise if the network would not fit into the memory.

    Training on a CPU also holds gradients and two moments; on a GPU, the weights alone are built in host
    memory. The state of the random number generator does not change.
    """
    copies = 1 if torch.cuda.is_available() else 4
    try:
        with torch.random.fork_rng([]), on_meta_device(), _LimitSize(copies) as size:
            build()
        size.check()
    except RuntimeError as error:
        if "overflow" not in str(error) and "numel" not in str(error):
            raise
        raise InputError("the network has more weights than any memory holds: lower its sizes") from None


@contextmanager
def on_meta_device(stored: int | None = None) -> Iterator[None]:
    """Build modules on the meta device, without memory; load a state dict with ``assign=True`` afterwards.

    ``stored`` is the number of tensors of the state dict. A network with many times as many is refused while
    it is built: a depth of a billion would take days.
    """
    with torch.device("meta"), _SkipInitialization(stored):
        yield
