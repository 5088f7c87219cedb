"""The attention kernels against float64 and PyTorch; ``tests.support.interpreter`` decides where they run."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftgen.generators import DiT
from driftgen.generators.dit import Attention, DiTConfig
from driftgen.ops import attention as attention_ops
from driftgen.ops import dispatch
from driftgen.ops.attention import HeadNorm, attention, fused_attention, supports_attention
from driftgen.ops.rope import rope_tables
from tests.support.accuracy import error
from tests.support.block_cases import BFLOAT16, FLOAT16, FLOAT32, draw, gradients, poison
from tests.support.cases import slow_after
from tests.support.exact_heads import exact_heads
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401

# Queries, keys, weights and results are rounded: four times at most. Gradients of scores are, too.
ALLOWED = {BFLOAT16: 6e-3, FLOAT16: 8e-4}
OF_GRADIENTS = {BFLOAT16: 8e-3, FLOAT16: 1e-3}


def case(batch, tokens, heads, head, dtype, weight=1.0):
    """RoPE tables; the layer's output and the weights of the norms; an upstream gradient."""
    torch.manual_seed(tokens)
    tables = rope_tables(tokens, head, torch.device(DEVICE))
    weights = [weight * (1 + draw(head, scale=0.3)) for _ in range(2)]
    inputs = [draw(batch, tokens, 3 * heads * head, dtype=dtype, scale=2), *weights]
    return tables, inputs, [draw(batch, tokens, heads * head, dtype=dtype)]


def run(tables, inputs, upstream, heads, float32=False):
    return gradients(lambda *t: fused_attention(*t, *tables, heads, float32), inputs, upstream)


def without_gradients(tables, inputs, heads, float32=False):
    with torch.no_grad():
        assert supports_attention(inputs[0], heads)
        return fused_attention(*inputs, *tables, heads, float32)


def exact(tables, inputs, upstream, heads):
    normed = exact_heads(*tables, heads)

    def function(*t):
        return F.scaled_dot_product_attention(*normed(*t)).transpose(1, 2).flatten(2)

    return gradients(function, [t.double() for t in inputs], upstream)


def parts(outputs, found):
    """Return the result and the gradients of queries, keys, values and weights."""
    return [*outputs, *found[0].unflatten(-1, (3, -1)).unbind(-2), *found[1:]]


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "head", "dtype"),
    slow_after(
        2,
        [
            (3, 17, 2, 64, BFLOAT16),
            (2, 21, 1, 32, FLOAT16),
            (1, 272, 2, 64, BFLOAT16),
            (2, 17, 3, 64, BFLOAT16),
            (1, 64, 2, 64, FLOAT16),
            (1, 130, 1, 64, BFLOAT16),
            (1, 200, 1, 32, BFLOAT16),
            (1, 67, 1, 128, BFLOAT16),
            (1, 128, 1, 128, BFLOAT16),
            (1, 350, 1, 128, BFLOAT16),
        ],
    ),
)
def test_attention_is_exact(batch, tokens, heads, head, dtype):
    """Results without gradients are bit-identical."""
    tables, inputs, upstream = case(batch, tokens, heads, head, dtype)
    outputs, found = run(tables, inputs, upstream, heads)
    assert [t.dtype for t in outputs + found] == [dtype, dtype, FLOAT32, FLOAT32]
    right, *wanted = parts(*exact(tables, inputs, upstream, heads))
    out, *found = parts(outputs, found)
    assert out.is_contiguous()
    assert error(out, right) < ALLOWED[dtype]
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < OF_GRADIENTS[dtype]
    alone = without_gradients(tables, inputs, heads)
    assert alone.is_contiguous()
    assert torch.equal(alone, out)


