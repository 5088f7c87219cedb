"""Codecs of a training state: bounds of their errors, sizes, and what they never change."""

import math

import pytest
import torch

from driftgen.training.tensor_codecs import BLOCK, CODECS

SIZES = [0, 1, 2, 255, 256, 257, 1001]


def draw(n, seed=0):
    """Values of very different size."""
    r = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=r) * 10 ** (4 * torch.rand(n, generator=r) - 4)


def round_trip(name, values):
    codec = CODECS[name]
    stored = codec.encode(values)
    assert stored.dtype == torch.uint8
    assert stored.shape == (codec.length(values.numel()),)
    decoded = codec.decode(stored, tuple(values.shape))
    assert decoded.shape == values.shape
    assert decoded.dtype == torch.float32
    return decoded


def by_block(flat):
    return [flat[i : i + BLOCK] for i in range(0, len(flat), BLOCK)]


@pytest.mark.parametrize("n", SIZES)
def test_float32_is_exact(n):
    values = torch.cat([draw(n), torch.tensor([0.0, -0.0, 1e-42, -1e-42, 3.4e38])])
    decoded = round_trip("float32", values)
    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("name", "error"), [("float24", 2**-16), ("float16", 2**-8)])
@pytest.mark.parametrize("n", SIZES)
def test_shorter_floats_are_rounded_to_nearest(name, error, n):
    values = torch.cat([draw(n), -draw(n, 1), torch.tensor([0.0, 1.0, -2.0])]).view(-1, 1)
    decoded = round_trip(name, values)
    assert ((decoded - values).abs() <= error * values.abs()).all()
    assert torch.equal(decoded[-3:], values[-3:])


def test_float16_is_bfloat16():
    values = draw(1000)
    assert torch.equal(round_trip("float16", values), values.bfloat16().float())


@pytest.mark.parametrize(
    ("name", "steps"), [("linear8", 127), ("linear7", 63), ("linear4", 7), ("linear3", 3)]
)
@pytest.mark.parametrize("n", SIZES)
def test_linear_codes_err_by_half_a_step_of_their_block(name, steps, n):
    values = draw(n)
    decoded = round_trip(name, values)
    for mine, expected in zip(by_block(decoded), by_block(values), strict=True):
        largest = float(expected.abs().max())
        # The scale is rounded to bfloat16.
        assert float((mine - expected).abs().max()) <= largest * (0.5 / steps + 2**-8)
    assert torch.equal(round_trip(name, torch.zeros(n)), torch.zeros(n))


@pytest.mark.parametrize(("name", "steps"), [("log16", 65534), ("log8", 254), ("log4", 14)])
@pytest.mark.parametrize("n", SIZES)
def test_logarithmic_codes_err_by_half_a_step_and_never_lose_a_value(name, steps, n):
    values = draw(n).square()
    values[::7] = 0
    decoded = round_trip(name, values)
    assert torch.equal(decoded == 0, values == 0)
    for mine, expected in zip(by_block(decoded), by_block(values), strict=True):
        positive = expected > 0
        if positive.any():
            logs = expected[positive].double().log2()
            half = float(logs.max() - logs.min()) / steps / 2
            assert float((mine[positive].double().log2() - logs).abs().max()) <= half + 2e-5


def test_the_smallest_second_moments_stay_positive():
    values = torch.tensor([1e-45, 1e-38, 1e-30, 1.0, 1e30])
    for name in ("log16", "log8", "log4"):
        decoded = round_trip(name, values)
        assert (decoded > 0).all()
        assert decoded.isfinite().all()
        assert (decoded[1:] >= decoded[:-1]).all()


@pytest.mark.parametrize("n", SIZES)
def test_means_of_blocks(n):
    values = draw(n).square()
    decoded = round_trip("mean", values)
    for mine, expected in zip(by_block(decoded), by_block(values), strict=True):
        assert mine.unique().numel() == 1
        assert float(mine[0]) == pytest.approx(float(expected.double().mean()), rel=2**-8)
    assert torch.equal(round_trip("zero", values), torch.zeros(n))


def test_bytes_per_value():
    n = 256 * 50
    bytes_of = {name: codec.length(n) / n for name, codec in CODECS.items()}
    assert bytes_of["float24"] == 3
    assert bytes_of["linear8"] == 1 + 2 / 256
    assert bytes_of["linear4"] == 0.5 + 2 / 256
    assert bytes_of["log8"] == 1 + 8 / 256
    assert math.isclose(bytes_of["mean"], 2 / 256)
    assert bytes_of["zero"] == 0
