import json
from pathlib import Path

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.drift.guidance import alpha_at, sample_alpha, unconditional_weight

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "05_cfg.npz")
CASES = json.loads((DATA / "05_cfg.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["key"])
def test_alpha_agrees_with_the_release(case):
    options = (case[k] for k in ("cfg_min", "cfg_max", "neg_cfg_pw", "no_cfg_frac"))
    got = alpha_at(torch.tensor(GOLDEN["frac"]), torch.tensor(GOLDEN["frac2"]), *options)
    np.testing.assert_allclose(got, GOLDEN[case["key"]], rtol=1e-5)


def test_weights_agree_with_the_release():
    for alpha, generated, unconditional, weight in GOLDEN["uncond_w_table"]:
        got = unconditional_weight(torch.tensor(alpha), int(generated), int(unconditional))
        assert got.item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("power", [1.0, 3.0, 5.0])
def test_density(power):
    """Compare the histogram of draws with the integral of α^-power."""
    alpha = sample_alpha(200_000, 1.0, 4.0, power, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([1.0, 1.2, 1.5, 2.0, 3.0, 4.0], dtype=torch.float64)
    integral = edges.log() if power == 1 else edges ** (1 - power) / (1 - power)
    want = integral.diff() / (integral[-1] - integral[0])
    got = torch.histogram(alpha.double(), edges)[0] / len(alpha)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-3)


@pytest.mark.parametrize("power", [-1000.0, -50.0, 60.0, 1000.0])
def test_powers_beyond_the_range_of_floats(power):
    """Quantiles α with ∫_low^α = u ∫_low^high, from logarithms."""
    u, low, high = np.linspace(0.01, 0.99, 99), 2.0, 4.0
    a, b = (1 - power) * np.log([low, high])
    want = np.exp(np.logaddexp(np.log(1 - u) + a, np.log(u) + b) / (1 - power))
    got = alpha_at(torch.tensor(u), torch.ones(99), low, high, power)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_fraction_without_guidance():
    alpha = sample_alpha(100_000, no_guidance=0.3, generator=torch.Generator().manual_seed(0))
    assert (alpha == 1).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert torch.equal(
        alpha, sample_alpha(100_000, no_guidance=0.3, generator=torch.Generator().manual_seed(0))
    )


@pytest.mark.parametrize(
    "options",
    [
        {"low": 0.5}, {"low": 3, "high": 2}, {"no_guidance": 1.5}, {"high": np.inf}, {"power": np.nan},
        {"power": -np.inf},
    ],
)  # fmt: skip
def test_errors(options):
    with pytest.raises(dg.InputError):
        sample_alpha(3, **options)
