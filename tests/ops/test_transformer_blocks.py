"""Transformer blocks with kernels against the same blocks in PyTorch; ``tests.support.interpreter`` decides
where they run.
"""

import copy
from collections import Counter

import pytest
import torch

from driftgen.ops import adaln_triton, dispatch
from driftgen.ops.rope import rope_tables
from tests.support.accuracy import error
from tests.support.block_cases import BFLOAT16, draw, flat, gradients, step, tiny
from tests.support.cases import slow_after
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


@pytest.fixture
def launches(monkeypatch):
    """Count the launches of the adaLN kernels."""
    counts = Counter()

    class Counted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            counts[self.name] += 1
            return self.kernel[grid]

    for name in ("forward", "backward"):
        kernel = f"{name}_kernel"
        monkeypatch.setattr(adaln_triton, kernel, Counted(name, getattr(adaln_triton, kernel)))
    return counts


ALL = {"forward": 4, "backward": 4}  # three in the block, one in the final layer


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, ALL),
        ({"mlp_ratio": 5.5}, ALL),
        ({"mlp": "gelu"}, ALL),
        ({"qk_norm": "none"}, ALL),
        ({"qk_norm": "layer"}, ALL),
        ({"rope": False}, ALL),
        ({"num_heads": 4}, ALL),
        ({"condition_size": 20, "context_tokens": 0}, ALL),
        ({"norm": "layer"}, {"forward": 2, "backward": 2}),  # the gated residuals
        ({"hidden_size": 40, "num_heads": 1}, {}),
    ],
)
def test_network(options, used, launches):
    net = tiny(**options)
    samples, found = step(net)
    assert launches == used
    with dispatch.without_kernels():
        plain, wanted = step(net)
    assert launches == used
    assert error(samples, plain) < 1e-5
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()) + 1e-7)


@pytest.mark.parametrize("options", [{}, {"attention_float32": True}])
def test_network_in_bfloat16(options, launches):
    net = tiny(**options)
    samples, found = step(net, BFLOAT16)
    assert launches == ALL
    with dispatch.without_kernels():
        exact = step(copy.deepcopy(net).double())
        plain = step(net, BFLOAT16)
    assert samples.dtype == plain[0].dtype == BFLOAT16
    assert error(samples, exact[0]) < 1.5 * error(plain[0], exact[0])
    assert error(flat(found), flat(exact[1])) < 1.2 * error(flat(plain[1]), flat(exact[1]))


def test_network_with_bfloat16_weights(launches):
    net = tiny().bfloat16()
    samples, found = step(net)
    assert launches == ALL
    with dispatch.without_kernels():
        plain, wanted = step(net)
    assert error(samples, plain) < 2e-2
    assert error(flat(found), flat(wanted)) < 2e-2


def test_without_gradients_no_kernel_is_launched(launches):
    net = tiny()
    noise = net.sample_noise(2, torch.Generator(DEVICE).manual_seed(1))
    labels = torch.tensor([1, 2], device=DEVICE)
    with torch.no_grad():
        samples = net(noise, labels, 1.5)
    assert launches == {}
    assert error(samples, net(noise, labels, 1.5)) < 1e-5


def test_checkpointed_blocks(launches):
    net = tiny()
    samples, found = step(net)
    net.checkpoint_blocks = True
    launches.clear()
    again, repeated = step(net)
    assert launches == ALL | {"forward": 7}  # the block twice
    assert torch.equal(again, samples)
    assert all(torch.equal(a, b) for a, b in zip(repeated, found, strict=True))


def parameter_gradients(block, x, condition, cos, sin, upstream, dtype=None):
    block.zero_grad()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        out = block(x, condition, cos, sin)
    out.backward(upstream.to(out.dtype))
    return out, {name: p.grad.clone() for name, p in block.named_parameters()}


def block_case(tokens=19, **options):
    net = tiny(**options)
    block, width = net.blocks[0], net.config.hidden_size
    cos, sin = rope_tables(tokens, 16, torch.device(DEVICE))
    return block, [draw(3, tokens, width), draw(3, width), cos, sin], draw(3, tokens, width)


