import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgen.data.class_batches import (
    ClassIndex,
    QueueSource,
    StepSizes,
    draw_groups,
    draw_labels,
    open_source,
)
from driftgen.data.config import Queue
from driftgen.errors import InputError


class Numbers:
    """Sample i is the number i plus a fraction that stands for augmentation, from seed and position."""

    shape = (1, 1, 1)

    def __init__(self, labels, decodes=False):
        self.labels = torch.as_tensor(labels)
        self.class_names = [f"class {c}" for c in range(int(self.labels.max()) + 1)]
        self.decodes = decodes
        self.calls = []

    def load(self, indices, seed, first=0):
        self.calls.append((len(indices), threading.current_thread().name))
        place = torch.arange(first, first + len(indices))
        fraction = ((place * 7919 + seed % 1_000_003) % 499).float() / 500
        return (indices.float() + fraction)[:, None, None, None]

    def close(self):
        pass


def balanced(classes, each):
    return torch.arange(classes).repeat(each)


def whole(samples):
    """Return the sample indices."""
    return samples.floor().long().flatten(1)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def joined(draws):
    return [torch.cat(parts) for parts in zip(*draws, strict=True)]


SOURCES = {"index": {}, "queue": {"kind": "queue", "class_size": 8, "global_size": 20, "push": 5}}


def opened(kind, labels, decodes=False, *, classes=4, positives=6, unconditional=3, seed=0):
    sizes = StepSizes(classes, positives, unconditional)
    return open_source(Numbers(labels, decodes), sizes, Queue(**SOURCES[kind]), seed)


@pytest.mark.parametrize("kind", SOURCES)
def test_prefetched_samples_are_the_same(kind):
    """They are loaded before they are drawn: those of step 4 before step 4."""
    sizes, options = StepSizes(4, 6, 3), Queue(**SOURCES[kind])
    straight, ahead = (
        open_source(Numbers(balanced(5, 20)), sizes, options, 3, ahead=ahead) for ahead in (False, True)
    )
    for step in range(4):
        assert same(straight.draw(step), ahead.draw(step))
    ahead._prefetcher._pending[1].result()  # later loads would fail
    ahead.data.load = None
    assert same(straight.draw(4), ahead.draw(4))


def test_open_source_follows_the_options():
    assert isinstance(opened("index", balanced(5, 20)), ClassIndex)
    assert isinstance(opened("queue", balanced(5, 20)), QueueSource)


@pytest.mark.parametrize("kind", SOURCES)
def test_shapes_classes_and_difference(kind):
    source = opened(kind, balanced(5, 20), positives=6, unconditional=7)
    for step in range(5):
        labels, positives, unconditional = source.draw(step)
        assert positives.shape == (4, 6, 1, 1, 1)
        assert unconditional.shape == (4, 7, 1, 1, 1)
        assert len(labels.unique()) == 4
        assert (source.data.labels[whole(positives)] == labels[:, None]).all()
        assert all(len(row.unique()) == 6 for row in whole(positives))
        assert all(len(row.unique()) == 7 for row in whole(unconditional))
        assert len(source.data.labels[whole(unconditional)].unique()) > 1


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("decodes", [False, True])
def test_parts_of_a_step_add_up_to_the_step(kind, decodes):
    straight, parted = (opened(kind, balanced(3, 20), decodes, seed=5) for _ in range(2))
    for step in range(6):
        parts = [parted.draw(step, slice(0, 1)), parted.draw(step, slice(1, 4))]
        assert same(straight.draw(step), joined(parts))


@pytest.mark.parametrize("kind", SOURCES)
def test_draws_depend_only_on_seed_and_step(kind):
    first, again, other = (opened(kind, balanced(5, 20), seed=seed) for seed in (1, 1, 2))
    assert same(first.draw(0), again.draw(0))
    assert not same(first.draw(1), other.draw(1))
    assert not same(first.draw(2), first.draw(3))


def test_index_can_start_at_any_step():
    straight = opened("index", balanced(5, 20))
    for step in range(4):
        last = straight.draw(step)
    assert same(last, opened("index", balanced(5, 20)).draw(3))
    assert straight.state_dict() == {}


def test_index_does_not_repeat_samples_if_a_class_occurs_twice():
    source = opened("index", balanced(3, 40), classes=8, positives=10, unconditional=0)
    for step in range(10):
        labels, positives, unconditional = source.draw(step)
        assert unconditional.shape == (8, 0, 1, 1, 1)
        assert sorted(labels.bincount().tolist()) == [2, 3, 3]
        assert len(whole(positives).unique()) == 80


