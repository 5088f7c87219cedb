"""The group norm kernels against float64; ``tests.support.interpreter`` decides where they run."""

import pytest
import torch
import torch.nn.functional as F

from driftgen.features import ResNetMAE
from driftgen.features.resnet_layers import Norm
from driftgen.ops import dispatch
from driftgen.ops.group_norm import group_norm, supports_group_norm
from tests.support.accuracy import error
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


def maps(shape, dtype=torch.float32, offset=0.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng) + offset
    return x.to(DEVICE, dtype).to(memory_format=torch.channels_last)


def weights(channels):
    return 1 + 0.5 * torch.randn(channels, device=DEVICE), torch.randn(channels, device=DEVICE)


def exact(x, groups, weight, bias, eps, other, relu):
    y = F.group_norm(x.double(), groups, weight.double(), bias.double(), eps)
    y = y if other is None else y + other.double()
    return y.relu() if relu else y


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_other", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 16, 4, 4), 4),
        ((3, 6, 3, 5), 3),
        ((2, 64, 2, 2), 2),
        ((1, 40, 6, 6), 10),
        ((1, 32, 32, 32), 4),
        ((2, 24, 33, 31), 3),
        ((1, 48, 30, 20), 3),
        ((1, 256, 4, 4), 2),
    ],
    ids=str,
)
def test_agrees_with_float64(shape, groups, with_other, relu):
    x, weight, bias = maps(shape), *weights(shape[1])
    other = maps(shape, seed=1) if with_other else None
    assert supports_group_norm(x, groups, weight, bias, other)
    leaves = [t for t in (x, other) if t is not None]
    wide = [t.double().requires_grad_() for t in leaves]
    wanted = exact(wide[0], groups, weight, bias, 1e-6, wide[1] if with_other else None, relu)
    upstream = maps(shape, seed=2)
    gradients = torch.autograd.grad(wanted, wide, upstream.double())
    for leaf in leaves:
        leaf.requires_grad_()
    y = group_norm(x, groups, weight, bias, 1e-6, other, relu)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert error(y, wanted) < 1e-6
    # Upstream gradients may have any memory format.
    for given in (upstream, upstream.contiguous()):
        for found, best in zip(
            torch.autograd.grad(y, leaves, given, retain_graph=True), gradients, strict=True
        ):
            assert error(found, best) < 1e-5


@pytest.mark.parametrize("shape", [(2, 8, 4, 4), (2, 16, 40, 40)], ids=str)
def test_a_large_mean_costs_no_precision(shape):
    x, (weight, bias) = maps(shape, offset=1000.0), weights(shape[1])
    x[:, :, 0, 0] = -5000.0
    y = group_norm(x, 2, weight, bias, 1e-6, None, False)
    # Near 1000 the spacing of float32 is 6e-5, and the mean is rounded to it.
    assert error(y, exact(x, 2, weight, bias, 1e-6, None, False)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_maps_are_rounded_once(dtype):
    x, other, (weight, bias) = maps((2, 32, 4, 4), dtype), maps((2, 32, 4, 4), dtype, seed=1), weights(32)
    y = group_norm(x, 8, weight, bias, 1e-6, other, True)
    wanted = exact(x, 8, weight, bias, 1e-6, other, True).to(dtype)
    assert y.dtype == dtype
    assert (y != wanted).double().mean() < 1e-2  # where it lies between two numbers
    assert error(y, wanted) < (1e-4 if dtype == torch.float16 else 1e-3)


@pytest.mark.parametrize("shape", [(2, 32, 4, 4), (2, 32, 3, 5), (1, 16, 32, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_an_addition_the_mask_is_recomputed(dtype, shape):
    """The gradient is masked exactly where y is 0, also where rounding to the dtype gave 0."""
    channels = shape[1]
    x, weight, bias = maps(shape, dtype), *weights(channels)
    # Most y are near 0: below the range of float16, above it, and where products and sums round both ways.
    weight = weight * torch.tensor([1.0, 1e-7, 1e-8, 1e-4], device=DEVICE).repeat(channels // 4)
    bias = bias * torch.tensor([1.0, 1e-8, 0.0, 1e-4], device=DEVICE).repeat(channels // 4)
    x = torch.where(torch.rand(shape, device=DEVICE) < 0.3, x[:, :, :1, :1], x)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    y = group_norm(x, 4, weight, bias, 1e-6, None, True)
    if dtype == torch.float16:
        unrounded = F.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-6)
        assert ((unrounded > 1e-9) & (y == 0)).any()
    upstream = maps(shape, dtype, seed=2)
    (found,) = torch.autograd.grad(y, x, upstream)
    # The same with a separate ReLU, masked by the stored y.
    plain = group_norm(x, 4, weight, bias, 1e-6, None, False)
    (wanted,) = torch.autograd.grad(plain, x, torch.where(y > 0, upstream, 0))
    if DEVICE == "cuda" and dtype == torch.float32:
        # Compilers join products and sums as they like: not a last digit of an element, but far less than
        # what one element of the weakest channel, 1e-8, would add in passing.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-9)
    else:
        assert torch.equal(found, wanted)


def test_saved_tensors():
    x, other, (weight, bias) = maps((2, 16, 4, 4)), maps((2, 16, 4, 4), seed=1), weights(16)
    x.requires_grad_()
    for added, relu, more in ((None, False, 0), (None, True, 0), (other, False, 0), (other, True, 1)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            group_norm(x, 4, weight, bias, 1e-6, added, relu)
        assert len([t for t in kept if t.shape == x.shape]) == 1 + more


def test_supported_maps(monkeypatch):
    x, (weight, bias) = maps((2, 16, 4, 4)), weights(16)
    assert supports_group_norm(x, 4, weight, bias, x)
    assert not supports_group_norm(x.contiguous(), 4, weight, bias, None)
    assert not supports_group_norm(x, 4, weight, bias, x.contiguous())
    assert not supports_group_norm(x.double(), 4, weight, bias, None)
    assert not supports_group_norm(maps((2, 12, 4, 4)), 4, *weights(12), None)  # groups of three channels
    assert supports_group_norm(maps((1, 64, 32, 32)), 1, *weights(64), None)
    assert not supports_group_norm(maps((1, 64, 64, 64)), 1, *weights(64), None)  # too large for registers
    assert not supports_group_norm(x, 4, weight.requires_grad_(), bias, None)
    with torch.no_grad():
        assert supports_group_norm(x, 4, weight, bias, None)
    monkeypatch.setattr(dispatch, "DEVICES", set())
    assert not supports_group_norm(x, 4, weight.detach(), bias, None)


def test_an_encoder_is_the_same_with_kernels_and_without(monkeypatch):
    torch.manual_seed(0)
    mae = ResNetMAE(3, 8, (1, 2), decoder=False).to(DEVICE).requires_grad_(False)
    mae.to(memory_format=torch.channels_last)
    for module in mae.modules():
        if isinstance(module, Norm):
            torch.nn.init.normal_(module.weight, 1, 0.3)
            torch.nn.init.normal_(module.bias, 0, 0.3)
    found = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        x = maps((2, 3, 8, 8)).requires_grad_()
        features = mae.features(x)
        sum((value**2).sum() for value in features.values()).backward()
        found.append((features, x.grad))
    (features, gradient), (others, wanted) = found
    for name, value in features.items():
        assert error(value, others[name]) < 1e-5, name
    assert error(gradient, wanted) < 1e-4
