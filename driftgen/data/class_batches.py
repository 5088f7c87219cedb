"""The real samples of a training step, grouped by class: from all data, or from the paper's queues."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from driftgen.data.queue import SampleQueue, draw_rows, rank_in_class
from driftgen.errors import InputError
from driftgen.support.rng import derive_generator, derive_seed

if TYPE_CHECKING:
    from driftgen.data.config import Queue
    from driftgen.data.images import RealData

__all__ = [
    "ClassIndex",
    "Draw",
    "QueueSource",
    "Source",
    "StepSizes",
    "draw_groups",
    "draw_labels",
    "open_source",
]

# Which randomness of the data it is, so that no two share their numbers with each other or with the trainer.
LABELS, POSITIVES, UNCONDITIONAL, AUGMENT, STREAM = range(0x64617461, 0x64617461 + 5)
T = TypeVar("T")
Key = tuple[int, ...]

FILL = 256  # samples loaded at once while the queues are filled


class StepSizes(NamedTuple):
    """What a step asks for: C classes, and for each of them P positives and U unconditional samples."""

    classes: int
    positives: int
    unconditional: int


class Draw(NamedTuple):
    """What a step needs of the data, for C' of its classes."""

    labels: Tensor  # [C']
    positives: Tensor  # [C', P, c, h, w]
    unconditional: Tensor  # [C', U, c, h, w]


class Source(Protocol):
    """Gives the real samples of step after step.

    ``draw(step, part)`` gives those of the step's classes that lie in ``part``; what a class gets does not
    depend on ``part``, so several processes or micro-batches share one step. ``notes`` are remarks on the
    data, one line each.
    """

    num_classes: int
    shape: tuple[int, int, int]
    notes: list[str]

    def draw(self, step: int, part: slice = slice(None)) -> Draw: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


def open_source(
    data: RealData, batch: StepSizes, queue: Queue, seed: int = 0, *, ahead: bool = False
) -> Source:
    """Where the positives of a run come from, as ``queue.kind`` says.

    Samples that are decoded from files are loaded a step ahead; with ``ahead`` all are, as when a GPU has the
    work and the host would wait.
    """
    if queue.kind == "index":
        return ClassIndex(data, batch, seed, ahead=ahead)
    return QueueSource(data, batch, queue, seed, ahead=ahead)


