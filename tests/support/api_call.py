"""A call of a public function, with arguments that work."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """A function and arguments that work.

    Attributes:
        name: name of the call.
        function: called with the arguments by name.
        arguments: makes new arguments; gets a folder for files.
        propagates: True for a network, which answers NaN to NaN as every PyTorch network does.
        quick: False if a call takes more than a few milliseconds.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[Path], dict[str, Any]]
    propagates: bool = False
    quick: bool = True


def make_call(
    name: str, function: Any, propagates: bool = False, quick: bool = True, /, **arguments: Any
) -> Call:
    """Return a call; arguments that are functions ``lambda folder`` or ``lambda`` are made anew."""

    def make(folder: Path) -> dict[str, Any]:
        return {
            key: value.make(folder) if isinstance(value, Fresh) else value for key, value in arguments.items()
        }

    return Call(name, function, make, propagates, quick)


@dataclass(frozen=True)
class Fresh:
    """An argument that each call gets a new one of."""

    make: Callable[[Path], Any]


def randn(*shape: int, dtype: torch.dtype | None = None) -> Fresh:
    return Fresh(lambda folder: torch.randn(*shape, dtype=dtype))


def labels(count: int, classes: int) -> Fresh:
    return Fresh(lambda folder: torch.randint(classes, (count,)))
