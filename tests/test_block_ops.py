"""The kernels of a Transformer block against float64 and against the modules in PyTorch; see
``tests/interpreter.py`` for where they run.
"""

import copy
from collections import Counter

import pytest
import torch

from driftgen import devices
from driftgen.generators import DiT, attention_kernels, block_ops, norm_kernels
from driftgen.generators.conditioning import RMSNorm
from driftgen.generators.dit import Attention, DiTConfig, rope_tables
from tests.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401
from tests.test_fused import error

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# Relative errors: numbers are rounded once or twice, sums over many of them not at all.
ALLOWED = {FLOAT32: 1e-6, BFLOAT16: 3e-3, FLOAT16: 4e-4}
SUMMED = 1e-5
TINY = {
    "input_size": 8,
    "patch_size": 4,
    "hidden_size": 48,
    "num_heads": 3,
    "depth": 1,
    "context_tokens": 2,
    "num_classes": 4,
    "style_codebooks": 1,
}


@pytest.fixture
def launches(monkeypatch):
    """Counts the launches of our kernels."""
    found = Counter()

    class Counted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            found[self.name] += 1
            return self.kernel[grid]

    for part, module in (("heads", attention_kernels), ("stream", norm_kernels)):
        for way in ("forward", "backward"):
            kernel = f"{way}_kernel"
            monkeypatch.setattr(module, kernel, Counted(f"{part} {way}", getattr(module, kernel)))
    return found


def draw(*shape, dtype=FLOAT32, scale=1.0):
    return (scale * torch.randn(*shape)).to(dtype).to(DEVICE)


def leaf(tensor, dtype=None):
    return tensor.detach().to(dtype or tensor.dtype).requires_grad_()


def gradients(function, inputs, upstream):
    """What a function gives, and the gradients of its inputs."""
    inputs = [leaf(t) for t in inputs]
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    found = torch.autograd.grad(outputs, inputs, [g.to(o) for g, o in zip(upstream, outputs, strict=True)])
    return list(outputs), list(found)


# --- queries and keys -----------------------------------------------------------------------------------


def exact_heads(cos, sin, heads):
    def function(qkv, *weights):
        *normed, value = qkv.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
        out = []
        for x, weight in zip(normed, weights, strict=True):
            y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            a, b = y.chunk(2, dim=-1)
            c, s = cos.to(x), sin.to(x)
            out.append(torch.cat([a * c - b * s, b * c + a * s], -1))
        return *out, value

    return function


def heads_case(batch, tokens, heads, head, dtype):
    cos, sin = rope_tables(tokens, head, torch.device(DEVICE))
    qkv = draw(batch, tokens, 3 * heads * head, dtype=dtype, scale=2)
    weights = [1 + draw(head, scale=0.3) for _ in range(2)]
    # As attention may return them: the heads of a token side by side, or the tokens of a head.
    upstream = [draw(batch, tokens, heads, head, dtype=dtype).transpose(1, 2)]
    upstream.append(draw(batch, heads, tokens, head, dtype=dtype))
    upstream.append(draw(batch, tokens, heads + 1, head, dtype=dtype).transpose(1, 2)[:, 1:])
    return cos, sin, [qkv, *weights], upstream


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "head", "dtype"),
    [
        (2, 19, 3, 16, FLOAT32),
        (1, 5, 4, 128, FLOAT32),
        (2, 19, 6, 32, BFLOAT16),
        (1, 18, 12, 64, BFLOAT16),
        (1, 7, 1, 64, FLOAT16),
    ],
)
def test_heads_are_exact(batch, tokens, heads, head, dtype):
    cos, sin, inputs, upstream = heads_case(batch, tokens, heads, head, dtype)
    found = gradients(lambda *t: block_ops.turned_heads(*t, cos, sin, heads), inputs, upstream)
    exact = gradients(exact_heads(cos, sin, heads), [t.double() for t in inputs], upstream)
    assert all(t.dtype == dtype for t in found[0])
    for got, want in zip(found[0] + found[1][:1], exact[0] + exact[1][:1], strict=True):
        assert error(got, want) < ALLOWED[dtype]
    for got, want in zip(found[1][1:], exact[1][1:], strict=True):
        assert got.dtype == FLOAT32
        assert error(got, want) < SUMMED


