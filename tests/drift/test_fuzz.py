"""Field and loss of random cases against float64. ``tests/support/fuzz.py`` states what is compared."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fuzz
from tests.support.fault_search import run_search
from tests.support.fuzz import Case

# Cases that were wrong once, before the release or while the fuzz was written.
ORDINARY = {
    "groups": 1, "n": 8, "p": 5, "m": 0, "width": 3, "scale": 1.0, "layout": "random", "far": 1e5,
    "weights": None, "dtype": torch.float32, "temperatures": (0.02, 0.05, 0.2), "kernel": "laplace",
    "normalization": "both", "factors": (1.0, 1.0), "convention": "paper", "normalize_features": True,
    "normalize_drift": True, "seed": 0,
}  # fmt: skip
KEPT = {
    "affinities underflow": {"layout": "apart"},
    "a gradient underflows before it is scaled": {
        "normalization": "y", "factors": (0.0, 1.0), "layout": "clusters", "far": 1e3, "n": 2, "p": 2,
        "scale": 1e-30, "weights": "wide", "temperatures": (0.02,), "normalize_drift": False, "seed": 442,
        "convention": "release",
    },
    "positives near samples that are far apart": {
        "target": "field", "layout": "near", "far": 1e7, "p": 1, "factors": (1.0, 0.0), "normalization": "y",
        "temperatures": (1.0,), "seed": 512,
    },
    "distances near the largest float32": {
        "target": "field", "layout": "clusters", "far": 1e7, "scale": 1e30, "n": 17, "m": 4, "width": 33,
        "kernel": "inverse_multiquadric", "normalization": "y", "temperatures": (1e-3,), "seed": 868,
    },
    "weighted sums of distances overflow": {
        "n": 2, "m": 1, "width": 2, "scale": 1e30, "layout": "outlier", "weights": "wide", "seed": 431,
        "dtype": torch.bfloat16, "normalization": "none", "convention": "release",
    },
    "the size of a drift is no float32": {
        "layout": "apart", "normalization": "y", "temperatures": (0.02,), "normalize_drift": False,
        "seed": 421,
    },
    "drifts of raw features underflow": {
        "n": 17, "p": 1, "m": 4, "width": 8, "scale": 1e-20, "layout": "offset", "far": 1e3, "seed": 550,
        "weights": "wide", "temperatures": (0.02,), "normalization": "none", "normalize_features": False,
    },
    "a sample whose only neighbor with weight is itself": {
        "n": 3, "p": 16, "width": 1, "layout": "apart", "weights": "zeros", "temperatures": (0.3,),
        "factors": (0.0, 1.0), "convention": "release", "seed": 962,
    },
    "distances below the bound of the release": {
        "n": 5, "p": 1, "m": 1, "width": 1, "scale": 1e-20, "layout": "clusters", "weights": "zeros",
        "temperatures": (1.0, 50.0), "factors": (1.0, 0.0), "convention": "release", "seed": 733,
    },
    "duplicates at low temperatures": {
        "groups": 2, "n": 3, "p": 2, "m": 1, "width": 8, "scale": 1e-4, "layout": "duplicates",
        "weights": "mild", "dtype": torch.bfloat16, "normalize_features": False, "seed": 476,
    },
}  # fmt: skip


def assert_right(case):
    outcome = fuzz.check(case)
    assert outcome is None or not outcome.problems, f"{'; '.join(outcome.problems)}: {case}"
    return outcome


def random_case(data, targets):
    return fuzz.draw_case(lambda choices: data.draw(st.sampled_from(choices)), targets)


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_kept_cases(change):
    assert assert_right(Case(**{"target": "loss"} | ORDINARY | change)) is not None


@pytest.mark.interpreter
def test_kernels_at_a_temperature_below_float32():
    pytest.importorskip("triton")
    change = {
        "target": "fused", "groups": 2, "n": 2, "p": 1, "m": 1, "width": 8, "scale": 1e3, "weights": "mild",
        "temperatures": (1e-5, 1.0), "convention": "release", "normalize_drift": False, "seed": 768,
    }  # fmt: skip
    assert_right(Case(**ORDINARY | change))


@pytest.mark.interpreter
def test_mean_squared_drifts_of_distant_clusters():
    """The extent is 1e5 times the spread of a cluster, of which errors are a part."""
    pytest.importorskip("triton")
    change = {
        "target": "fused", "p": 16, "m": 4, "width": 1, "layout": "clusters", "weights": "mild",
        "temperatures": (1e-5, 1.0), "kernel": "inverse_multiquadric", "normalization": "y",
        "factors": (1.5, 1.0), "convention": "release", "seed": 906,
    }  # fmt: skip
    assert assert_right(Case(**ORDINARY | change)) is not None


@pytest.mark.interpreter
def test_one_far_negative_among_many_positives():
    """The kernels would return a loss of 0: the call must be left to the eager engine."""
    pytest.importorskip("triton")
    change = {
        "target": "fused", "n": 1, "p": 16, "m": 1, "width": 1, "layout": "near", "far": 1e3, "seed": 415,
        "temperatures": (0.3,), "kernel": "gaussian", "convention": "release",
    }  # fmt: skip
    assert assert_right(Case(**ORDINARY | change)) is not None


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_field_and_loss(data):
    assert_right(random_case(data, ("field", "loss")))


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(st.data())
def test_field_and_loss_for_longer(data):
    assert_right(random_case(data, ("field", "loss")))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_kernels(data):
    pytest.importorskip("triton")
    assert_right(random_case(data, ("fused",)))


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", ["drift", "per_group"])
def test_errors_of_kernels_are_found(wrong, monkeypatch):
    """1% in one result is found."""
    pytest.importorskip("triton")
    case = Case(**ORDINARY | {"target": "fused", "temperatures": (0.2, 1.0)})
    assert assert_right(case) is not None
    exact = fuzz.twin.paper
    monkeypatch.setattr(
        fuzz.twin,
        "paper",
        lambda *a, **k: (r := exact(*a, **k))._replace(**{wrong: 1.01 * getattr(r, wrong)}),
    )
    (problem,) = fuzz.check(case).problems
    assert problem.startswith({"drift": "drift is off by 0.00", "per_group": "loss is off by 0.00"}[wrong])


def test_floors_bound_the_errors_of_squares():
    """Errors of drifts up to their floors stay within what is allowed of mean squares and losses."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = (2, 5, 3)
        values, floors = rng.normal(size=(2, *sizes)), 10 ** rng.uniform(-3, 0, (2, *sizes[:2]))
        noise = rng.normal(size=(2, *sizes))
        noise *= fuzz.LIMIT * floors[..., None] / np.linalg.norm(noise, axis=-1, keepdims=True)
        exact, got = (
            fuzz.twin.combine(
                [fuzz.twin.Drift(v, f, np.zeros_like(f), f) for v, f in zip(drifts, floors, strict=True)],
                1.0,
                1.0,
            )
            for drifts in (values, values + noise)
        )
        allowed = fuzz.LIMIT * fuzz.error_of_square(exact.drift, exact.drift_floors)
        assert (np.abs(got.drift - exact.drift) <= allowed * (1 + 1e-9)).all()
        allowed = fuzz.LIMIT * fuzz.error_of_square(exact.per_group, exact.loss_floors)
        assert (np.abs(got.per_group - exact.per_group) <= allowed * (1 + 1e-2)).all()  # to first order


def test_search():
    counts = run_search(fuzz.search, 60, 1, only="loss", cases=5)
    assert (counts.tried, counts.faults) == (5, [])
    assert 0 < counts.largest["relative error"] < fuzz.LIMIT


def test_wrong_results_are_faults_with_their_case(monkeypatch):
    """A field that is 1% off."""
    exact = fuzz.twin.log_field
    monkeypatch.setattr(
        fuzz.twin, "log_field", lambda *a, **k: (d := exact(*a, **k))._replace(values=1.01 * d.values)
    )
    fault = run_search(fuzz.search, 60, 1, only="field", cases=30).faults[0]
    assert re.match(r"V is off by 0\.0\d+: seed \d+, Case\(target='field', groups=1, ", fault.text)
    seed = int(re.search(r"--seed (\d+) --cases 1 --only field$", fault.command)[1])
    assert run_search(fuzz.search, 60, seed, only="field", cases=1).faults == [fault]
