"""Convolutions with frozen weights against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from driftgen.features import ResNetMAE
from driftgen.features.resnet_layers import Conv
from driftgen.ops import dispatch, frozen_conv
from driftgen.ops.frozen_conv import align, supports_frozen_conv
from tests.support.interpreter import DEVICE, _kernels_everywhere  # noqa: F401

CHANNELS_LAST = torch.channels_last


def frozen(*sizes, **options):
    return Conv(*sizes, **options).to(DEVICE, memory_format=CHANNELS_LAST).requires_grad_(False)


def images(channels, b=4, h=8, w=6):
    return torch.randn(b, channels, h, w).to(DEVICE).contiguous(memory_format=CHANNELS_LAST)


def with_gradient(conv, x, upstream, kernels=True):
    x = x.clone().requires_grad_()
    if kernels:
        y = conv(x)
    else:
        with dispatch.without_kernels():
            y = conv(x)
    y.backward(upstream)
    return y.detach(), x.grad


def assert_same(result, expected):
    """The last digit may differ on a GPU, where cuDNN chooses between algorithms."""
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected) or DEVICE == "cuda"
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"kernel": 1}, {"kernel": 1, "stride": 2}, {"kernel": 5}], ids=str
)
def test_equals_pytorch(options, dtype):
    conv, x = frozen(8, 16, **options), images(8)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        upstream = torch.randn_like(conv(x))
        assert upstream.dtype == dtype
        for given in (upstream, upstream.contiguous(), upstream[:1, :1, :1, :1].expand_as(upstream)):
            expected = with_gradient(conv, x, given, kernels=False)
            for result, reference in zip(with_gradient(conv, x, given), expected, strict=True):
                assert_same(result, reference)


def test_the_input_is_not_saved():
    conv, saved = frozen(8, 8), []
    x = images(8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = conv(x)
    assert [t.shape for t in saved] == [conv.weight.shape]
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_locations():
    cases = [(frozen(8, 16), images(8)), (frozen(8, 16, stride=2), images(8))]
    for conv, x in [*cases, (frozen(8, 4, kernel=1), images(8, h=5))]:
        assert frozen_conv._locations(x, conv.weight, *conv.sizes) == conv(x)[:, 0].numel()


@pytest.mark.cuda
def test_halves(monkeypatch):
    """Two halves replace the whole at the one slow size."""
    conv, x = frozen(8, 16, stride=2), images(8)
    expected = conv(x)
    monkeypatch.setattr(frozen_conv, "SLOW_LOCATIONS", expected[:, 0].numel())
    real, sizes = F.conv2d, []
    monkeypatch.setattr(F, "conv2d", lambda x, *rest: sizes.append(len(x)) or real(x, *rest))
    assert_same(conv(x), expected)
    conv(images(8, b=5))
    assert sizes == [2, 2, 5]


def test_support(monkeypatch):
    conv, x = frozen(8, 8), images(8)
    assert supports_frozen_conv(x, conv.weight)
    assert not supports_frozen_conv(x.bfloat16(), conv.weight)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert supports_frozen_conv(x.bfloat16(), conv.weight)
    assert not supports_frozen_conv(x.double(), conv.weight.double())
    conv.requires_grad_()
    assert not supports_frozen_conv(x, conv.weight)
    conv(x).sum().backward()
    assert conv.weight.grad is not None
    with torch.no_grad():
        assert supports_frozen_conv(x, conv.weight)
    monkeypatch.setattr(dispatch, "DEVICES", set())
    assert not supports_frozen_conv(x, conv.weight.detach())


def test_inside_a_compiled_function():
    conv, x = frozen(8, 8), images(8)
    torch._dynamo.reset()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), conv(x))


def test_an_encoder_saves_no_inputs_of_convolutions():
    """Each map is saved at most twice: by a norm, and by the pyramid."""
    mae = ResNetMAE(3, 8, (2,), decoder=False).to(DEVICE).requires_grad_(False)
    mae.to(memory_format=CHANNELS_LAST)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        maps = mae.encode(images(3, h=4, w=4).requires_grad_(), every_k_block=0)
    assert all(value.requires_grad for value in maps.values())
    pixels = [t for t in saved if t.shape[0] == 4 and t.ndim == 4]
    # One for each of six norms, and the output of ReLU after the two that add another map.
    assert len(pixels) == 6 + 2


@pytest.mark.cuda
@pytest.mark.parametrize("channels", [3, 12])
def test_few_channels_are_padded(channels):
    conv, x = frozen(channels, 64), images(channels).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        padded, weight = align(x.bfloat16(), conv.weight.bfloat16())
        assert padded.shape[1] == weight.shape[1] == channels + -channels % 8
        upstream = torch.randn(4, 64, 8, 6, device="cuda")
        expected = with_gradient(conv, x.detach(), upstream.bfloat16(), kernels=False)
        for result, reference in zip(
            with_gradient(conv, x.detach(), upstream.bfloat16()), expected, strict=True
        ):
            assert result.shape == reference.shape
            assert_same(result, reference)


def test_float32_and_the_cpu_pad_nothing():
    x, weight = torch.randn(1, 3, 4, 4), torch.randn(8, 3, 3, 3)
    assert all(a is b for a, b in zip(align(x, weight), (x, weight), strict=True))
    x, weight = x.bfloat16(), weight.bfloat16()
    assert all(a is b for a, b in zip(align(x, weight), (x, weight), strict=True))
