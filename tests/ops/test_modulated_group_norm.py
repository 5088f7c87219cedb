"""The modulated group norm kernels against float64, and the networks that use them;
``tests.support.interpreter`` decides where they run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from driftgen.generators import Noise, UNet2D, unet
from driftgen.ops import dispatch
from driftgen.ops import modulated_group_norm as map_norm_ops
from driftgen.ops.compile import to_channels_last
from driftgen.ops.modulated_group_norm import modulated_group_norm, supports_modulated_group_norm
from tests.support.accuracy import error
from tests.support.block_cases import BFLOAT16, FLOAT16
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401

# No powers of two, fewer locations than are read at a time, one group, groups of one channel.
SHAPES = [
    ((2, 48, 8, 8), 16),
    ((1, 144, 4, 4), 16),
    ((3, 10, 7, 7), 5),
    ((2, 6, 2, 1), 1),
    ((1, 16, 5, 3), 16),
]


def case(shape, dtype=torch.float32, offset=0.0):
    rng = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(shape, generator=rng) for _ in range(2))
    x, upstream = ((t + o).to(DEVICE, dtype) for t, o in ((x, offset), (upstream, 0)))
    parts = 0.3 * torch.randn(shape[0], 2 * shape[1], generator=rng).to(DEVICE)
    x, upstream = (t.to(memory_format=torch.channels_last) for t in (x, upstream))
    return [x.requires_grad_(), *(part.requires_grad_() for part in parts.chunk(2, dim=1))], upstream


def plain(x, groups, scale, shift):
    normed = F.group_norm(x, groups, eps=1e-6)
    return F.silu(normed * (1 + scale)[:, :, None, None] + shift[:, :, None, None])


def results(function, leaves, upstream):
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_agrees_with_float64(shape, groups, offset):
    leaves, upstream = case(shape, offset=offset)
    assert supports_modulated_group_norm(leaves[0], groups)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = results(lambda x, *parts: plain(x, groups, *parts), wide, upstream.double())
    for given in (upstream, upstream.contiguous()):
        found = results(lambda x, *parts: modulated_group_norm(x, groups, *parts), leaves, given)
        assert found[0].is_contiguous(memory_format=torch.channels_last)
        for got, want in zip(found, wanted, strict=True):
            assert error(got, want) < (1e-6 if offset == 0 else 1e-4)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_16_bit_maps_are_rounded_once(dtype):
    leaves, upstream = case((2, 48, 8, 8), dtype)
    wide = [leaf.detach().to(dtype).double().requires_grad_() for leaf in leaves]
    wanted = results(lambda x, *parts: plain(x, 16, *parts), wide, upstream.double())
    found = results(lambda x, *parts: modulated_group_norm(x, 16, *parts), leaves, upstream)
    assert [t.dtype for t in found] == [dtype, dtype, torch.float32, torch.float32]
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < (4e-3 if dtype == BFLOAT16 else 5e-4)


def test_runs_are_deterministic_and_write_everything(monkeypatch):
    leaves, upstream = case((2, 10, 7, 7))
    first = results(lambda x, *parts: modulated_group_norm(x, 5, *parts), leaves, upstream)
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: real(*a, **k).fill_(float("nan")))
    for got, want in zip(
        results(lambda x, *p: modulated_group_norm(x, 5, *p), leaves, upstream), first, strict=True
    ):
        assert torch.equal(got, want)


def test_operators():
    (x, scale, shift), upstream = case((2, 12, 4, 4))
    x, scale, shift = x.detach(), scale.detach(), shift.detach()
    torch.library.opcheck(map_norm_ops._norm, (x, 4, scale, shift))
    _, statistics = map_norm_ops._norm(x, 4, scale, shift)
    torch.library.opcheck(map_norm_ops._norm_backward, (upstream, x, scale, shift, statistics))


def test_supported_maps(monkeypatch):
    x = case((2, 12, 4, 4))[0][0].detach()
    assert supports_modulated_group_norm(x, 4)
    assert not supports_modulated_group_norm(x, 5)
    assert not supports_modulated_group_norm(x.contiguous(), 4)
    assert not supports_modulated_group_norm(x.double(), 4)
    assert not supports_modulated_group_norm(x[0], 4)
    monkeypatch.setattr(dispatch, "DEVICES", set())
    assert not supports_modulated_group_norm(x, 4)


def small_unet():
    torch.manual_seed(0)
    network = UNet2D(
        input_size=4, widths=(12, 24), blocks=(1, 1), attention_levels=(1,), groups=4, head_size=8
    ).to(DEVICE)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    to_channels_last(network)
    return network


def outputs(network, inputs):
    y = network(*inputs)
    y.square().sum().backward()
    return [y, *(p.grad for p in network.parameters())]


def test_a_network(monkeypatch):
    """All norms use the kernels, and the gradients are those without kernels."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # TF32 convolutions differ by more
    network, used = small_unet(), []
    noise, labels = network.sample_noise(2), torch.tensor([0, 1], device=DEVICE)
    inputs = Noise(noise.gaussian.to(memory_format=torch.channels_last), noise.style), labels, 1.5
    with dispatch.without_kernels():
        wanted = outputs(copy.deepcopy(network), inputs)
    monkeypatch.setattr(
        unet, "modulated_group_norm", lambda *a: (used.append(a[0].shape[1]), modulated_group_norm(*a))[1]
    )
    for got, want in zip(outputs(network, inputs), wanted, strict=True):
        assert error(got, want) < 1e-4
    assert used == [12, 12, 24, 24, 24, 24, 48, 24, 36, 12, 12]


def test_a_compiled_block():
    """One graph, in which the norms are custom operators."""
    block = small_unet().down[0]
    x = case((2, 12, 4, 4))[0][0].detach()
    condition, calls = torch.randn(2, 256, device=DEVICE), []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    with dispatch.without_kernels():
        wanted = outputs(copy.deepcopy(block), (x, condition))
    torch._dynamo.reset()
    block.compile(fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=backend))
    for got, want in zip(outputs(block, (x, condition)), wanted, strict=True):
        assert error(got, want) < 1e-4
    assert (
        calls.count("driftgen.modulated_group_norm.default")
        == calls.count("driftgen.modulated_group_norm_backward.default")
        == 2
    )
    torch._dynamo.reset()


def test_hooks_are_called():
    network, called = small_unet(), []
    network.final_norm.register_forward_hook(lambda *_: called.append(True))
    network(network.sample_noise(2), torch.tensor([0, 1], device=DEVICE), 1.0)
    assert called == [True]