def exact_inputs(tables, inputs, heads):
    """Return inputs whose queries and keys norm and rotation do not change: only attention rounds."""
    (cos, sin), (qkv, *_) = tables, inputs
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
    signs = [torch.where(t < 0, -1.0, 1.0).to(t.dtype) for t in (q, k)]
    weights = [torch.ones_like(w) * (2.0 if i else 0.5) for i, w in enumerate(inputs[1:3])]
    made = torch.stack([*signs, v], dim=-3).flatten(-3)
    return (torch.ones_like(cos), torch.zeros_like(sin)), [made, *weights]


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "head", "dtype"),
    slow_after(
        1,
        [
            (2, 17, 2, 64, FLOAT16),
            (1, 272, 1, 64, BFLOAT16),
            (1, 75, 2, 32, BFLOAT16),
            (1, 67, 1, 128, BFLOAT16),
        ],
    ),
)
def test_attention_in_float32(batch, tokens, heads, head, dtype):
    """With exactly representable queries and keys, result and gradients have only their own rounding error.
    Gradients of weights, which are float32, are a hundred times more accurate than without ``float32``.
    """
    tables, inputs, upstream = case(batch, tokens, heads, head, dtype)
    tables, inputs = exact_inputs(tables, inputs, heads)
    want = parts(*exact(tables, inputs, upstream, heads))
    wide, plain = (parts(*run(tables, inputs, upstream, heads, float32)) for float32 in (True, False))
    for got, right in zip(wide[:4], want[:4], strict=True):
        assert error(got, right) < 1.001 * error(right.to(dtype), right) + 1e-5
    assert error(plain[0], want[0]) > 1.05 * error(wide[0], want[0])
    for got, other, right in zip(wide[4:6], plain[4:6], want[4:6], strict=True):
        assert error(got, right) < min(2e-5, 0.03 * error(other, right))
    assert torch.equal(without_gradients(tables, inputs, heads, True), wide[0])


def test_one_token():
    """A single token has weight 1 for all scores."""
    tables, inputs, upstream = case(2, 1, 2, 64, BFLOAT16)
    (out,), (by_qkv, *rest) = run(tables, inputs, upstream, 2)
    assert torch.equal(out, inputs[0][..., 256:])
    assert torch.equal(by_qkv[..., 256:], upstream[0])
    # Another summation order changes the last digits.
    assert by_qkv[..., :256].abs().max() < 1e-5
    assert rest[0].abs().max() < 1e-5
    assert rest[1].abs().max() < 1e-5


