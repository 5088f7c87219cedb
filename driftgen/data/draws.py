"""Draws of a training step: sizes, result, the source interface, and the index draws behind both sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from driftgen.data.queue import draw_rows
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.images import RealData

__all__ = [
    "AUGMENT",
    "LABELS",
    "POSITIVES",
    "STREAM",
    "UNCONDITIONAL",
    "Draw",
    "Source",
    "StepSizes",
    "draw_groups",
    "draw_labels",
    "group_by_class",
    "shortage_notes",
]

# RNG stream ids of the data, distinct from each other and from those of the trainer.
LABELS, POSITIVES, UNCONDITIONAL, AUGMENT, STREAM = range(0x64617461, 0x64617461 + 5)


class StepSizes(NamedTuple):
    """Sizes of a step: C classes, and P positives and U unconditional samples per class."""

    classes: int
    positives: int
    unconditional: int


class Draw(NamedTuple):
    """Real samples for C' of the classes of a step."""

    labels: Tensor  # [C']
    positives: Tensor  # [C', P, c, h, w]
    unconditional: Tensor  # [C', U, c, h, w]


class Source(Protocol):
    """Draws the real samples of each step.

    ``draw(step, part)`` returns the samples of the classes that the slice ``part`` selects. The samples of a
    class do not depend on ``part``, so several processes or micro-batches can share one step. ``wait()``
    returns once no sample is loaded in the background. ``notes`` are one-line remarks on the data.
    """

    num_classes: int
    shape: tuple[int, int, int]
    notes: list[str]

    def draw(self, step: int, part: slice = slice(None)) -> Draw: ...

    def wait(self) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


def draw_labels(num_classes: int, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw the classes of a step, ``[n]``, in random order.

    All are different if there are at least n classes. Otherwise every class appears equally often, except for
    a random remainder.
    """
    remainder = torch.randperm(num_classes, generator=generator)[: n % num_classes if n > num_classes else n]
    if n <= num_classes:
        return remainder
    labels = torch.cat([torch.arange(num_classes).repeat(n // num_classes), remainder])
    return labels[torch.randperm(n, generator=generator)]


def draw_groups(sizes: Tensor, groups: int, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw ``[R, groups, n]`` integers below ``sizes[r]``, without replacement across the groups of a row.

    If ``sizes[r]`` is below ``groups * n``, every integer is drawn once before any is drawn twice. It is
    repeated within one group only if n exceeds the size.
    """
    out = torch.empty(len(sizes), groups, n, dtype=torch.int64)
    enough = sizes >= groups * n
    out[enough] = draw_rows(sizes[enough], groups * n, generator).view(-1, groups, n)
    for row in (~enough).nonzero()[:, 0].tolist():
        out[row] = _draw_in_turn(int(sizes[row]), groups, n, generator)
    return out


def _draw_in_turn(size: int, groups: int, n: int, generator: torch.Generator | None) -> Tensor:
    rows, unused = [], torch.empty(0, dtype=torch.int64)
    for _ in range(groups):
        row, unused = unused[:n], unused[n:]
        while len(row) < n:
            permutation = torch.randperm(size, generator=generator)
            # Integers that the group already holds come last, so that they go to the next group if possible.
            repeated = torch.isin(permutation, row)
            permutation = torch.cat([permutation[~repeated], permutation[repeated]])
            missing = n - len(row)
            row, unused = torch.cat([row, permutation[:missing]]), permutation[missing:]
        rows.append(row)
    return torch.stack(rows)


def group_by_class(data: RealData) -> tuple[Tensor, Tensor]:
    """Return the sample indices ordered by class, and the number of samples of each class."""
    sizes = torch.bincount(data.labels, minlength=len(data.class_names))
    if bool((sizes == 0).any()):
        empty = int((sizes == 0).nonzero()[0])
        raise InputError(
            f"class {empty} ({data.class_names[empty]}) has no samples: add some, or remove the class"
        )
    return data.labels.argsort(stable=True), sizes


def shortage_notes(
    names: list[str], sizes: Tensor, positives: int, queue_size: int | None = None
) -> list[str]:
    """Return a note for each reason why a step repeats positives."""
    notes = []
    small = (sizes < positives).nonzero()[:, 0].tolist()
    if small:
        more = f" and {len(small) - 1} more" if len(small) > 1 else ""
        notes.append(
            f"class {names[small[0]]}{more}: {int(sizes[small[0]])} samples, fewer than the "
            f"{positives} positives of a step, so some are repeated in it"
        )
    if queue_size is not None and queue_size < positives:
        notes.append(
            f"queue.class_size={queue_size} is below batch.positives={positives}, "
            "so some positives are repeated in a step"
        )
    return notes