@pytest.mark.parametrize("options", slow_after(1, [{}, {"mlp": "gelu"}, {"hidden_size": 80, "num_heads": 5}]))
def test_every_gradient_of_a_block(options):
    """In float32, and in bfloat16 under autocast, where weights and their gradients are float32."""
    block, inputs, upstream = block_case(**options)
    found = parameter_gradients(block, *inputs, upstream)
    half = [inputs[0].bfloat16(), *inputs[1:]]
    rounded = parameter_gradients(block, *half, upstream, BFLOAT16)
    with dispatch.without_kernels():
        exact = parameter_gradients(copy.deepcopy(block).double(), *(t.double() for t in inputs), upstream)
        plain = parameter_gradients(block, *half, upstream, BFLOAT16)
    assert error(found[0], exact[0]) < 1e-6
    assert error(rounded[0], exact[0]) < 1.2 * error(plain[0], exact[0])
    for name, want in exact[1].items():
        assert found[1][name].dtype == rounded[1][name].dtype == torch.float32
        assert error(found[1][name], want) < 1e-5, name
        # Rounding errors are random: those of small tensors may be a little larger.
        assert error(rounded[1][name], want) < 1.2 * error(plain[1][name], want) + 3e-3, name


@pytest.mark.slow
def test_frozen_parts():
    """Gradients of trained parameters do not depend on which others are frozen."""
    block, inputs, upstream = block_case()
    wanted = parameter_gradients(block, *inputs, upstream)[1]
    for trained in ("bias", "weight"):
        block.zero_grad(set_to_none=True)
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        block(*inputs).backward(upstream)
        for name, parameter in block.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-6, atol=1e-6)
            else:
                assert parameter.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mlp": "gelu"}])
def test_hooks_are_called(options):
    """Hooks on every module of a block run, with the same gradients."""
    block, inputs, upstream = block_case(**options)
    wanted, called = parameter_gradients(block, *inputs, upstream)[1], []
    modules = {name: m for name, m in block.named_modules() if name and "norm" not in name}
    for name, module in modules.items():
        if name != "modulation":  # only its weights are used
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    found = parameter_gradients(block, *inputs, upstream)[1]
    assert sorted(called) == sorted(name for name in modules if name != "modulation")
    for name, want in wanted.items():
        assert error(found[name], want) < 1e-5, name


@pytest.mark.slow
def test_compiled_gradients():
    """Under autocast all gradients are those of the block that is not compiled."""
    block, inputs, upstream = block_case()
    inputs[0] = inputs[0].bfloat16()
    wanted = parameter_gradients(block, *inputs, upstream, BFLOAT16)
    torch._dynamo.reset()
    block.compile(fullgraph=True, backend="aot_eager")
    found = parameter_gradients(block, *inputs, upstream, BFLOAT16)
    assert torch.equal(found[0], wanted[0])
    for name, want in wanted[1].items():
        assert found[1][name].dtype == torch.float32
        # The compiler keeps autocast on in the backward pass, also of the layer that goes without it.
        assert error(found[1][name], want) < (1e-2 if name == "modulation.weight" else 1e-5), name
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_block(launches, monkeypatch):
    """Compiled as one graph with gradients, and compiled again when kernels are switched off."""
    block = tiny().blocks[0]
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    cos, sin = rope_tables(7, 16, torch.device(DEVICE))
    x, condition = draw(2, 7, 48), draw(2, 48)
    upstream = [draw(2, 7, 48)]
    with dispatch.without_kernels():
        wanted = gradients(lambda *t: block(*t, cos, sin), [x, condition], upstream)
    for used in (2, 0):
        found = gradients(lambda *t: compiled(*t, cos, sin), [x, condition], upstream)
        assert len(launches) == used
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        launches.clear()
        monkeypatch.setattr(dispatch, "DEVICES", set())
    torch._dynamo.reset()