@pytest.mark.parametrize("tokens", slow_after(1, [75, 150]))
@pytest.mark.parametrize(
    ("dtype", "weight"), slow_after(1, [(BFLOAT16, 6.0), (BFLOAT16, 40.0), (FLOAT16, 6.0)])
)
def test_large_scores(dtype, weight, tokens):
    """Scores overflow without a shift, also those of keys out of range. One key has all the weight, and the
    gradients are mostly rounding errors of scores, as in PyTorch.
    """
    tables, inputs, upstream = case(1, tokens, 1, 64, dtype, weight)
    outputs, found = run(tables, inputs, upstream, 1)
    norms = [HeadNorm(weight) for weight in inputs[1:]]
    with dispatch.without_kernels():
        plain = gradients(lambda qkv: attention(qkv, 1, *norms, tables), inputs[:1], upstream)
    want = parts(*exact(tables, inputs, upstream, 1))
    for got, other, right in zip(parts(outputs, found)[:4], parts(*plain), want[:4], strict=True):
        assert got.isfinite().all()
        assert error(got, right) < 1.2 * error(other, right) + ALLOWED[dtype]
    assert all(t.isfinite().all() for t in found)
    assert torch.equal(without_gradients(tables, inputs, 1), outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("float32", [False, True])
def test_runs_are_deterministic_and_write_everything(monkeypatch, float32):
    tables, inputs, upstream = case(2, 37, 2, 32, BFLOAT16)
    poison(monkeypatch)
    runs = [run(tables, inputs, upstream, 2, float32) for _ in range(2)]
    for first, second in zip(*(outputs + grads for outputs, grads in runs), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
    assert torch.equal(without_gradients(tables, inputs, 2, float32), runs[0][0][0])


def test_sums_are_stored_only_for_gradients(monkeypatch):
    tables, inputs, _ = case(2, 37, 2, 32, BFLOAT16)
    results, real = [], attention_ops._attend
    monkeypatch.setattr(attention_ops, "_attend", lambda *a: (results.append(real(*a)), results[-1])[1])
    trained = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.no_grad():
        fused_attention(*trained, *tables, 2)
    assert not fused_attention(*inputs, *tables, 2).requires_grad  # grad mode alone changes nothing
    assert fused_attention(*trained, *tables, 2).requires_grad
    assert [sums.shape for *_, sums in results] == [(0,)] * 2 + [(2, 2, 37)]
    assert all(residue.shape == (0,) for _, residue, _ in results)
    assert all(torch.equal(out, results[0][0]) for out, *_ in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "build"),
    [
        ("FORWARD", {"BK": 128}),
        ("FORWARD", {"BQ": 128, "num_warps": 8, "maxnreg": None}),
        ("BACKWARD", {"BQ": 64, "STAGES": 3}),
        ("BACKWARD", {"BK": 32, "STAGES": 1}),
        ("BACKWARD", {"ROWS": 128, "num_warps": 8}),
    ],
)
def test_launch_options(way, build, monkeypatch):
    tables, inputs, upstream = case(1, 100, 1, 64, BFLOAT16)
    want = run(tables, inputs, upstream, 1)
    monkeypatch.setattr(attention_ops, way, getattr(attention_ops, way) | build)
    found = run(tables, inputs, upstream, 1)
    for got, right in zip(found[0] + found[1], want[0] + want[1], strict=True):
        assert error(got, right) < OF_GRADIENTS[BFLOAT16]


@pytest.mark.slow
def test_strided_upstream_gradient():
    tables, (qkv, *weights), (upstream,) = case(2, 20, 2, 32, BFLOAT16)
    qkv.requires_grad_()
    out = fused_attention(qkv, *weights, *tables, 2)
    (want,) = torch.autograd.grad(out, qkv, upstream, retain_graph=True)
    strided = upstream.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(torch.autograd.grad(out, qkv, strided)[0], want)


@pytest.mark.slow
def test_operators():
    tables, inputs, (upstream,) = case(2, 11, 2, 32, BFLOAT16)
    for float32, for_backward in itertools.product((True, False), repeat=2):
        torch.library.opcheck(attention_ops._attend, (*inputs, *tables, 2, float32, for_backward))
    for float32 in (True, False):
        saved = attention_ops._attend(*inputs, *tables, 2, float32, True)
        torch.library.opcheck(attention_ops._attend_backward, (upstream, *saved, *inputs, *tables))


@pytest.mark.slow
def test_compiled():
    tables, inputs, upstream = case(2, 18, 2, 32, BFLOAT16)
    want = run(tables, inputs, upstream, 2)
    torch._dynamo.reset()

    def function(qkv, query, key):
        return attention(qkv, 2, HeadNorm(query), HeadNorm(key), tables)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, inputs, upstream)
    for got, right in zip(found[0] + found[1], want[0] + want[1], strict=True):
        assert torch.equal(got, right)
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), want[0][0])
    torch._dynamo.reset()


def test_supported_shapes_and_dtypes():
    qkv = torch.zeros(1, 272, 3 * 128, dtype=BFLOAT16, device=DEVICE)
    assert supports_attention(qkv, 2)
    assert supports_attention(qkv, 1)  # a head of 128
    assert supports_attention(qkv, 4)
    assert supports_attention(qkv.half(), 1)
    assert supports_attention(qkv.new_zeros(1, 512, 384), 2)
    assert supports_attention(qkv.new_zeros(1, 368, 384), 1)
    assert not supports_attention(qkv.new_zeros(1, 369, 384), 1)  # keys and values of 184 KiB
    assert not supports_attention(qkv, 8)  # heads of 16
    assert not supports_attention(qkv.float(), 2)
    assert not supports_attention(qkv[0], 2)
    assert not supports_attention(qkv.new_zeros(1, 513, 384), 2)
    with dispatch.without_kernels():
        assert not supports_attention(qkv, 2)


# --- in a network ---------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Record for each call of the operator whether it stored sums for the backward pass."""
    found, real = [], attention_ops._attend
    monkeypatch.setattr(attention_ops, "_attend", lambda *a: (found.append(a[-1]), real(*a))[1])
    return found