class ClassIndex:
    """Positives drawn by class from all data, unconditional samples from all of it.

    Within a step no positive is drawn twice, also when a class comes up twice in it; each class's
    unconditional samples are different from each other. Where there are too few, each is drawn once before
    any is drawn twice. Step and seed decide everything: there is no state.
    """

    def __init__(self, data: RealData, batch: StepSizes, seed: int = 0, *, ahead: bool = False) -> None:
        self.data, self.seed, self.batch = data, seed, batch
        self.num_classes, self.shape = len(data.class_names), data.shape
        self.order, self.sizes = _by_class(data)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.notes = _shortages(data.class_names, self.sizes, batch.positives)
        self._ahead: _Ahead[Draw] | None = _Ahead() if ahead or getattr(data, "decodes", False) else None
        self._parts = _Parts((0, self.batch.classes))

    def draw(self, step: int, part: slice = slice(None)) -> Draw:
        """The samples of a step; where they are loaded ahead, the next ones are while it runs."""
        start, stop, stride = part.indices(self.batch.classes)
        if stride != 1:
            raise InputError(f"part={part}: give a slice of neighbours, like slice(0, 4)")
        if self._ahead is None:
            return self._draw(step, start, stop)
        drawn = self._ahead.get((step, start, stop), lambda: self._draw(step, start, stop))
        following = self._parts.after(step, (start, stop))
        if following is not None:
            then, (first, last) = following
            self._ahead.start((then, first, last), lambda: self._draw(then, first, last))
        return drawn

    def _draw(self, step: int, start: int, stop: int) -> Draw:
        labels, positives, unconditional = self.indices(step)
        labels, chosen = labels[start:stop], torch.cat([positives, unconditional], dim=1)[start:stop]
        groups, each = chosen.shape
        first = start * each
        samples = self.data.load(chosen.flatten(), derive_seed(self.seed, AUGMENT, step), first)
        samples = samples.view(groups, each, *self.shape)
        return Draw(labels, samples[:, : self.batch.positives], samples[:, self.batch.positives :])

    def indices(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Labels ``[C]`` of a step, and which samples are its positives ``[C, P]`` and unconditional ones
        ``[C, U]``.
        """
        batch = self.batch
        labels = draw_labels(self.num_classes, batch.classes, derive_generator(self.seed, LABELS, step))
        present, which = labels.unique(return_inverse=True)
        turn = rank_in_class(labels)
        groups = draw_groups(
            self.sizes[present],
            int(turn.max()) + 1,
            batch.positives,
            derive_generator(self.seed, POSITIVES, step),
        )
        positives = self.order[self.starts[labels][:, None] + groups[which, turn]]
        everything = torch.full((batch.classes,), len(self.data.labels))
        generator = derive_generator(self.seed, UNCONDITIONAL, step)
        return labels, positives, draw_rows(everything, batch.unconditional, generator)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: see above."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to put back."""


class QueueSource:
    """The paper's queues: a shuffled stream of the data passes through them, ``push`` samples in every step.

    Before the first step the queues are filled: until every class has as many samples as it can have and the
    global queue is full, which takes one pass over the data at most. A new step pushes once, before it draws,
    however many parts it is drawn in. Steps must not go back. Every process keeps whole queues.

    The state is the queues and the place in the stream, so that a resumed run goes on as if never stopped.
    """

    def __init__(
        self, data: RealData, batch: StepSizes, queue: Queue, seed: int = 0, *, ahead: bool = False
    ) -> None:
        self.data, self.seed, self.batch, self.options = data, seed, batch, queue
        self.num_classes, self.shape = len(data.class_names), data.shape
        _, self.sizes = _by_class(data)
        self.notes = _shortages(data.class_names, self.sizes, batch.positives, queue.class_size)
        _check_memory(self.num_classes * self.options.class_size + self.options.global_size, self.shape)
        self.classes = SampleQueue(self.num_classes, self.options.class_size, self.shape)
        self.everything = SampleQueue(1, self.options.global_size, self.shape)
        self.position = 0  # samples of the stream that have been pushed
        self.step = -1
        self._epoch: tuple[int, Tensor] | None = None
        self._ahead: _Ahead[tuple[Tensor, Tensor]] | None = None
        if ahead or getattr(data, "decodes", False):
            self._ahead = _Ahead()

    def draw(self, step: int, part: slice = slice(None)) -> Draw:
        """The samples of a step, after its push if it is a new one."""
        if step < self.step:
            raise InputError(f"step={step} comes after step {self.step}: queues only go forward")
        if self.position == 0:
            self._fill()
        if step > self.step:
            self._push_next()
            self.step = step
        batch = self.batch
        labels = draw_labels(self.num_classes, batch.classes, derive_generator(self.seed, LABELS, step))
        slots = self.classes.slots(labels, batch.positives, derive_generator(self.seed, POSITIVES, step))
        anywhere = torch.zeros_like(labels)
        others = self.everything.slots(
            anywhere, batch.unconditional, derive_generator(self.seed, UNCONDITIONAL, step)
        )
        return Draw(
            labels[part],
            self.classes.take(labels[part], slots[part]),
            self.everything.take(anywhere[part], others[part]),
        )

    def stream(self, position: int, n: int) -> Tensor:
        """Which samples come at ``position`` and after: every pass over the data in its own order."""
        total, parts = len(self.data.labels), []
        while n > 0:
            epoch, place = divmod(position, total)
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = (
                    epoch,
                    torch.randperm(total, generator=derive_generator(self.seed, STREAM, epoch)),
                )
            parts.append(self._epoch[1][place : place + n])
            position, n = position + len(parts[-1]), n - len(parts[-1])
        return torch.cat(parts)

    def _push_next(self) -> None:
        position, n = self.position, self.options.push
        if self._ahead is None:
            samples, labels = self._load(position)
        else:
            samples, labels = self._ahead.get((position,), lambda: self._load(position))
            self._ahead.start((position + n,), lambda: self._load(position + n))
        self._push(samples, labels)
        self.position += n

    def _load(self, position: int) -> tuple[Tensor, Tensor]:
        indices = self.stream(position, self.options.push)
        samples = self.data.load(indices, derive_seed(self.seed, AUGMENT, position))
        return samples, self.data.labels[indices]

    def _push(self, samples: Tensor, labels: Tensor) -> None:
        self.classes.push(samples, labels)
        self.everything.push(samples, torch.zeros_like(labels))

    def _fill(self) -> None:
        """As if the beginning of the stream had been pushed, but samples that would be dropped again are not
        loaded.
        """
        total = len(self.data.labels)
        order = self.stream(0, total)
        labels = self.data.labels[order]
        needed = self.sizes.clamp(max=self.options.class_size)
        last = (rank_in_class(labels) == needed[labels] - 1).nonzero()[:, 0]
        length = max(int(last.max()) + 1, min(self.options.global_size, total))
        order, labels = order[:length], labels[:length]
        behind = rank_in_class(labels.flip(0)).flip(0)  # how many of the class come later
        for_class = behind < self.options.class_size
        for_all = torch.arange(length) >= length - self.options.global_size
        for places in (for_class | for_all).nonzero()[:, 0].split(FILL):
            samples = self.data.load(order[places], derive_seed(self.seed, AUGMENT, 1, int(places[0])))
            kept = for_class[places]
            self.classes.push(samples[kept], labels[places][kept])
            kept = for_all[places]
            self.everything.push(samples[kept], torch.zeros_like(labels[places][kept]))
        self.position = length

    def state_dict(self) -> dict[str, Tensor]:
        """The queues (not copies), the place in the stream and the last step."""
        return {
            **{f"classes.{name}": value for name, value in self.classes.state_dict().items()},
            **{f"everything.{name}": value for name, value in self.everything.state_dict().items()},
            "position": torch.tensor(self.position),
            "step": torch.tensor(self.step),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts back what :meth:`state_dict` gave. An empty state, as of a run without queues, leaves them to
        be filled at the next step.
        """
        if not state:
            return
        if set(state) != set(self.state_dict()):
            raise InputError(
                f"the state of the queues has {sorted(state)}, expected {sorted(self.state_dict())}"
            )
        for name, queue in (("classes", self.classes), ("everything", self.everything)):
            prefix = f"{name}."
            queue.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )
        self.position, self.step = int(state["position"]), int(state["step"])


def draw_labels(num_classes: int, n: int, generator: torch.Generator | None = None) -> Tensor:
    """The classes of a step ``[n]``, in random order: all different, or, where there are fewer than n, each
    equally often but for a random remainder.
    """
    some = torch.randperm(num_classes, generator=generator)[: n % num_classes if n > num_classes else n]
    if n <= num_classes:
        return some
    labels = torch.cat([torch.arange(num_classes).repeat(n // num_classes), some])
    return labels[torch.randperm(n, generator=generator)]


def draw_groups(sizes: Tensor, groups: int, n: int, generator: torch.Generator | None = None) -> Tensor:
    """``[R, groups, n]``: numbers below ``sizes[r]``, different in all groups of a row where there are
    enough. If not, each comes once before any comes twice, and twice in one group only if n is above the
    size.
    """
    out = torch.empty(len(sizes), groups, n, dtype=torch.int64)
    enough = sizes >= groups * n
    out[enough] = draw_rows(sizes[enough], groups * n, generator).view(-1, groups, n)
    for row in (~enough).nonzero()[:, 0].tolist():
        out[row] = _in_turn(int(sizes[row]), groups, n, generator)
    return out


def _in_turn(size: int, groups: int, n: int, generator: torch.Generator | None) -> Tensor:
    rows, left = [], torch.empty(0, dtype=torch.int64)
    for _ in range(groups):
        row, left = left[:n], left[n:]
        while len(row) < n:
            fresh = torch.randperm(size, generator=generator)
            # Those that this group has already wait until the next one, if it can do without.
            has = torch.isin(fresh, row)
            fresh = torch.cat([fresh[~has], fresh[has]])
            missing = n - len(row)
            row, left = torch.cat([row, fresh[:missing]]), fresh[missing:]
        rows.append(row)
    return torch.stack(rows)


def _by_class(data: RealData) -> tuple[Tensor, Tensor]:
    """The samples ordered by class, and how many each class has."""
    sizes = torch.bincount(data.labels, minlength=len(data.class_names))
    if bool((sizes == 0).any()):
        empty = int((sizes == 0).nonzero()[0])
        raise InputError(
            f"class {empty} ({data.class_names[empty]}) has no samples: add some, or leave the class out"
        )
    return data.labels.argsort(stable=True), sizes


def _shortages(names: list[str], sizes: Tensor, positives: int, queue_size: int | None = None) -> list[str]:
    notes = []
    few = (sizes < positives).nonzero()[:, 0].tolist()
    if few:
        more = f" and {len(few) - 1} more" if len(few) > 1 else ""
        notes.append(
            f"class {names[few[0]]}{more}: {int(sizes[few[0]])} samples, fewer than the "
            f"{positives} positives of a step, so some are repeated in it"
        )
    if queue_size is not None and queue_size < positives:
        notes.append(
            f"queue.class_size={queue_size} is below batch.positives={positives}, "
            "so some positives are repeated in a step"
        )
    return notes


def _check_memory(samples: int, shape: tuple[int, int, int]) -> None:
    needed = samples * 4 * shape[0] * shape[1] * shape[2]
    if not hasattr(os, "sysconf"):
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InputError(
            f"the queues need {needed / 2**30:.0f} GiB, this machine has {there / 2**30:.0f}: "
            "choose queue.kind=index, or a smaller queue.class_size"
        )


class _Ahead(Generic[T]):
    """Does the next piece of work in a thread. A key names the work and decides what it gives, so it makes no
    difference to the result whether it was done ahead.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="driftgen-ahead")
        self._work: tuple[Key, Future[T]] | None = None

    def get(self, key: Key, work: Callable[[], T]) -> T:
        """What the work gives: done ahead, or now."""
        done, self._work = self._work, None
        if done is None:
            return work()
        if done[0] == key:
            return done[1].result()
        if not done[1].cancel():
            wait([done[1]])  # two at once could get into each other's way
        return work()

    def start(self, key: Key, work: Callable[[], T]) -> None:
        """Begins the work that is likely to be asked for next."""
        self._work = key, self._thread.submit(work)


class _Parts:
    """Foretells the next part of a step: steps are asked for in the same parts, in the same order."""

    def __init__(self, whole: Key) -> None:
        self._step = -1
        self._now: list[Key] = []
        self._before: list[Key] = [whole]

    def after(self, step: int, part: Key) -> tuple[int, Key] | None:
        """The step and part that will follow these; None if that is not clear yet."""
        if step != self._step:
            self._step, self._before, self._now = step, self._now or self._before, []
        self._now.append(part)
        n = len(self._now)
        if self._now != self._before[:n]:
            return None
        return (step, self._before[n]) if n < len(self._before) else (step + 1, self._before[0])
