"""The real samples of a training step, grouped by class: from all data, or from the paper's queues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from driftgen.data.draws import (
    AUGMENT,
    LABELS,
    POSITIVES,
    STREAM,
    UNCONDITIONAL,
    Draw,
    Source,
    StepSizes,
    draw_groups,
    draw_labels,
    group_by_class,
    shortage_notes,
)
from driftgen.data.prefetch import PartPredictor, Prefetcher
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

FILL = 256  # samples loaded at a time while the queues are filled


def open_source(
    data: RealData, batch: StepSizes, queue: Queue, seed: int = 0, *, ahead: bool = False
) -> Source:
    """Build the source that ``queue.kind`` names.

    Samples that are decoded from files are prefetched one step ahead. ``ahead`` prefetches all samples, which
    pays when the training step runs on a GPU and the host would otherwise wait.
    """
    if queue.kind == "index":
        return ClassIndex(data, batch, seed, ahead=ahead)
    return QueueSource(data, batch, queue, seed, ahead=ahead)


class ClassIndex:
    """Draws positives by class and unconditional samples from the whole dataset.

    A step draws no positive twice, even if a class occurs twice in the step. The unconditional samples of one
    class are all different. If there are too few samples, each is drawn once before any is drawn twice. Step
    and seed determine every draw, so there is no state.
    """

    def __init__(self, data: RealData, batch: StepSizes, seed: int = 0, *, ahead: bool = False) -> None:
        self.data, self.seed, self.batch = data, seed, batch
        self.num_classes, self.shape = len(data.class_names), data.shape
        self.order, self.sizes = group_by_class(data)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.notes = shortage_notes(data.class_names, self.sizes, batch.positives)
        self._prefetcher: Prefetcher[Draw] | None = None
        if ahead or getattr(data, "decodes", False):
            self._prefetcher = Prefetcher()
        self._parts = PartPredictor((0, self.batch.classes))

    def draw(self, step: int, part: slice = slice(None)) -> Draw:
        """Return the samples of a step and, with prefetching, start to load the next ones."""
        start, stop, stride = part.indices(self.batch.classes)
        if stride != 1:
            raise InputError(f"part={part} must be a slice of stride 1, such as slice(0, 4)")
        if self._prefetcher is None:
            return self._draw(step, start, stop)
        samples = self._prefetcher.get((step, start, stop), lambda: self._draw(step, start, stop))
        predicted = self._parts.after(step, (start, stop))
        if predicted is not None:
            next_step, (first, last) = predicted
            self._prefetcher.start((next_step, first, last), lambda: self._draw(next_step, first, last))
        return samples

    def _draw(self, step: int, start: int, stop: int) -> Draw:
        labels, positives, unconditional = self.indices(step)
        labels, indices = labels[start:stop], torch.cat([positives, unconditional], dim=1)[start:stop]
        classes, per_class = indices.shape
        first = start * per_class
        samples = self.data.load(indices.flatten(), derive_seed(self.seed, AUGMENT, step), first)
        samples = samples.unflatten(0, (classes, per_class))
        return Draw(labels, samples[:, : self.batch.positives], samples[:, self.batch.positives :])

    def indices(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the labels ``[C]`` of a step and the indices of its samples.

        The indices are those of the positives, ``[C, P]``, and of the unconditional samples, ``[C, U]``.
        """
        batch = self.batch
        labels = draw_labels(self.num_classes, batch.classes, derive_generator(self.seed, LABELS, step))
        present, inverse = labels.unique(return_inverse=True)
        occurrence = rank_in_class(labels)
        groups = draw_groups(
            self.sizes[present],
            int(occurrence.max()) + 1,
            batch.positives,
            derive_generator(self.seed, POSITIVES, step),
        )
        positives = self.order[self.starts[labels][:, None] + groups[inverse, occurrence]]
        everything = torch.full((batch.classes,), len(self.data.labels))
        generator = derive_generator(self.seed, UNCONDITIONAL, step)
        return labels, positives, draw_rows(everything, batch.unconditional, generator)

    def wait(self) -> None:
        """Wait until no sample is loaded in the background."""
        if self._prefetcher is not None:
            self._prefetcher.wait()

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty dict: draws depend on step and seed only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: there is no state."""


class QueueSource:
    """Draws from the paper's queues (appendix "Sample Queue").

    A shuffled stream of the data passes through the queues, ``push`` samples per step. Before the first step
    the queues are filled until every class queue holds as many samples as possible and the global queue is
    full; this takes at most one pass over the data. Each step pushes once, before its first draw, no matter
    how many parts it is drawn in. Steps must not decrease. Every process holds complete queues.

    The state consists of the queues and the position in the stream, so a resumed run draws what an
    uninterrupted run would draw.
    """

    def __init__(
        self, data: RealData, batch: StepSizes, queue: Queue, seed: int = 0, *, ahead: bool = False
    ) -> None:
        self.data, self.seed, self.batch, self.options = data, seed, batch, queue
        self.num_classes, self.shape = len(data.class_names), data.shape
        _, self.sizes = group_by_class(data)
        self.notes = shortage_notes(data.class_names, self.sizes, batch.positives, queue.class_size)
        _check_memory(self.num_classes * self.options.class_size + self.options.global_size, self.shape)
        self.classes = SampleQueue(self.num_classes, self.options.class_size, self.shape)
        self.everything = SampleQueue(1, self.options.global_size, self.shape)
        self.position = 0  # number of samples of the stream pushed so far
        self.step = -1
        self._epoch: tuple[int, Tensor] | None = None
        self._prefetcher: Prefetcher[tuple[Tensor, Tensor]] | None = None
        if ahead or getattr(data, "decodes", False):
            self._prefetcher = Prefetcher()

    def draw(self, step: int, part: slice = slice(None)) -> Draw:
        """Return the samples of a step; the first draw of a new step pushes samples first."""
        if step < self.step:
            raise InputError(
                f"step={step} comes after step {self.step}: queues cannot go back to an earlier step"
            )
        if self.position == 0:
            self._fill()
        if step > self.step:
            self._push_next()
            self.step = step
        batch = self.batch
        labels = draw_labels(self.num_classes, batch.classes, derive_generator(self.seed, LABELS, step))
        slots = self.classes.slots(labels, batch.positives, derive_generator(self.seed, POSITIVES, step))
        global_labels = torch.zeros_like(labels)
        global_slots = self.everything.slots(
            global_labels, batch.unconditional, derive_generator(self.seed, UNCONDITIONAL, step)
        )
        return Draw(
            labels[part],
            self.classes.take(labels[part], slots[part]),
            self.everything.take(global_labels[part], global_slots[part]),
        )

    def stream(self, position: int, n: int) -> Tensor:
        """Return the indices of the n samples from ``position`` on. Every epoch has its own order."""
        total, parts = len(self.data.labels), []
        while n > 0:
            epoch, start = divmod(position, total)
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = (
                    epoch,
                    torch.randperm(total, generator=derive_generator(self.seed, STREAM, epoch)),
                )
            parts.append(self._epoch[1][start : start + n])
            position, n = position + len(parts[-1]), n - len(parts[-1])
        return torch.cat(parts)

    def _push_next(self) -> None:
        position, n = self.position, self.options.push
        if self._prefetcher is None:
            samples, labels = self._load(position)
        else:
            samples, labels = self._prefetcher.get((position,), lambda: self._load(position))
            self._prefetcher.start((position + n,), lambda: self._load(position + n))
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
        """Fill the queues as if the start of the stream had been pushed.

        Samples that later samples would push out are not loaded.
        """
        total = len(self.data.labels)
        order = self.stream(0, total)
        labels = self.data.labels[order]
        needed = self.sizes.clamp(max=self.options.class_size)
        last = (rank_in_class(labels) == needed[labels] - 1).nonzero()[:, 0]
        length = max(int(last.max()) + 1, min(self.options.global_size, total))
        order, labels = order[:length], labels[:length]
        later_in_class = rank_in_class(labels.flip(0)).flip(0)  # number of later samples of the same class
        in_class_queue = later_in_class < self.options.class_size
        in_global_queue = torch.arange(length) >= length - self.options.global_size
        for places in (in_class_queue | in_global_queue).nonzero()[:, 0].split(FILL):
            samples = self.data.load(order[places], derive_seed(self.seed, AUGMENT, 1, int(places[0])))
            mask = in_class_queue[places]
            self.classes.push(samples[mask], labels[places][mask])
            mask = in_global_queue[places]
            self.everything.push(samples[mask], torch.zeros_like(labels[places][mask]))
        self.position = length

    def wait(self) -> None:
        """Wait until no sample is loaded in the background."""
        if self._prefetcher is not None:
            self._prefetcher.wait()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the queues (not copies), the position in the stream and the last step."""
        return {
            **{f"classes.{name}": value for name, value in self.classes.state_dict().items()},
            **{f"everything.{name}": value for name, value in self.everything.state_dict().items()},
            "position": torch.tensor(self.position),
            "step": torch.tensor(self.step),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of :meth:`state_dict`.

        An empty state, as of a run without queues, leaves the queues to be filled at the next step.
        """
        if not state:
            return
        if set(state) != set(self.state_dict()):
            raise InputError(
                f"the state of the queues has keys {sorted(state)}, expected {sorted(self.state_dict())}"
            )
        for name, queue in (("classes", self.classes), ("everything", self.everything)):
            prefix = f"{name}."
            queue.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )
        self.position, self.step = int(state["position"]), int(state["step"])


def _check_memory(samples: int, shape: tuple[int, int, int]) -> None:
    needed = samples * 4 * shape[0] * shape[1] * shape[2]
    if not hasattr(os, "sysconf"):
        return
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"the queues need {needed / 2**30:.0f} GiB, this machine has {available / 2**30:.0f} GiB: "
            "set queue.kind=index, or lower queue.class_size"
        )