def test_index_reaches_every_sample_and_every_class_equally_often():
    source = opened("index", balanced(10, 30), classes=4, positives=5, unconditional=2)
    seen, labels, anywhere = torch.zeros(300), torch.zeros(10), torch.zeros(300)
    for step in range(600):
        chosen, positives, unconditional = source.indices(step)
        seen += positives.flatten().bincount(minlength=300)
        labels += chosen.bincount(minlength=10)
        anywhere += unconditional.flatten().bincount(minlength=300)
    assert ((labels - 240).abs() < 60).all()  # 5 standard deviations
    assert ((seen - 40).abs() < 36).all()
    assert ((anywhere - 16).abs() < 22).all()


def test_augmentation_differs_between_steps_and_positions():
    source = opened("index", [0], classes=2, positives=2, unconditional=1)
    fractions = torch.cat([source.draw(step)[k].flatten() for step in (0, 1) for k in (1, 2)])
    assert len(fractions.unique()) == 12  # of the one sample there is


@pytest.mark.parametrize("kind", SOURCES)
def test_few_samples_are_each_drawn_before_any_twice_and_noted(kind):
    source = opened(kind, [0] * 3 + [1] * 50 + [2], classes=3, positives=8)
    assert len(source.notes) == 1
    assert "class 0 and 1 more: 3 samples, fewer than the 8 positives" in source.notes[0]
    labels, positives, _ = source.draw(0)
    counts = {
        int(label): row.unique(return_counts=True)[1]
        for label, row in zip(labels, whole(positives), strict=True)
    }
    assert sorted(counts[0].tolist()) == [2, 3, 3]
    assert counts[1].tolist() == [1] * 8
    assert counts[2].tolist() == [8]
    assert not opened(kind, balanced(3, 50)).notes


@pytest.mark.parametrize("kind", SOURCES)
def test_one_class_and_one_sample(kind):
    labels, positives, unconditional = opened(kind, [0], classes=3, positives=2).draw(0)
    assert labels.tolist() == [0, 0, 0]
    assert positives.shape == (3, 2, 1, 1, 1)
    assert (whole(positives) == 0).all()
    assert (whole(unconditional) == 0).all()


@pytest.mark.parametrize("kind", SOURCES)
def test_a_class_without_samples_is_named(kind):
    with pytest.raises(InputError, match=r"class 1 \(class 1\) has no samples"):
        opened(kind, [0, 0, 2])


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_labels_are_balanced(num_classes, n, seed):
    labels = draw_labels(num_classes, n, torch.Generator().manual_seed(seed))
    counts = labels.bincount(minlength=num_classes)
    assert len(labels) == n
    assert len(counts) == num_classes
    assert counts.max() - counts.min() <= 1


def test_labels_are_in_random_order():
    places = torch.zeros(3)
    for seed in range(300):
        places += draw_labels(3, 6, torch.Generator().manual_seed(seed))[0] == torch.arange(3)
    assert (places > 60).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_groups_repeat_as_little_as_possible(sizes, groups, n):
    drawn = draw_groups(torch.tensor(sizes), groups, n, torch.Generator().manual_seed(0))
    for size, rows in zip(sizes, drawn, strict=True):
        counts = rows.flatten().bincount(minlength=size)
        assert len(counts) == size
        assert counts.max() - counts.min() <= 1
        assert n > size or all(len(row.unique()) == n for row in rows)


def test_queues_are_filled_before_the_first_step():
    source = opened("queue", [0] * 30 + [1] * 3 + [2] * 12)
    source.draw(0)
    # The whole middle class, and its samples that the first step pushed again.
    assert source.classes.count.tolist() in ([8, 3, 8], [8, 4, 8])
    assert int(source.everything.count) == 20
    assert source.position <= 45 + 5


def test_filling_equals_pushing_the_start_of_the_stream():
    source = opened("queue", balanced(4, 30))
    source._fill()
    order = source.stream(0, source.position)
    for label in range(4):
        of_class = order[source.data.labels[order] == label][-8:]
        assert sorted(source.classes.bank[label].floor().flatten().tolist()) == sorted(of_class.tolist())
    assert sorted(source.everything.bank.floor().flatten().tolist()) == sorted(order[-20:].tolist())


