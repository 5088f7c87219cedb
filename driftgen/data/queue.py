"""The paper's sample queues: the newest real samples of each class, and how some of them are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["SampleQueue", "draw_rows", "rank_in_class"]


class SampleQueue:
    """One queue of ``size`` samples per class (appendix "Sample Queue"): new ones in, the oldest out.

    One class makes the global queue that unconditional samples come from.

    Args:
        num_classes: number of queues.
        size: length of each.
        shape: of one sample.
        dtype: numbers are kept in this type.
    """

    def __init__(
        self, num_classes: int, size: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        if num_classes < 1 or size < 1:
            raise InputError(f"num_classes={num_classes} and size={size}: both must be at least 1")
        self.num_classes, self.size, self.shape = num_classes, size, tuple(shape)
        self.bank = torch.zeros(num_classes, size, *self.shape, dtype=dtype)
        self.pointer = torch.zeros(num_classes, dtype=torch.int64)  # the slot that is written next
        self.count = torch.zeros(num_classes, dtype=torch.int64)  # filled slots, the first ones

    def push(self, samples: Tensor, labels: Tensor) -> None:
        """Puts ``samples [B, *shape]`` into the queues of their ``labels [B]``, in order."""
        self._check(labels)
        if samples.shape != (len(labels), *self.shape):
            raise InputError(
                f"samples has shape {list(samples.shape)}, expected {[len(labels), *self.shape]}: "
                "one sample per label, of the shape that the queue was made for"
            )
        labels = labels.cpu().long()
        added = torch.bincount(labels, minlength=self.num_classes)
        rank = rank_in_class(labels)
        # Of more samples of one class than its queue holds only the last ones would stay.
        stays = rank >= added[labels] - self.size
        slots = (self.pointer[labels] + rank) % self.size
        self.bank[labels[stays], slots[stays]] = samples.detach().to(self.bank)[stays]
        self.pointer = (self.pointer + added) % self.size
        self.count = (self.count + added).clamp(max=self.size)

    def draw(self, labels: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """``[len(labels), n, *shape]``: for each label n samples of its queue, without replacement.

        The paper draws without replacement, the release with it when a queue holds fewer than ``n``. Here
        such a queue gives all it has in random order, then all again, so that no sample is repeated before
        every other one was drawn. Rows are independent of each other.
        """
        return self.take(labels, self.slots(labels, n, generator))

    def slots(self, labels: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """The places ``[len(labels), n]`` that :meth:`draw` takes its samples from."""
        self._check(labels)
        held = self.count[labels]
        if bool((held == 0).any()):
            empty = sorted({int(label) for label in labels[held == 0]})
            raise InputError(f"the queue of class {empty[0]} is empty: push samples of it before drawing")
        return draw_rows(held, n, generator)

    def take(self, labels: Tensor, slots: Tensor) -> Tensor:
        """The samples in these places."""
        return self.bank[labels[:, None], slots]

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the queue holds; not a copy."""
        return {"bank": self.bank, "pointer": self.pointer, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`state_dict` gave."""
        own = self.state_dict()
        if set(state) != set(own):
            raise InputError(f"the state of a queue has {sorted(state)}, expected {sorted(own)}")
        for name, value in state.items():
            if value.shape != own[name].shape:
                raise InputError(
                    f"{name} of the stored queue has shape {list(value.shape)}, this one "
                    f"{list(own[name].shape)}: classes, length and sample shape must be as it was saved"
                )
        for name, value in state.items():
            own[name].copy_(value)

    def _check(self, labels: Tensor) -> None:
        if labels.ndim != 1 or labels.is_floating_point():
            raise InputError(
                f"labels has shape {list(labels.shape)} and type {labels.dtype}: give [B] integers"
            )
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < self.num_classes):
            raise InputError(
                f"labels go from {int(labels.min())} to {int(labels.max())}, expected 0 ... "
                f"{self.num_classes - 1}"
            )


def rank_in_class(labels: Tensor) -> Tensor:
    """How many of the labels before each one are equal to it."""
    ordered, order = labels.sort(stable=True)
    place = torch.arange(len(labels))
    starts = torch.ones(len(labels), dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(starts, place, 0).cummax(0).values if len(labels) else place
    return torch.empty_like(place).scatter_(0, order, place - first)


def draw_rows(sizes: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """``[R, n]``: in row r, n different numbers below ``sizes[r]``, every such choice and order equally
    likely. A row with fewer than n numbers gives each once before any twice.
    """
    out = torch.empty(len(sizes), n, dtype=torch.int64)
    large = sizes >= 2 * n
    if n and bool(large.any()):
        out[large] = _first_distinct(sizes[large], n, generator)
    for row in (~large).nonzero()[:, 0].tolist() if n else ():
        size = int(sizes[row])
        keys = torch.rand(math.ceil(n / size), size, generator=generator, dtype=torch.float64)
        out[row] = keys.argsort(dim=1).flatten()[:n]
    return out


def _first_distinct(sizes: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """The first n different numbers of an endless uniform sequence: a draw without replacement whose cost
    does not grow with ``sizes``. With at least 2n numbers to choose from, 1.4n draws are enough on average.
    """
    length = n + n // 2 + 40
    while True:
        keys = torch.rand(len(sizes), length, generator=generator, dtype=torch.float64)
        drawn = (keys * sizes[:, None]).long()
        ordered, order = drawn.sort(dim=1, stable=True)
        again = torch.zeros_like(drawn, dtype=torch.bool)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        new = ~torch.zeros_like(again).scatter_(1, order, again)
        found = new.cumsum(dim=1)
        if bool((found[:, -1] >= n).all()):
            return drawn[new & (found <= n)].view(len(sizes), n)
        length *= 2
