"""The residual stream from the kernels against float64 (run as ``support.interpreter`` says)."""

import pytest
import torch

from driftgen.ops import adaln as stream_ops
from driftgen.ops import dispatch
from tests.support.accuracy import error
from tests.support.block_cases import (
    ALLOWED,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    SUMMED,
    draw,
    gradients,
    owed,
    poison,
)
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


def exact_norm(x, weight, scale, shift):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * (1 + scale) + shift


def exact_residual(x, branch, gate, bias=None):
    return x + gate * owed(branch, bias)


def exact_gated_norm(x, branch, gate, weight, scale, shift, bias=None):
    total = exact_residual(x, branch, gate, bias)
    return total, exact_norm(total, weight, scale, shift)


STREAM = {
    "modulated_norm": (stream_ops.modulated_norm, exact_norm),
    "stream_norm": (stream_ops.stream_norm, lambda x, *rest: (x, exact_norm(x, *rest))),
    "gated_norm": (stream_ops.gated_norm, exact_gated_norm),
    "gated_residual": (stream_ops.gated_residual, exact_residual),
}


@pytest.mark.parametrize("name", STREAM)
@pytest.mark.parametrize(
    ("batch", "tokens", "width", "dtype"),
    [(2, 17, 48, FLOAT32), (3, 5, 64, FLOAT16), (1, 6, 768, BFLOAT16), (1, 3, 1040, BFLOAT16)],
)
def test_stream_is_exact(name, batch, tokens, width, dtype):
    function, exact_function = STREAM[name]
    # Some tokens of a longer stream, and slices of one modulation.
    x = draw(batch, tokens + 2, width, dtype=dtype, scale=2)[:, 2:]
    gate, scale, shift = draw(batch, 1, 3 * width, scale=0.5).to(dtype).float().chunk(3, dim=-1)
    inputs = [x]
    if "gated" in name:
        inputs += [draw(batch, tokens, width, dtype=dtype), gate]
    if "norm" in name:
        inputs += [1 + draw(width, scale=0.3), scale, shift]
    if "gated" in name:
        inputs.append(draw(width))
    upstream = [draw(batch, tokens, width, dtype=dtype) for _ in range(2 if name[0] in "gs" else 1)]
    upstream = upstream[: 1 if name == "gated_residual" else 2]
    found = gradients(function, inputs, upstream)
    exact = gradients(exact_function, [t.double() for t in inputs], upstream)
    for got, want in zip(found[0], exact[0], strict=True):
        assert got.dtype == dtype
        assert error(got, want) < ALLOWED[dtype]
    for given, got, want in zip(inputs, found[1], exact[1], strict=True):
        assert got.dtype == given.dtype
        # What sums read was rounded before: by itself, or as part of the norm.
        summed = max(SUMMED, ALLOWED[dtype] if name == "gated_norm" else 0)
        assert error(got, want) < (ALLOWED[dtype] if given.ndim == 3 and given.shape[1] > 1 else summed)


@pytest.mark.parametrize("name", ["gated_norm", "gated_residual"])
def test_a_bias_changes_nothing_else(name, monkeypatch):
    """Nor do two runs differ, nor is anything left unwritten."""
    function = STREAM[name][0]
    inputs = [draw(2, 21, 48, dtype=BFLOAT16), draw(2, 21, 48, dtype=BFLOAT16), draw(2, 1, 48)]
    if name == "gated_norm":
        inputs += [draw(48), draw(2, 1, 48), draw(2, 1, 48)]
    upstream = [draw(2, 21, 48, dtype=BFLOAT16) for _ in range(2)][: 1 if "residual" in name else 2]
    plain = gradients(function, inputs, upstream)
    poison(monkeypatch)
    inputs.append(draw(48, dtype=BFLOAT16))
    runs = [gradients(function, inputs, upstream) for _ in range(2)]
    for first, second in zip(*(outputs + found for outputs, found in runs), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
    for first, second in zip(plain[0] + plain[1], runs[0][0] + runs[0][1][:-1], strict=True):
        assert torch.equal(first, second)
    assert runs[0][1][-1].dtype == BFLOAT16


def test_operators():
    x, branch, grad = (draw(2, 9, 32) for _ in range(3))
    gate, scale, shift = draw(2, 1, 96).chunk(3, dim=-1)
    weight = draw(32)
    check = torch.library.opcheck
    check(stream_ops._norm, (x, branch, gate, weight, scale, shift))
    check(stream_ops._norm, (x, None, None, weight, scale, shift))
    check(stream_ops._norm_back, (grad, grad, x, weight, scale, branch, gate))
    check(stream_ops._norm_back, (None, grad, x, weight, scale, None, None))
    check(stream_ops._residual, (x, branch, gate))
    check(stream_ops._residual_back, (grad, branch, gate))


def test_modulation_is_rounded_as_the_stream_is():
    """What all tokens of a sample share would else differ between training and sampling."""
    x, branch = (draw(2, 5, 32, dtype=BFLOAT16) for _ in range(2))
    parts = [draw(2, 1, 32) for _ in range(3)]
    weight = torch.ones(32, device=DEVICE)
    rounded = [t.bfloat16().float() for t in parts]
    upstream = [draw(2, 5, 32, dtype=BFLOAT16) for _ in range(2)]

    def run(gate, scale, shift, weight):
        return stream_ops.gated_norm(x, branch, gate, weight, scale, shift)

    for got, want in zip(
        gradients(run, [*parts, weight], upstream),
        gradients(run, [*rounded, weight], upstream),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("width", "dtype", "covered"),
    [
        (16, FLOAT32, True),
        (768, BFLOAT16, True),
        (2048, FLOAT16, True),
        (2064, FLOAT32, False),
        (40, FLOAT32, False),
        (64, torch.float64, False),
    ],
)
def test_which_streams_are_covered(width, dtype, covered):
    x = torch.zeros(2, 3, width, dtype=dtype, device=DEVICE)
    assert stream_ops.supports_adaln(x) == covered
    with torch.no_grad():
        assert not stream_ops.supports_adaln(x)
    with dispatch.without_kernels():
        assert not stream_ops.supports_adaln(x)