def test_filling_does_not_load_samples_that_it_would_drop():
    source = opened("queue", [0] * 400 + [1] * 8)
    source._fill()
    assert source.position > 100
    assert sum(n for n, _ in source.data.calls) <= 8 + 8 + 20


def test_the_stream_visits_all_data_in_a_new_order_each_time():
    source = opened("queue", balanced(4, 30))
    passes = source.stream(0, 360).view(3, 120)
    assert (passes.sort(1).values == torch.arange(120)).all()
    assert not torch.equal(passes[0], passes[1])
    pieces = torch.cat([source.stream(i, 36) for i in range(0, 360, 36)])
    assert torch.equal(pieces, passes.flatten())


def test_new_samples_reach_the_queues_once_per_step():
    source = opened("queue", balanced(4, 30))
    source.draw(0)
    position = source.position
    source.draw(1, slice(0, 2))
    source.draw(1, slice(2, 4))
    assert source.position == position + 5
    newest = source.stream(position, 5)
    held = source.everything.bank.floor().flatten().long()
    assert torch.isin(newest, held).all()
    with pytest.raises(InputError, match="step=0 comes after step 1"):
        source.draw(0)


@pytest.mark.parametrize("decodes", [False, True])
def test_a_resumed_queue_matches_an_uninterrupted_one(decodes):
    labels = balanced(4, 13)
    straight = opened("queue", labels, decodes)
    for step in range(20):
        expected = straight.draw(step)
    first = opened("queue", labels, decodes)
    for step in range(7):
        first.draw(step)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    first.draw(7)
    resumed = opened("queue", labels, decodes)
    resumed.load_state_dict(state)
    for step in range(7, 20):
        got = resumed.draw(step)
    assert same(expected, got)
    assert same(straight.state_dict().values(), resumed.state_dict().values())


def test_mismatched_queue_states_are_errors():
    source = opened("queue", balanced(4, 13))
    source.draw(0)
    state = source.state_dict()
    with pytest.raises(InputError, match="bank of the stored queue has shape"):
        opened("queue", balanced(5, 13)).load_state_dict(state)
    with pytest.raises(InputError, match="expected"):
        source.load_state_dict({"position": torch.tensor(1)})
    fresh = opened("queue", balanced(4, 13))
    fresh.load_state_dict({})  # from a run without queues: filled as usual
    assert same(fresh.draw(0), opened("queue", balanced(4, 13)).draw(0))


def test_queues_larger_than_memory_are_errors():
    data = Numbers(balanced(4, 13))
    data.shape = (3, 1 << 12, 1 << 12)
    with pytest.raises(InputError, match=r"queues need .* GiB"):
        QueueSource(data, StepSizes(4, 6, 3), Queue(kind="queue", class_size=1 << 20))


@pytest.mark.parametrize("parts", [[slice(None)], [slice(0, 2), slice(2, 4)]])
def test_the_next_samples_are_prefetched(parts):
    source = opened("index", balanced(5, 20), decodes=True)
    for step in range(4):
        for part in parts:
            source.draw(step, part)
    time.sleep(0.05)
    here = [n for n, thread in source.data.calls if not thread.startswith("driftgen-ahead")]
    # Once the parts are known, everything is prefetched.
    assert len(here) <= 2 * len(parts)
    ahead = [n for n, thread in source.data.calls if thread.startswith("driftgen-ahead")]
    assert len(ahead) + len(here) <= 4 * len(parts) + 2


def test_a_mispredicted_step_is_still_correct():
    plain, ahead = (opened("index", balanced(5, 20), decodes=decodes) for decodes in (False, True))
    for step, part in ((0, slice(None)), (7, slice(None)), (7, slice(1, 3)), (2, slice(0, 2))):
        assert same(plain.draw(step, part), ahead.draw(step, part))


def test_an_error_while_prefetching_reaches_the_caller():
    source = opened("index", balanced(5, 20), decodes=True)
    source.draw(0)
    source._prefetcher._pending[1].result()

    def fail(*_):
        raise InputError("a file is gone")

    source.draw(1)
    source._prefetcher._pending[1].result()
    source.data.load = fail
    source.draw(2)
    with pytest.raises(InputError, match="a file is gone"):
        source.draw(3)


def test_a_thousand_classes_are_fast():
    data = Numbers(torch.arange(1_280_000) % 1000)
    source = ClassIndex(data, StepSizes(classes=64, positives=64, unconditional=16))
    source.indices(0)
    times = []
    for step in range(10):
        began = time.perf_counter()
        source.indices(step)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.02
