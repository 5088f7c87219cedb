"""Frozen convolutions against those of PyTorch."""

import copy

import pytest
import torch

from driftgen.features import ResNetMAE
from driftgen.features.resnet_layers import Conv
from driftgen.ops import dispatch, frozen_conv
from tests.support.interpreter import DEVICE, _kernels_everywhere  # noqa: F401

CHANNELS_LAST = torch.channels_last


def conv_of(*sizes, dtype=torch.float32, **options):
    """Return a frozen convolution and an input map."""
    conv = Conv(*sizes, **options).to(DEVICE, dtype, memory_format=CHANNELS_LAST).requires_grad_(False)
    return conv, images(sizes[0], dtype=dtype)


def images(channels, b=4, h=8, w=6, dtype=torch.float32):
    x = torch.randn(b, channels, h, w, dtype=dtype)
    return x.to(DEVICE).contiguous(memory_format=CHANNELS_LAST)


def plain(conv, x):
    """Compute the convolution with PyTorch."""
    with dispatch.without_kernels():
        return conv(x)


def with_gradient(function, x, upstream):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(upstream)
    return y.detach(), x.grad


def assert_same(found, wanted):
    """Compare; on a GPU, where cuDNN chooses between algorithms, the last digit may differ."""
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted) or DEVICE == "cuda"
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("layout", [CHANNELS_LAST, torch.contiguous_format], ids=["nhwc", "nchw"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((8, 8), {}),
        ((8, 16), {}),
        ((8, 16), {"stride": 2}),
        ((8, 16), {"kernel": 1}),
        ((8, 16), {"kernel": 1, "stride": 2}),
        ((1, 4), {}),
        ((3, 1), {"kernel": 5}),
    ],
    ids=str,
)
def test_equals_pytorch(sizes, options, layout):
    conv, x = conv_of(*sizes, **options)
    x = x.contiguous(memory_format=layout)
    assert frozen_conv.supports_frozen_conv(conv, x)
    wanted = plain(conv, x)
    upstream = torch.randn_like(wanted)
    wanted, gradient = with_gradient(lambda x: plain(conv, x), x, upstream)
    y, found = with_gradient(conv, x, upstream)
    assert_same(y, wanted)
    assert_same(found, gradient)
    assert y.is_contiguous(memory_format=CHANNELS_LAST)
    assert_same(conv(x), wanted)  # without gradient
    # Upstream gradients may have any memory format.
    for given in (upstream.contiguous(), upstream[:1, :1, :1, :1].expand_as(upstream)):
        _, gradient = with_gradient(lambda x: plain(conv, x), x, given)
        assert_same(with_gradient(conv, x, given)[1], gradient)


def test_under_autocast():
    conv, x = conv_of(8, 16)
    with torch.autocast(DEVICE, torch.bfloat16):
        wanted = plain(conv, x)
        upstream = torch.randn_like(wanted)
        wanted, gradient = with_gradient(lambda x: plain(conv, x), x, upstream)
        y, found = with_gradient(conv, x, upstream)
    assert y.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert_same(y, wanted)
    assert_same(found, gradient)
    assert conv._cast(conv.weight, torch.bfloat16) is conv._cast(conv.weight, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"stride": 2}], ids=str)
def test_the_input_is_not_saved(options, dtype):
    conv, x = conv_of(8, 8, **options)
    kept, x = [], x.requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        y = conv(x)
    assert [(t.shape, t.dtype) for t in kept] == [(conv.weight.shape, dtype)]
    y.sum().backward()
    assert x.grad.isfinite().all()


def changed_by_loading(conv):
    conv.load_state_dict({"weight": torch.randn_like(conv.weight)})


def changed_by_assigning(conv):
    conv.load_state_dict({"weight": torch.randn_like(conv.weight)}, assign=True)
    conv.requires_grad_(False)


def changed_in_place(conv):
    with torch.no_grad():
        conv.weight.mul_(-2)


def changed_by_training(conv):
    conv.requires_grad_(True)
    conv(images(8)).sum().backward()
    torch.optim.SGD(conv.parameters(), 0.1).step()
    conv.requires_grad_(False)


def changed_by_rounding(conv):
    """The second conversion may find memory at the address of the first weight."""
    conv.to(torch.float8_e5m2).float()  # fewer digits than TF32 and bfloat16 have


@pytest.mark.parametrize(
    "change",
    [changed_by_loading, changed_by_assigning, changed_in_place, changed_by_training, changed_by_rounding],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_changed_weight_invalidates_the_cache(change, dtype):
    conv, x = conv_of(8, 8)
    conv.to(memory_format=torch.contiguous_format)  # so that float32 needs a copy too
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        before = conv(x)
        assert conv._cast.cached is not None
        change(conv)
        y = conv(x)
        assert_same(y, plain(conv, x))
    assert not torch.equal(y, before)  # halved digits at the least


def test_copies_start_with_an_empty_cache():
    conv, x = conv_of(8, 8)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = conv(x)
        assert conv._cast.cached is not None
        other = copy.deepcopy(conv)
        assert other._cast.cached is None
        assert_same(other(x), y)
        assert copy.copy(conv._cast).cached is None  # as pickling does
    assert list(conv.state_dict()) == ["weight"]


def test_a_weight_cached_in_inference_mode_can_be_used_for_gradients():
    conv, x = conv_of(8, 8)
    with torch.autocast(DEVICE, torch.bfloat16):
        with torch.inference_mode():
            y = conv(x)
        leaf = x.clone().requires_grad_()
        found = conv(leaf)
    assert_same(found, y)
    found.sum().backward()
    assert leaf.grad is not None


def test_supported_convolutions(monkeypatch):
    conv, x = conv_of(8, 8)
    assert frozen_conv.supports_frozen_conv(conv, x)
    assert not frozen_conv.supports_frozen_conv(conv, x.bfloat16())
    with torch.autocast(DEVICE, torch.bfloat16):
        assert frozen_conv.supports_frozen_conv(conv, x.bfloat16())
    with pytest.raises(RuntimeError):
        conv(x.bfloat16())
    assert not frozen_conv.supports_frozen_conv(conv.double(), x.double())
    conv = conv.float().requires_grad_()
    assert not frozen_conv.supports_frozen_conv(conv, x)
    with torch.no_grad():
        assert frozen_conv.supports_frozen_conv(conv, x)
    assert conv(x).requires_grad
    monkeypatch.setattr(dispatch, "DEVICES", set())
    assert not frozen_conv.supports_frozen_conv(conv.requires_grad_(False), x)


def test_inside_a_compiled_function():
    conv, x = conv_of(8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x), conv(x))


def test_an_encoder_saves_no_inputs_of_convolutions():
    """Each map is saved at most twice: for a norm, and for the pyramid."""
    mae = ResNetMAE(3, 8, (2,), decoder=False).to(DEVICE).requires_grad_(False)
    mae.to(memory_format=CHANNELS_LAST)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        maps = mae.encode(images(3, h=4, w=4).requires_grad_(), every_k_block=0)
    assert all(value.requires_grad for value in maps.values())
    pixels = [t for t in kept if t.shape[0] == 4 and t.ndim == 4]
    # One per norm, six in all, and the output of ReLU after the two norms that add another map.
    assert len(pixels) == 6 + 2
