"""Attention for training from the kernels against float64 and against the modules in PyTorch; see
``tests/interpreter.py`` for where they run.
"""

import pytest
import torch
import torch.nn.functional as F

from driftgen import devices
from driftgen.generators import sampling_ops, training_attention
from driftgen.generators.dit import Attention, DiTConfig, rope_tables
from tests.block_cases import BFLOAT16, FLOAT16, FLOAT32, draw, gradients, poison
from tests.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401
from tests.test_fused import error
from tests.test_head_ops import exact_heads, with_bias

# Queries, keys, weights and results are rounded, gradients of scores too: five times at most.
ALLOWED = {BFLOAT16: 8e-3, FLOAT16: 1e-3}


@pytest.fixture(autouse=True)
def _used(monkeypatch):
    monkeypatch.setattr(training_attention, "USED", True)


def case(batch, tokens, heads, head, dtype, weight=1.0):
    """Tables of the rotation; the layer's output, weights of norms and a bias; a gradient."""
    torch.manual_seed(tokens)
    tables = rope_tables(tokens, head, torch.device(DEVICE))
    weights = [weight * (1 + draw(head, scale=0.3)) for _ in range(2)]
    inputs = [draw(batch, tokens, 3 * heads * head, dtype=dtype, scale=2), *weights, draw(3 * heads * head)]
    return tables, inputs, [draw(batch, tokens, heads * head, dtype=dtype)]


def run(tables, inputs, upstream, heads):
    return gradients(with_bias(training_attention.training_attention, *tables, heads), inputs, upstream)


def exact(tables, inputs, upstream, heads):
    turned = exact_heads(*tables, heads)

    def function(*t):
        mixed = F.scaled_dot_product_attention(*turned(*t[:-1], bias=t[-1]))
        return mixed.transpose(1, 2).flatten(2)

    return gradients(function, [t.double() for t in inputs], upstream)


def parts(outputs, found):
    """The result, the gradients of queries, keys and values, and those of weights and bias."""
    return [*outputs, *found[0].unflatten(-1, (3, -1)).unbind(-2), *found[1:]]


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "head", "dtype"),
    [
        (1, 272, 1, 64, BFLOAT16),
        (3, 17, 2, 64, BFLOAT16),
        (1, 64, 2, 64, FLOAT16),
        (1, 130, 1, 64, BFLOAT16),
        (1, 200, 1, 32, BFLOAT16),
        (1, 67, 1, 128, BFLOAT16),
        (2, 21, 1, 32, FLOAT16),
    ],
)
def test_attention_is_exact(batch, tokens, heads, head, dtype):
    tables, inputs, upstream = case(batch, tokens, heads, head, dtype)
    outputs, found = run(tables, inputs, upstream, heads)
    assert [t.dtype for t in outputs + found] == [dtype, dtype, FLOAT32, FLOAT32, FLOAT32]
    want = parts(*exact(tables, inputs, upstream, heads))
    for got, right in zip(parts(outputs, found), want, strict=True):
        assert error(got, right) < ALLOWED[dtype]


def test_one_token():
    """Its weight is one whatever the scores are."""
    tables, inputs, upstream = case(2, 1, 2, 64, BFLOAT16)
    (out,), (by_qkv, *rest) = run(tables, inputs, upstream, 2)
    assert torch.equal(out, inputs[0][..., 256:])
    assert torch.equal(by_qkv[..., 256:], upstream[0])
    # Sums in another order differ in their last digits.
    assert by_qkv[..., :256].abs().max() < 1e-5
    assert rest[0].abs().max() < 1e-5
    assert rest[1].abs().max() < 1e-5
    torch.testing.assert_close(rest[2][256:], upstream[0].float().sum((0, 1)))


@pytest.mark.parametrize(("dtype", "weight"), [(BFLOAT16, 6.0), (BFLOAT16, 40.0), (FLOAT16, 6.0)])
def test_large_scores(dtype, weight):
    """Beyond what exponentials without a shift hold, also for keys that are none; one key has all the weight
    there, and what is left of gradients is mostly the rounding of scores: as in the modules.
    """
    tables, inputs, upstream = case(1, 75, 1, 64, dtype, weight)
    outputs, found = run(tables, inputs, upstream, 1)
    module = Attention(DiTConfig(hidden_size=64, num_heads=1)).to(DEVICE)

    def function(qkv, *weights):
        module.query_norm.weight, module.key_norm.weight = (torch.nn.Parameter(t) for t in weights)
        q, k, v = module.heads(qkv, *tables)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    with devices.without_kernels():
        plain = gradients(lambda qkv: function(qkv, *inputs[1:3]), inputs[:1], upstream)
    want = parts(*exact(tables, inputs, upstream, 1))
    for got, other, right in zip(parts(outputs, found)[:4], parts(*plain), want[:4], strict=True):
        assert got.isfinite().all()
        assert error(got, right) < 1.2 * error(other, right) + ALLOWED[dtype]
    assert all(t.isfinite().all() for t in found)


def test_attention_is_that_of_sampling():
    tables, (qkv, *weights, _), _ = case(2, 70, 2, 32, BFLOAT16)
    with torch.no_grad():
        want = sampling_ops.attention(qkv, *weights, *tables, 2)
    # Where the compiler joins a product and a sum, the last digit may differ.
    assert error(training_attention.training_attention(qkv, *weights, *tables, 2), want) < 1e-3


