"""Odd arguments of the public functions: a finite answer or one line."""

import random

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.support.checked_arguments import checked, fits
from tests.support import odd_api_inputs
from tests.support.api_call import Call
from tests.support.api_calls import CALLS
from tests.support.helpers import fails
from tests.support.odd_api_inputs import Case, largest, make_case, odd_value, try_call, try_case

QUICK = [call for call in CALLS if call.quick]


def test_every_public_name_has_a_call():
    """Modules of the package have calls of their own functions; Run and LossOutput are results."""
    called = " ".join(call.name for call in CALLS)
    classes = {"InputError", "LossOutput", "Run", "features", "generators", "data"}
    missing = [name for name in dg.__all__ if name not in called and name not in classes]
    assert not missing
    for room in (dg.generators, dg.features):
        results = {"Generator", "Noise", "Encoder", "MAEOutput", "DecodeFirst"}
        names = [n for n in room.__all__ if not n.endswith("Config") and n not in results]
        assert not [name for name in names if name not in called]


@pytest.mark.parametrize("call", QUICK, ids=lambda call: call.name)
def test_calls_work_before_they_are_made_odd(call, tmp_path):
    kind, problem = try_case(Case(call, call.arguments(tmp_path), ()))
    assert problem is None
    assert kind == ("refused" if call.name in ("load_official", "Backbone") else "answered")


@pytest.mark.parametrize("call", QUICK, ids=lambda c: c.name)
def test_odd_arguments(call):
    counts = try_call(call, 0, 12)
    assert not counts.faults, "\n".join(map(str, counts.faults))
    assert counts.tried == 12 == counts.kinds["answered"] + counts.kinds["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.name)
def test_many_odd_arguments(call):
    counts = try_call(call, 1000, 200 if call.quick else 20)
    assert not counts.faults, "\n".join(map(str, counts.faults[:10]))


def broken(kind):
    if kind == "nan":
        return torch.tensor(float("nan"))
    raise KeyError(kind) if kind == "bug" else dg.InputError(kind)


@pytest.mark.parametrize(
    ("kind", "problem"), [("nan", "the answer is not finite"), ("bug", "KeyError: 'bug'"), ("one", None)]
)
def test_faults_are_found(kind, problem):
    call = Call("broken", broken, lambda folder: {"kind": kind})
    assert try_case(Case(call, {"kind": kind}, ()))[1] == problem


def test_a_hang_is_a_fault(monkeypatch):
    def forever(x):
        while True:
            pass

    call = Call("forever", forever, lambda folder: {"x": 1})
    assert "HangError" in try_case(Case(call, {"x": 1}, ()), 0.1)[1]


def test_cases_are_kept_by_their_seed(tmp_path):
    call = next(call for call in CALLS if call.name == "drift_field")
    first, again = (make_case(call, 7, tmp_path) for _ in range(2))
    assert first.odd == again.odd
    assert odd_api_inputs.describe(first.arguments) == odd_api_inputs.describe(again.arguments)
    kinds = {odd_api_inputs.describe(odd_value(torch.ones(2, 3), random.Random(seed))) for seed in range(400)}
    assert len(kinds) > 60


def test_largest_number():
    assert largest({"a": [1, torch.tensor([-3.0])], "b": (np.array([2.0]), "x", None)}) == 3
    assert largest([torch.tensor([float("nan")])]) == largest(np.array([-np.inf])) == float("inf")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, True), (np.int64(1), int, True), (True, int, False), (1.0, int, False), (2**70, int, False),
        (1, float, True), (float("nan"), float, False), (10**400, float, False), (np.float32(1), float, True),
        ([1, 2], tuple[int, int], True), ([1], tuple[int, int], False), ("ab", list[str], False),
        ((1, 2, 3), tuple[int, ...], True), ({"a": 1}, dict[str, int], True), ({1: 1}, dict[str, int], False),
        (None, int | None, True), ("x", int | None, False), (object(), torch.dtype, False),
        (object(), object, True),
    ],
)  # fmt: skip
def test_values_that_fit_an_annotation(value, hint, expected):
    assert fits(value, hint) is expected


def test_checked_functions_tell_the_argument_and_keep_their_own_errors():
    @checked
    def build(size: int, weight: torch.Tensor | None = None, **options: str) -> torch.Tensor:
        if options:
            raise KeyError("own")
        return torch.zeros(size, 2**20)

    assert build(2).shape == (2, 2**20)
    fails(lambda: build(2.5), "size=2.5 must be a whole number")
    fails(lambda: build(2, [1]), r"weight=\[1\] must be a tensor or None")
    fails(lambda: build(2, torch.eye(2).to_sparse()), "weight is sparse")
    fails(lambda: build(2**40), "build: the sizes need more memory than there is")
    with pytest.raises(KeyError, match="own"):
        build(2, name="x")
    with pytest.raises(TypeError, match="missing 1 required"):
        build()


def test_messages_have_one_line():
    assert str(dg.InputError("a\nb")) == "a b"