def test_heads_are_those_of_the_modules():
    """In bfloat16: rounded where the modules round."""
    cos, sin, (qkv, *weights), upstream = heads_case(2, 9, 4, 32, BFLOAT16)
    attention = Attention(DiTConfig(hidden_size=128, num_heads=4)).to(DEVICE)
    attention.query_norm.weight.data, attention.key_norm.weight.data = weights

    def run(x):
        return attention.heads(x, cos, sin)

    found = gradients(run, [qkv], upstream)
    with devices.without_kernels():
        plain = gradients(run, [qkv], upstream)
    for got, want in zip(found[0], plain[0], strict=True):
        # Sums in another order may fall on the other side of a rounding edge.
        assert (got != want).double().mean() < 1e-2
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    assert error(found[1][0], plain[1][0]) < 2 * ALLOWED[BFLOAT16]


def test_values_are_not_copied():
    cos, sin, (qkv, *weights), _ = heads_case(2, 9, 4, 32, BFLOAT16)
    qkv.requires_grad_()
    query, key, value = block_ops.turned_heads(qkv, *weights, cos, sin, 4)
    assert value.data_ptr() == qkv[0, 0, 2 * 128 :].data_ptr()
    for tensor in (query, key):
        assert tensor.shape == value.shape == (2, 4, 9, 32)
        assert tensor.transpose(1, 2).is_contiguous()
    # Their gradient comes in its place from the one kernel: nothing else is behind them.
    assert value.grad_fn is query.grad_fn is key.grad_fn


# --- the residual stream --------------------------------------------------------------------------------


def exact_norm(x, weight, scale, shift):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight * (1 + scale) + shift


def exact_residual(x, branch, gate):
    return x + gate * branch


def exact_gated_norm(x, branch, gate, weight, scale, shift):
    total = exact_residual(x, branch, gate)
    return total, exact_norm(total, weight, scale, shift)


STREAM = {
    "modulated_norm": (block_ops.modulated_norm, exact_norm),
    "stream_norm": (block_ops.stream_norm, lambda x, *rest: (x, exact_norm(x, *rest))),
    "gated_norm": (block_ops.gated_norm, exact_gated_norm),
    "gated_residual": (block_ops.gated_residual, exact_residual),
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


def test_modulation_is_rounded_as_the_stream_is():
    """What all tokens of a sample share would else differ between training and sampling."""
    x, branch = (draw(2, 5, 32, dtype=BFLOAT16) for _ in range(2))
    parts = [draw(2, 1, 32) for _ in range(3)]
    weight = torch.ones(32, device=DEVICE)
    rounded = [t.bfloat16().float() for t in parts]
    upstream = [draw(2, 5, 32, dtype=BFLOAT16) for _ in range(2)]

    def run(gate, scale, shift, weight):
        return block_ops.gated_norm(x, branch, gate, weight, scale, shift)

    for got, want in zip(
        gradients(run, [*parts, weight], upstream),
        gradients(run, [*rounded, weight], upstream),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# --- what is covered ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "heads", "dtype", "covered"),
    [
        (16, 3, FLOAT32, True),
        (128, 1, FLOAT16, True),
        (64, 12, BFLOAT16, True),
        (8, 4, FLOAT32, False),
        (48, 2, FLOAT32, False),
        (256, 1, FLOAT32, False),
        (64, 2, torch.float64, False),
    ],
)
def test_which_heads_are_covered(head, heads, dtype, covered):
    qkv = torch.zeros(2, 3, 3 * heads * head, dtype=dtype, device=DEVICE)
    assert block_ops.covers_heads(qkv, heads) == covered
    with torch.no_grad():
        assert block_ops.covers_heads(qkv, heads) == covered
    with devices.without_kernels():
        assert not block_ops.covers_heads(qkv, heads)


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
    assert block_ops.covers_stream(x) == covered
    with torch.no_grad():
        assert not block_ops.covers_stream(x)
    with devices.without_kernels():
        assert not block_ops.covers_stream(x)


# --- the network ----------------------------------------------------------------------------------------


def tiny(**options):
    torch.manual_seed(0)
    net = DiT(**TINY | options).to(DEVICE)
    for p in net.parameters():  # away from the zeros that adaLN and the output start with
        torch.nn.init.normal_(p, std=0.1)
    for module in net.modules():
        if isinstance(module, RMSNorm):
            torch.nn.init.normal_(module.weight, mean=1, std=0.1)
    return net


def step(net, dtype=None):
    """Samples and gradients."""
    net.zero_grad()
    noise = net.sample_noise(2, torch.Generator(DEVICE).manual_seed(1))
    labels = torch.tensor([1, 2], device=DEVICE)
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        samples = net(noise, labels, 1.5)
    samples.float().square().sum().backward()
    return samples, [p.grad.clone() for p in net.parameters()]


HEADS = {"heads forward": 1, "heads backward": 1}
STREAMS = {"stream forward": 4, "stream backward": 4}  # three in the block, one in the last layer


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, HEADS | STREAMS),
        ({"qk_norm": False}, STREAMS),
        ({"rope": False}, STREAMS),
        ({"num_heads": 4}, STREAMS),
        ({"rms_norm": False}, HEADS),
        ({"hidden_size": 40, "num_heads": 1}, {}),
    ],
)
def test_network(options, used, launches):
    net = tiny(**options)
    samples, found = step(net)
    assert launches == used
    with devices.without_kernels():
        plain, wanted = step(net)
    assert launches == used
    assert error(samples, plain) < 1e-5
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()) + 1e-7)