@pytest.mark.parametrize(
    ("options", "dtype", "used"),
    slow_after(
        2,
        [
            ({}, BFLOAT16, True),
            ({}, FLOAT32, False),
            ({"attention_float32": True}, BFLOAT16, True),
            ({"attention_float32": True}, FLOAT32, False),
            ({"rope": False}, BFLOAT16, False),
            ({"qk_norm": "none"}, BFLOAT16, False),
            ({"qk_norm": "layer"}, BFLOAT16, False),
            ({"num_heads": 4}, BFLOAT16, False),  # heads of 16
        ],
    ),
)
def test_where_attention_is_used(options, dtype, used, calls):
    sizes = {"input_size": 8, "hidden_size": 64, "num_heads": 2, "depth": 1, "context_tokens": 2}
    network = DiT(**{**sizes, "num_classes": 4, "style_codebooks": 1, **options}).to(DEVICE, dtype)
    noise, labels = network.sample_noise(2), torch.tensor([0, 1], device=DEVICE)
    network(noise, labels).sum().backward()
    assert calls == [True] * used
    calls.clear()
    with torch.inference_mode():
        network(noise, labels)
        assert calls == [False] * used
        with dispatch.without_kernels():
            network(noise, labels)
    network.requires_grad_(False)(noise, labels)
    assert calls == [False, False] * used


@pytest.mark.parametrize("float32", [False, True])
def test_a_layer_in_float32(float32):
    layer, (x, *tables), _ = layer_case()
    layer.to(BFLOAT16).float32 = float32
    with torch.no_grad():
        weights = layer.query_norm.weight, layer.key_norm.weight
        want, other = (
            layer.output(fused_attention(layer.qkv(x), *weights, *tables, 2, wide))
            for wide in (float32, not float32)
        )
        assert torch.equal(layer(x, *tables), want)
    assert not torch.equal(want, other)


def test_a_layer_with_kernels_agrees_with_pytorch():
    """In bfloat16 the results agree up to rounding."""
    cos, sin = rope_tables(70, 64, torch.device(DEVICE))
    module = Attention(DiTConfig(hidden_size=128, num_heads=2)).to(DEVICE, BFLOAT16)
    x = draw(2, 70, 128, dtype=BFLOAT16)
    with torch.no_grad():
        got = module(x, cos, sin)
        with dispatch.without_kernels():
            plain = module(x, cos, sin)
            want = module.double()(x.double(), cos.double(), sin.double())
    assert error(got, plain) < 2 * ALLOWED[BFLOAT16]
    assert error(got, want) < 1.2 * error(plain, want)


def layer_case():
    torch.manual_seed(0)
    layer = Attention(DiTConfig(hidden_size=64, num_heads=2)).to(DEVICE)
    tables = rope_tables(21, 32, torch.device(DEVICE))
    return layer, [draw(2, 21, 64, dtype=BFLOAT16), *tables], draw(2, 21, 64)


def parameter_gradients(layer, inputs, upstream, dtype=BFLOAT16):
    layer.zero_grad()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        out = layer(*inputs)
    out.backward(upstream.to(out.dtype))
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("float32", [False, True])
def test_every_gradient_of_an_attention_layer(float32, calls):
    """Through the module, under autocast."""
    layer, inputs, upstream = layer_case()
    layer.float32 = float32
    found = parameter_gradients(layer, inputs, upstream)
    assert calls == [True]
    with dispatch.without_kernels():
        plain = parameter_gradients(layer, inputs, upstream)
        layer.float32 = False
        exact = parameter_gradients(layer.double(), [t.double() for t in inputs], upstream, None)
    assert len(found) == 6
    for name, got in found.items():
        assert error(got, exact[name]) < 1.5 * error(plain[name], exact[name]) + 5e-3, name


@pytest.mark.slow
def test_a_compiled_block():
    torch._dynamo.reset()
    network = DiT(input_size=8, hidden_size=64, num_heads=2, depth=1, context_tokens=2).to(DEVICE, BFLOAT16)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    block = network.blocks[0]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    cos, sin = rope_tables(18, 32, torch.device(DEVICE))
    x, condition = draw(2, 18, 64, dtype=BFLOAT16), draw(2, 64, dtype=BFLOAT16)
    with torch.inference_mode():
        want = block(x, condition, cos, sin)
        torch.testing.assert_close(compiled(x, condition, cos, sin), want, rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()
