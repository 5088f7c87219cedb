"""Queries, keys and values from the kernels against float64 and against the modules in PyTorch; see
``tests/support/interpreter.py`` for where they run.
"""

import pytest
import torch

from driftgen.generators.dit import Attention, DiTConfig, rope_tables
from driftgen.ops import dispatch
from driftgen.ops import qk_norm_rope as head_ops
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
from tests.support.exact_heads import exact_heads, with_bias
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


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
    inputs.append(draw(3 * heads * head))
    found = gradients(with_bias(head_ops.qk_norm_rope, cos, sin, heads), inputs, upstream)
    exact = gradients(with_bias(exact_heads(cos, sin, heads)), [t.double() for t in inputs], upstream)
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
    with dispatch.without_kernels():
        plain = gradients(run, [qkv], upstream)
    for got, want in zip(found[0], plain[0], strict=True):
        # Sums in another order may fall on the other side of a rounding edge.
        assert (got != want).double().mean() < 1e-2
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    assert error(found[1][0], plain[1][0]) < 2 * ALLOWED[BFLOAT16]


def test_a_bias_changes_nothing_else(monkeypatch):
    """Nor do two runs differ, nor is anything left unwritten; many programs for few samples."""
    monkeypatch.setattr(head_ops, "PROGRAMS", 40)
    cos, sin, inputs, upstream = heads_case(2, 37, 6, 16, BFLOAT16)
    plain = gradients(lambda *t: head_ops.qk_norm_rope(*t, cos, sin, 6), inputs, upstream)
    poison(monkeypatch)
    inputs.append(draw(3 * 96))
    runs = [gradients(with_bias(head_ops.qk_norm_rope, cos, sin, 6), inputs, upstream) for _ in range(2)]
    for first, second in zip(*(outputs + found for outputs, found in runs), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
    for first, second in zip(plain[0] + plain[1], runs[0][0] + runs[0][1][:-1], strict=True):
        assert torch.equal(first, second)
    exact = gradients(with_bias(exact_heads(cos, sin, 6)), [t.double() for t in inputs], upstream)
    assert error(runs[0][1][-1], exact[1][-1]) < SUMMED


def test_operators():
    cos, sin, inputs, upstream = heads_case(2, 11, 2, 16, FLOAT32)
    torch.library.opcheck(head_ops._turn, (*inputs, cos, sin, 2))
    torch.library.opcheck(head_ops._turn_back, (*upstream, *inputs, cos, sin))


def test_values_are_not_copied():
    cos, sin, (qkv, *weights), _ = heads_case(2, 9, 4, 32, BFLOAT16)
    qkv.requires_grad_()
    query, key, value = head_ops.qk_norm_rope(qkv, *weights, cos, sin, 4)
    assert value.data_ptr() == qkv[0, 0, 2 * 128 :].data_ptr()
    for tensor in (query, key):
        assert tensor.shape == value.shape == (2, 4, 9, 32)
        assert tensor.transpose(1, 2).is_contiguous()
    # Their gradient comes in its place from the one kernel: nothing else is behind them.
    assert value.grad_fn is query.grad_fn is key.grad_fn


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
    assert head_ops.supports_qk_norm_rope(qkv, heads) == covered
    assert head_ops.supports_qk_norm_rope(qkv[..., : heads * head], heads, parts=1) == covered
    with torch.no_grad():
        assert head_ops.supports_qk_norm_rope(qkv, heads) == covered
    with dispatch.without_kernels():
        assert not head_ops.supports_qk_norm_rope(qkv, heads)