def test_nothing_is_left_unwritten(monkeypatch):
    """Nor do two runs differ, nor does a bias change anything else."""
    tables, inputs, upstream = case(2, 37, 2, 32, BFLOAT16)
    plain = gradients(lambda *t: training_attention.training_attention(*t, *tables, 2), inputs[:-1], upstream)
    poison(monkeypatch)
    runs = [run(tables, inputs, upstream, 2) for _ in range(2)]
    for first, second in zip(*(outputs + found for outputs, found in runs), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
    for first, second in zip(plain[0] + plain[1], runs[0][0] + runs[0][1][:-1], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("way", "build"),
    [
        ("FORWARD", {"BK": 64, "AHEAD": True}),
        ("BACKWARD", {"BK": 64, "BQ": 128, "AHEAD": False}),
        ("BACKWARD", {"BK": 32, "BQ": 32}),
        ("BACKWARD", {"ROWS": 128, "num_warps": 8}),
    ],
)
def test_builds(way, build, monkeypatch):
    tables, inputs, upstream = case(1, 100, 1, 64, BFLOAT16)
    want = run(tables, inputs, upstream, 1)
    monkeypatch.setattr(training_attention, way, getattr(training_attention, way) | build)
    found = run(tables, inputs, upstream, 1)
    for got, right in zip(found[0] + found[1], want[0] + want[1], strict=True):
        assert error(got, right) < ALLOWED[BFLOAT16]


def test_any_gradient():
    """As the layer behind may return it, and only for what wants one."""
    tables, (qkv, *weights, _), (upstream,) = case(2, 20, 2, 32, BFLOAT16)
    qkv.requires_grad_()
    out = training_attention.training_attention(qkv, *weights, *tables, 2)
    (want,) = torch.autograd.grad(out, qkv, upstream, retain_graph=True)
    apart = upstream.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(torch.autograd.grad(out, qkv, apart)[0], want)


def test_operators():
    tables, (qkv, *weights, _), (upstream,) = case(2, 11, 2, 32, BFLOAT16)
    torch.library.opcheck(training_attention._attend, (qkv, *weights, *tables, 2))
    out, sums = training_attention._attend(qkv, *weights, *tables, 2)
    torch.library.opcheck(training_attention._attend_back, (upstream, out, sums, qkv, *weights, *tables))


def test_compiled():
    tables, inputs, upstream = case(2, 18, 2, 32, BFLOAT16)
    want = run(tables, inputs, upstream, 2)
    torch._dynamo.reset()

    def function(qkv, query, key, bias):
        assert training_attention.covers_training_attention(qkv, 2, query, key)
        return training_attention.training_attention(qkv, query, key, *tables, 2, bias)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, inputs, upstream)
    for got, right in zip(found[0] + found[1], want[0] + want[1], strict=True):
        assert torch.equal(got, right)
    torch._dynamo.reset()


def test_what_is_covered():
    covers = training_attention.covers_training_attention
    qkv = torch.zeros(1, 272, 3 * 128, dtype=BFLOAT16, device=DEVICE)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    assert covers(qkv, 2, weight)
    assert covers(qkv.half(), 1, weight)  # a head of 128
    assert covers(qkv.detach().requires_grad_(), 2)
    assert not covers(qkv, 2, weight.detach())
    assert not covers(qkv, 8, weight)  # heads of 16
    assert not covers(qkv.float(), 2, weight)
    assert not covers(qkv.expand(2, -1, -1).reshape(1, 544, -1), 2, weight)
    assert not covers(qkv.new_zeros(1, 512, 384), 1, weight)  # queries and gradients of 256 KiB
    with torch.no_grad():
        assert not covers(qkv, 2, weight)
    with devices.without_kernels():
        assert not covers(qkv, 2, weight)


def test_every_gradient_of_an_attention_layer(monkeypatch):
    """Through the module, as autocast has it; float32 attention stays with PyTorch."""
    calls, real = [], training_attention._attend
    monkeypatch.setattr(training_attention, "_attend", lambda *a: calls.append(len(a)) or real(*a))
    torch.manual_seed(0)
    config = DiTConfig(hidden_size=64, num_heads=2)
    layer, tables = Attention(config).to(DEVICE), rope_tables(21, 32, torch.device(DEVICE))
    x, upstream = draw(2, 21, 64, dtype=BFLOAT16), draw(2, 21, 64)

    def run(layer, *inputs, dtype=BFLOAT16):
        layer.zero_grad()
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            out, bias = layer.branch_and_bias(*inputs)
        assert bias is None or bias is layer.output.bias
        out.backward(upstream.to(out.dtype))
        named = {name: p.grad for name, p in layer.named_parameters() if p is not bias}
        return {name: grad.clone() for name, grad in named.items()}

    found = run(layer, x, *tables)
    assert calls == [6]
    layer.float32 = True
    run(layer, x, *tables)
    assert calls == [6]
    layer.float32 = False
    with devices.without_kernels():
        plain = run(layer, x, *tables)
        exact = run(layer.double(), x.double(), *(t.double() for t in tables), dtype=None)
    assert found.keys() >= {"qkv.weight", "qkv.bias", "query_norm.weight", "key_norm.weight", "output.weight"}
    for name, got in found.items():
        assert error(got, exact[name]) < 1.5 * error(plain[name], exact[name]) + 5e-3, name
