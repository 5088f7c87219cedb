from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgen.data.queue import SampleQueue, draw_rows, rank_in_class
from driftgen.errors import InputError

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "07_memory_bank.npz")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def push_golden(queue, upto=5):
    for k in range(upto):
        queue.push(torch.from_numpy(GOLDEN[f"s{k}_samples"]), torch.from_numpy(GOLDEN[f"s{k}_labels"]))


@pytest.mark.parametrize("pushes", range(1, 6))
def test_contents_match_the_release(pushes):
    queue = SampleQueue(4, 3, (2, 2))
    push_golden(queue, pushes)
    for name, value in (("bank", queue.bank), ("ptr", queue.pointer), ("count", queue.count)):
        np.testing.assert_array_equal(value.numpy(), GOLDEN[f"s{pushes - 1}_{name}"])


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=6))
@settings(max_examples=60, deadline=None)
def test_push_equals_one_by_one(size, batches):
    whole, single = SampleQueue(3, size, ()), SampleQueue(3, size, ())
    number = 0.0
    for batch in batches:
        samples, labels = torch.arange(len(batch)) + number, torch.tensor(batch, dtype=torch.int64)
        whole.push(samples, labels)
        for sample, label in zip(samples, labels, strict=True):
            single.push(sample[None], label[None])
        number += len(batch)
    for a, b in zip(whole.state_dict().values(), single.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_draw_is_without_replacement_and_of_the_right_class():
    queue = SampleQueue(3, 50, ())
    labels = torch.arange(3).repeat(50)
    queue.push(torch.arange(150.0), labels)
    drawn = queue.draw(torch.tensor([2, 0, 2]), 20, generator())
    assert drawn.shape == (3, 20)
    assert (drawn % 3 == torch.tensor([[2], [0], [2]])).all()
    assert all(len(row.unique()) == 20 for row in drawn)
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn, queue.draw(torch.tensor([2, 0, 2]), 20, generator()))
    assert not torch.equal(drawn, queue.draw(torch.tensor([2, 0, 2]), 20, generator(1)))


def test_a_short_queue_is_exhausted_before_it_repeats():
    queue = SampleQueue(4, 3, (2, 2))
    push_golden(queue, 3)  # counts 3, 2, 1, 0
    drawn = queue.slots(torch.tensor([0, 1, 2]), 7, generator())
    counts = [row.bincount(minlength=3).tolist() for row in drawn]
    assert sorted(counts[0]) == [2, 2, 3]
    assert sorted(counts[1]) == [0, 3, 4]
    assert counts[2] == [7, 0, 0]


def test_an_empty_class_is_an_error_not_zeros():
    queue = SampleQueue(4, 3, (2, 2))
    push_golden(queue)
    with pytest.raises(InputError, match="class 3 is empty"):
        queue.draw(torch.tensor([0, 3]), 2)


@pytest.mark.parametrize(
    ("samples", "labels", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 1]), "expected \\[2, 2\\]"),
        (torch.zeros(1, 2), torch.tensor([0, 1]), "one sample per label"),
        (torch.zeros(1, 2), torch.tensor([2]), "expected 0 ... 1"),
        (torch.zeros(1, 2), torch.tensor([-1]), "expected 0 ... 1"),
        (torch.zeros(1, 2), torch.tensor([0.0]), "integers"),
    ],
)
def test_wrong_pushes_are_errors(samples, labels, message):
    with pytest.raises(InputError, match=message) as error:
        SampleQueue(2, 3, (2,)).push(samples, labels)
    assert "\n" not in str(error.value)


def test_a_state_is_a_view_of_all_tensors():
    """Not of some: restored later, it would mix two moments."""
    queue = SampleQueue(2, 3, (1,))
    state = queue.state_dict()
    queue.push(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0]))
    assert all(torch.equal(state[name], value) for name, value in queue.state_dict().items())
    assert state["count"].tolist() == [2, 0]
    assert state["pointer"].tolist() == [2, 0]


def test_state_loads_into_another_queue():
    queue, other = SampleQueue(4, 3, (2, 2)), SampleQueue(4, 3, (2, 2))
    push_golden(queue, 3)
    other.load_state_dict(queue.state_dict())
    queue.push(torch.ones(1, 2, 2), torch.tensor([0]))
    assert not torch.equal(queue.bank, other.bank)  # a copy, not shared memory
    other.push(torch.ones(1, 2, 2), torch.tensor([0]))
    for a, b in zip(queue.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="shape"):
        SampleQueue(4, 5, (2, 2)).load_state_dict(queue.state_dict())


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 25), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_rows_repeat_as_little_as_possible(sizes, n, seed):
    rows = draw_rows(torch.tensor(sizes), n, generator(seed))
    assert rows.shape == (len(sizes), n)
    for size, row in zip(sizes, rows, strict=True):
        if n:
            counts = row.bincount(minlength=size)
            assert len(counts) == size
            assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("size", [5, 12])  # one size per algorithm: random keys, first distinct integers
def test_rows_are_uniform_in_value_and_order(size):
    n, times = 4, 40_000
    rows = draw_rows(torch.full((times,), size), n, generator()) if size >= 2 * n else None
    if rows is None:
        rows = torch.cat([draw_rows(torch.full((200,), size), n, generator(i)) for i in range(20)])
    pairs = (rows[:, 0] * size + rows[:, -1]).bincount(minlength=size * size).view(size, size).double()
    assert (pairs.diagonal() == 0).all()
    expected = len(rows) / (size * (size - 1))
    off = pairs[~torch.eye(size, dtype=torch.bool)]
    chi = ((off - expected) ** 2 / expected).sum() / (len(off) - 1)
    assert chi < 1.6


@given(st.lists(st.integers(0, 4), max_size=30))
@settings(max_examples=50, deadline=None)
def test_rank_in_class(labels):
    got = rank_in_class(torch.tensor(labels, dtype=torch.int64)).tolist()
    assert got == [labels[:i].count(label) for i, label in enumerate(labels)]


def test_labels_of_a_draw_are_integers():
    queue = SampleQueue(2, 3, (1,))
    queue.push(torch.ones(2, 1), torch.tensor([0, 1]))
    for labels in (torch.tensor([0.9]), torch.tensor([True])):
        with pytest.raises(InputError, match=r"expected \[B\] integers"):
            queue.draw(labels, 2)
