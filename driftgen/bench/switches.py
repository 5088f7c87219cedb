"""Switch single ops of ``driftgen.ops`` off, to measure what each of them brings."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import driftgen.ops
from driftgen.errors import unknown_name

__all__ = ["op_names", "without_op"]

PREFIX = "supports_"
LOSS, LOSS_SWITCH = "loss", "unsupported_reason"


def op_names() -> list[str]:
    """Names that :func:`without_op` accepts: the ops that have a ``supports_*`` function, and the loss."""
    names = [module.name for module in pkgutil.iter_modules(driftgen.ops.__path__)]
    return [*(name for name in names if not name.endswith("_triton") and _switches(name)), LOSS]


@contextmanager
def without_op(name: str | None) -> Iterator[None]:
    """Run PyTorch's form of one op: its ``supports_*`` functions return False. None changes nothing."""
    if name is None:
        yield
        return
    if name not in op_names():
        raise unknown_name("without", name, op_names())
    switches = [LOSS_SWITCH] if name == LOSS else _switches(name)
    # Modules import the functions by name, so every copy is replaced.
    originals = [(module, switch) for module in _modules() for switch in switches if switch in vars(module)]
    saved = [getattr(module, switch) for module, switch in originals]
    for module, switch in originals:
        setattr(module, switch, _switched_off if name == LOSS else _never)
    try:
        yield
    finally:
        for (module, switch), function in zip(originals, saved, strict=True):
            setattr(module, switch, function)


def _never(*args: object, **kwargs: object) -> bool:
    return False


def _switched_off(*args: object, **kwargs: object) -> str:
    return "its kernels are switched off"


def _switches(name: str) -> list[str]:
    module = import_module(f"driftgen.ops.{name}")
    return [
        key
        for key, value in vars(module).items()
        if key.startswith(PREFIX) and getattr(value, "__module__", "") == module.__name__
    ]


def _modules() -> list[ModuleType]:
    import_module("driftgen.drift.fused")
    return [module for key, module in list(sys.modules.items()) if key.startswith("driftgen.")]
