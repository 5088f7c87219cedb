"""The adaLN kernels against float64; ``tests.support.interpreter`` decides where they run."""

import pytest
import torch

from driftgen.ops import adaln, dispatch
from tests.support.accuracy import error
from tests.support.block_cases import (
    ALLOWED,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    SUMMED,
    draw,
    gradients,
    poison,
)
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


def exact_norm(x, weight, scale, shift):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * (1 + scale) + shift


def exact_residual(x, branch, gate):
    return x + gate * branch


def exact_gated_norm(x, branch, gate, weight, scale, shift):
    total = exact_residual(x, branch, gate)
    return total, exact_norm(total, weight, scale, shift)


FUNCTIONS = {
    "modulated_norm": (adaln.modulated_norm, exact_norm),
    "residual_norm": (adaln.residual_norm, lambda x, *rest: (x, exact_norm(x, *rest))),
    "gated_norm": (adaln.gated_norm, exact_gated_norm),
    "gated_residual": (adaln.gated_residual, exact_residual),
}
OUTPUTS = {"modulated_norm": 1, "residual_norm": 2, "gated_norm": 2, "gated_residual": 1}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("batch", "tokens", "width", "dtype"),
    [(2, 17, 48, FLOAT32), (3, 5, 64, FLOAT16), (1, 6, 768, BFLOAT16), (1, 3, 1040, BFLOAT16)],
)
def test_functions_are_exact(name, batch, tokens, width, dtype):
    function, exact_function = FUNCTIONS[name]
    # A slice of a longer stream, and slices of one modulation.
    x = draw(batch, tokens + 2, width, dtype=dtype, scale=2)[:, 2:]
    gate, scale, shift = draw(batch, 1, 3 * width, scale=0.5).to(dtype).float().chunk(3, dim=-1)
    inputs = [x]
    if "gated" in name:
        inputs += [draw(batch, tokens, width, dtype=dtype), gate]
    if "norm" in name:
        inputs += [1 + draw(width, scale=0.3), scale, shift]
    upstream = [draw(batch, tokens, width, dtype=dtype) for _ in range(OUTPUTS[name])]
    found = gradients(function, inputs, upstream)
    exact = gradients(exact_function, [t.double() for t in inputs], upstream)
    for got, want in zip(found[0], exact[0], strict=True):
        assert got.dtype == dtype
        assert error(got, want) < ALLOWED[dtype]
    for given, got, want in zip(inputs, found[1], exact[1], strict=True):
        assert got.dtype == given.dtype
        # The sums read rounded values; those of a gated norm are rounded twice.
        summed = max(SUMMED, ALLOWED[dtype] if name == "gated_norm" else 0)
        assert error(got, want) < (ALLOWED[dtype] if given.ndim == 3 and given.shape[1] > 1 else summed)


@pytest.mark.parametrize("name", ["gated_norm", "gated_residual"])
def test_runs_are_deterministic_and_write_everything(name, monkeypatch):
    function = FUNCTIONS[name][0]
    inputs = [draw(2, 21, 48, dtype=BFLOAT16), draw(2, 21, 48, dtype=BFLOAT16), draw(2, 1, 48)]
    if name == "gated_norm":
        inputs += [draw(48), draw(2, 1, 48), draw(2, 1, 48)]
    upstream = [draw(2, 21, 48, dtype=BFLOAT16) for _ in range(OUTPUTS[name])]
    poison(monkeypatch)
    runs = [gradients(function, inputs, upstream) for _ in range(2)]
    for first, second in zip(*(outputs + grads for outputs, grads in runs), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


@pytest.mark.slow
def test_operators():
    x, branch, grad = (draw(2, 9, 32) for _ in range(3))
    gate, scale, shift = draw(2, 1, 96).chunk(3, dim=-1)
    weight = draw(32)
    check = torch.library.opcheck
    check(adaln._norm, (x, branch, gate, weight, scale, shift))
    check(adaln._norm, (x, None, None, weight, scale, shift))
    check(adaln._norm_backward, (grad, grad, x, weight, scale, branch, gate))
    check(adaln._norm_backward, (None, grad, x, weight, scale, None, None))
    check(adaln._residual, (x, branch, gate))
    check(adaln._residual_backward, (grad, branch, gate))


def test_modulation_is_rounded_as_the_stream_is():
    """Otherwise training and sampling would differ."""
    x, branch = (draw(2, 5, 32, dtype=BFLOAT16) for _ in range(2))
    parts = [draw(2, 1, 32) for _ in range(3)]
    weight = torch.ones(32, device=DEVICE)
    rounded = [t.bfloat16().float() for t in parts]
    upstream = [draw(2, 5, 32, dtype=BFLOAT16) for _ in range(2)]

    def run(gate, scale, shift, weight):
        return adaln.gated_norm(x, branch, gate, weight, scale, shift)

    for got, want in zip(
        gradients(run, [*parts, weight], upstream),
        gradients(run, [*rounded, weight], upstream),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("width", "dtype", "supported"),
    [
        (16, FLOAT32, True),
        (768, BFLOAT16, True),
        (2048, FLOAT16, True),
        (2064, FLOAT32, False),
        (40, FLOAT32, False),
        (64, torch.float64, False),
    ],
)
def test_supported_shapes_and_dtypes(width, dtype, supported):
    x = torch.zeros(2, 3, width, dtype=dtype, device=DEVICE)
    assert adaln.supports_adaln(x) == supported
    with torch.no_grad():
        assert not adaln.supports_adaln(x)
    with dispatch.without_kernels():
        assert not adaln.supports_adaln(x)


def test_layer_norm_without_parameters():
    """A weight of None means LayerNorm, computed by PyTorch."""
    x, branch = draw(2, 5, 32), draw(2, 5, 32)
    gate, scale, shift = draw(2, 1, 96).chunk(3, dim=-1)
    total, normed = adaln.gated_norm(x, branch, gate, None, scale, shift)
    wide = x.double() + gate.double() * branch.double()
    centered = wide - wide.mean(-1, keepdim=True)
    want = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift
    assert error(total, wide) < 1e-6
    assert error(normed, want) < 1e-6
