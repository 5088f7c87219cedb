"""The paper's sample queues (appendix "Sample Queue"), and draws without replacement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.checked_arguments import checked
from driftgen.support.dense_tensors import check_dense
from driftgen.support.whole_numbers import check_count

__all__ = ["SampleQueue", "draw_rows", "rank_in_class"]


class SampleQueue:
    """One queue of the newest ``size`` samples per class (appendix "Sample Queue").

    A queue with one class is the global queue of unconditional samples.

    Args:
        num_classes: number of queues.
        size: capacity of each queue.
        shape: shape of one sample.
        dtype: dtype of the stored samples.
    """

    @checked
    def __init__(
        self, num_classes: int, size: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        if num_classes < 1 or size < 1:
            raise InputError(f"num_classes={num_classes} and size={size} must both be at least 1")
        if any(side < 0 for side in shape):
            raise InputError(f"shape={tuple(shape)} holds a negative size")
        self.num_classes, self.size, self.shape = num_classes, size, tuple(shape)
        self.bank = torch.zeros(num_classes, size, *self.shape, dtype=dtype)
        self.pointer = torch.zeros(num_classes, dtype=torch.int64)  # next slot to write
        self.count = torch.zeros(num_classes, dtype=torch.int64)  # number of filled slots; they come first

    @checked
    def push(self, samples: Tensor, labels: Tensor) -> None:
        """Append ``samples [B, *shape]`` to the queues of their ``labels [B]``, in order."""
        self._check(labels)
        check_dense("samples", samples)
        if samples.shape != (len(labels), *self.shape):
            raise InputError(
                f"samples has shape {list(samples.shape)}, expected {[len(labels), *self.shape]}: "
                "one sample per label, of the shape given to the queue"
            )
        labels = labels.cpu().long()
        added = torch.bincount(labels, minlength=self.num_classes)
        rank = rank_in_class(labels)
        # If a class has more new samples than its queue holds, only the last ones remain.
        remains = rank >= added[labels] - self.size
        slots = (self.pointer[labels] + rank) % self.size
        stored = samples.detach().to(self.bank)
        if not stored.isfinite().all():
            raise InputError(f"samples contains NaN or values beyond {self.bank.dtype}: remove those samples")
        self.bank[labels[remains], slots[remains]] = stored[remains]
        # In place: a state_dict holds these tensors.
        self.pointer.add_(added).remainder_(self.size)
        self.count.add_(added).clamp_(max=self.size)

    @checked
    def draw(self, labels: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n samples per label without replacement, ``[len(labels), n, *shape]``.

        If a queue holds fewer than n samples, the release draws with replacement. Here the queue is exhausted
        in random order and then drawn from again, so no sample is repeated before every other one was drawn.
        Rows are independent of each other.
        """
        self._check(labels)  # before labels that are no integers become some
        labels = labels.cpu().long()
        return self.take(labels, self.slots(labels, n, generator))

    def slots(self, labels: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the slots ``[len(labels), n]`` that :meth:`draw` reads."""
        self._check(labels)
        check_count("n", n, 0)
        counts = self.count[labels]
        if bool((counts == 0).any()):
            empty = sorted({int(label) for label in labels[counts == 0]})
            raise InputError(f"the queue of class {empty[0]} is empty: push samples of this class first")
        return draw_rows(counts, n, generator)

    def take(self, labels: Tensor, slots: Tensor) -> Tensor:
        """Return the samples in the given slots, ``[len(labels), n, *shape]``."""
        return self.bank[labels[:, None], slots]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the queue, not copies."""
        return {"bank": self.bank, "pointer": self.pointer, "count": self.count}

    @checked
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of :meth:`state_dict`."""
        own = self.state_dict()
        if set(state) != set(own):
            raise InputError(f"the state of a queue has keys {sorted(state)}, expected {sorted(own)}")
        for name, value in state.items():
            check_dense(name, value)
            if value.shape != own[name].shape:
                raise InputError(
                    f"{name} of the stored queue has shape {list(value.shape)}, expected "
                    f"{list(own[name].shape)}: use the classes, size and sample shape it was saved with"
                )
        for name, value in state.items():
            own[name].copy_(value)

    def _check(self, labels: Tensor) -> None:
        if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
            raise InputError(
                f"labels has shape {list(labels.shape)} and dtype {labels.dtype}, expected [B] integers"
            )
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < self.num_classes):
            raise InputError(
                f"labels are {int(labels.min())} ... {int(labels.max())}, expected 0 ... "
                f"{self.num_classes - 1}"
            )


def rank_in_class(labels: Tensor) -> Tensor:
    """Return, for each label, the number of equal labels before it."""
    ordered, order = labels.sort(stable=True)
    position = torch.arange(len(labels))
    starts = torch.ones(len(labels), dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(starts, position, 0).cummax(0).values if len(labels) else position
    return torch.empty_like(position).scatter_(0, order, position - first)


def draw_rows(sizes: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw ``[R, n]``: in row r, n different integers below ``sizes[r]``, uniformly over choices and orders.

    A row with fewer than n integers yields each once before any twice.
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
    """Return the first n distinct integers of a uniform sequence.

    The cost of this draw without replacement does not grow with ``sizes``. With at least 2n integers to
    choose from, 1.4n draws suffice on average.
    """
    length = n + n // 2 + 40
    while True:
        keys = torch.rand(len(sizes), length, generator=generator, dtype=torch.float64)
        draws = (keys * sizes[:, None]).long()
        ordered, order = draws.sort(dim=1, stable=True)
        repeated = torch.zeros_like(draws, dtype=torch.bool)
        repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        new = ~torch.zeros_like(repeated).scatter_(1, order, repeated)
        distinct = new.cumsum(dim=1)
        if bool((distinct[:, -1] >= n).all()):
            return draws[new & (distinct <= n)].view(len(sizes), n)
        length *= 2