def flat(gradients):
    return torch.cat([g.double().flatten() for g in gradients])


@pytest.mark.parametrize("options", [{}, {"attention_float32": True}])
def test_network_in_bfloat16(options, launches):
    net = tiny(**options)
    samples, found = step(net, BFLOAT16)
    assert launches == HEADS | STREAMS
    with devices.without_kernels():
        exact = step(copy.deepcopy(net).double())
        plain = step(net, BFLOAT16)
    assert samples.dtype == plain[0].dtype == BFLOAT16
    assert error(samples, exact[0]) < 1.5 * error(plain[0], exact[0])
    assert error(flat(found), flat(exact[1])) < 1.2 * error(flat(plain[1]), flat(exact[1]))


def test_network_with_bfloat16_weights(launches):
    net = tiny().bfloat16()
    samples, found = step(net)
    assert launches.keys() == (HEADS | STREAMS).keys()
    with devices.without_kernels():
        plain, wanted = step(net)
    assert error(samples, plain) < 2e-2
    assert error(flat(found), flat(wanted)) < 2e-2


def test_without_gradients_queries_and_keys_only(launches):
    net = tiny()
    noise = net.sample_noise(2, torch.Generator(DEVICE).manual_seed(1))
    labels = torch.tensor([1, 2], device=DEVICE)
    with torch.no_grad():
        samples = net(noise, labels, 1.5)
    assert launches == {"heads forward": 1}
    assert error(samples, net(noise, labels, 1.5)) < 1e-5


def test_checkpointed_blocks(launches):
    net = tiny()
    samples, found = step(net)
    net.checkpoint_blocks = True
    launches.clear()
    again, repeated = step(net)
    assert launches == HEADS | STREAMS | {"heads forward": 2, "stream forward": 7}  # the block twice
    assert torch.equal(again, samples)
    assert all(torch.equal(a, b) for a, b in zip(repeated, found, strict=True))


def test_compiled_block(launches, monkeypatch):
    """Whole, with its gradients; and again when kernels are not wanted."""
    block = tiny().blocks[0]
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    cos, sin = rope_tables(7, 16, torch.device(DEVICE))
    x, condition = draw(2, 7, 48), draw(2, 48)
    upstream = [draw(2, 7, 48)]
    with devices.without_kernels():
        wanted = gradients(lambda *t: block(*t, cos, sin), [x, condition], upstream)
    for used in (4, 0):
        found = gradients(lambda *t: compiled(*t, cos, sin), [x, condition], upstream)
        assert len(launches) == used
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        launches.clear()
        monkeypatch.setattr(devices, "DEVICES", set())
    torch._dynamo.reset()
