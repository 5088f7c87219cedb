"""The SwiGLU kernels against float64 and PyTorch; ``tests.support.interpreter`` decides where they run."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from driftgen.generators.dit import SwiGLU
from driftgen.ops import dispatch
from driftgen.ops import swiglu as swiglu_ops
from tests.support.accuracy import error
from tests.support.block_cases import (
    ALLOWED,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    SUMMED,
    draw,
    gradients,
    leaf,
    poison,
)
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


def exact_output(both, bias, weight, output_bias):
    """``both`` includes the detached bias, so its gradient must be added by hand."""
    gate, value = (both + (bias - bias.detach())).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, weight, output_bias)


def case(shape, width, size, dtype):
    """Return gate and value, their bias, and weight and bias of the output layer in float32."""
    return [draw(*shape, 2 * width, dtype=dtype, scale=2), draw(2 * width), draw(size, width), draw(size)]


@pytest.mark.parametrize(
    ("shape", "width", "size", "dtype"),
    [
        ((2, 17), 64, 48, FLOAT32),
        ((1, 3, 5), 20, 7, FLOAT32),
        ((70,), 96, 16, BFLOAT16),
        ((2, 5), 1056, 16, BFLOAT16),
        ((3, 9), 33, 24, FLOAT16),
    ],
)
def test_output_is_exact(shape, width, size, dtype):
    inputs = case(shape, width, size, dtype)
    inputs[2:] = [t.to(dtype).float() for t in inputs[2:]]  # the product rounds weight and bias
    upstream = [draw(*shape, size, dtype=dtype)]
    found = gradients(swiglu_ops.swiglu_output, inputs, upstream)
    exact = gradients(exact_output, [t.double() for t in inputs], upstream)
    assert found[0][0].dtype == dtype
    assert error(found[0][0], exact[0][0]) < 2 * ALLOWED[dtype]
    for given, got, want in zip(inputs, found[1], exact[1], strict=True):
        assert got.dtype == given.dtype
        assert error(got, want) < 2 * ALLOWED[dtype]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16])
def test_activation_and_its_gradients(dtype):
    """Each result is rounded once; the sums are those of the gradients before rounding."""
    both, grad = draw(37, 2 * 48, dtype=dtype, scale=3), draw(37, 48, dtype=dtype)
    found = swiglu_ops._swiglu(both)
    by_both, again, sums = swiglu_ops._swiglu_backward(grad, both)
    exact = leaf(both, torch.float64)
    gate, value = exact.chunk(2, dim=-1)
    y = F.silu(gate) * value
    (by_exact,) = torch.autograd.grad(y, exact, grad.double())
    assert found.dtype == by_both.dtype == dtype
    assert sums.dtype == FLOAT32
    assert torch.equal(found, again)
    assert error(found, y) < ALLOWED[dtype]
    assert error(by_both, by_exact) < ALLOWED[dtype]
    assert error(sums, by_exact.sum(0)) < SUMMED


def test_extreme_gates():
    gate = torch.tensor([-1e4, -100.0, -88.5, -1e-30, 0.0, 1e-30, 100.0, 1e4], device=DEVICE)
    both = torch.cat([gate, torch.full_like(gate, 3.0)])[None]
    grad = torch.ones(1, 8, device=DEVICE)
    exact = leaf(both)
    y = F.silu(exact[:, :8]) * exact[:, 8:]
    (wanted,) = torch.autograd.grad(y, exact, grad)
    found, again, sums = swiglu_ops._swiglu_backward(grad, both)
    for got, want in ((found, wanted), (again, y), (swiglu_ops._swiglu(both), y), (sums[None], wanted)):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-30)


def test_runs_are_deterministic_and_write_everything(monkeypatch):
    """Also with many chunks of rows, the last of them smaller."""
    monkeypatch.setattr(swiglu_ops, "CHUNKS", 5)
    poison(monkeypatch)
    inputs = case((3, 37), 40, 16, BFLOAT16)
    upstream = [draw(3, 37, 16, dtype=BFLOAT16)]
    runs = [gradients(swiglu_ops.swiglu_output, inputs, upstream) for _ in range(2)]
    for first, second in zip(*(outputs + found for outputs, found in runs), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
    monkeypatch.setattr(swiglu_ops, "CHUNKS", 1)
    other = gradients(swiglu_ops.swiglu_output, inputs, upstream)
    assert error(other[1][1], runs[0][1][1]) < SUMMED


def test_strided_rows():
    inputs = case((4, 6), 32, 16, FLOAT32)
    upstream = [draw(4, 6, 16)]
    wanted = gradients(swiglu_ops.swiglu_output, inputs, upstream)
    inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    inputs[2] = inputs[2].t().contiguous().t()
    upstream[0] = upstream[0].transpose(0, 1).contiguous().transpose(0, 1)
    found = gradients(swiglu_ops.swiglu_output, inputs, upstream)
    torch.testing.assert_close(found, wanted)


def test_no_rows():
    inputs = case((0, 6), 32, 16, FLOAT32)
    outputs, found = gradients(swiglu_ops.swiglu_output, inputs, [draw(0, 6, 16)])
    assert outputs[0].shape == (0, 6, 16)
    assert all(t.shape == given.shape and not t.any() for t, given in zip(found, inputs, strict=True))


def test_operators():
    both, grad = draw(2, 9, 64), draw(18, 32)
    torch.library.opcheck(swiglu_ops._swiglu, (both,))
    torch.library.opcheck(swiglu_ops._swiglu_backward, (grad, both))


@pytest.mark.parametrize("dtype", [None, BFLOAT16, FLOAT16])
def test_a_layer_agrees_with_pytorch(dtype):
    torch.manual_seed(0)
    layer = SwiGLU(48, 80).to(DEVICE)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, upstream, runs = draw(2, 9, 48), draw(2, 9, 48), []
    for context in (dispatch.without_kernels(), nullcontext()):
        layer.zero_grad()
        given = leaf(x)
        with context, torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            out = layer(given)
        out.backward(upstream.to(out.dtype))
        runs.append([out, given.grad, *(p.grad for p in layer.parameters())])
    names = ["result", "x", *(name for name, _ in layer.named_parameters())]
    for name, want, got in zip(names, *runs, strict=True):
        assert got.dtype == want.dtype
        assert error(got, want) < (1e-6 if dtype is None else 3 * ALLOWED[dtype]), name


def test_saved_tensors():
    """Gate and value are saved in one tensor, and their product is not saved."""
    layer, saved = SwiGLU(48, 80).to(DEVICE), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.setdefault(t.untyped_storage().data_ptr(), t), t)[1], lambda t: t
    ):
        layer(draw(2, 9, 48))
    sizes = [t.numel() for t in saved.values()]
    assert sizes.count(18 * 160) == 1
    assert 18 * 80 not in sizes


def test_supported_layers():
    layer = SwiGLU(16, 32).to(DEVICE)
    layers, x = (layer.gate, layer.value, layer.output), draw(1, 2, 16)
    assert swiglu_ops.supports_swiglu(x, *layers)
    assert not swiglu_ops.supports_swiglu(x.double(), *layers)
    assert not swiglu_ops.supports_swiglu(x, torch.nn.Identity(), *layers[1:])
    with torch.no_grad():
        assert not swiglu_ops.supports_swiglu(x, *layers)
    with dispatch.without_kernels():
        assert not swiglu_ops.supports_swiglu(x, *layers)
    layer.value.register_forward_hook(lambda *_: None)
    assert not swiglu_ops.supports_swiglu(x, *layers)
