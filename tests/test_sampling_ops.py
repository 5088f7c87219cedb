"""The kernels of sampling against float64 and against the modules in PyTorch; see ``tests/interpreter.py``
for where they run.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftgen import devices
from driftgen.generators import DiT, dit, fp8, sampling_ops
from driftgen.generators.dit import Attention, DiTConfig, SwiGLU, rope_tables
from driftgen.generators.fp8 import Fp8SwiGLU, quantize
from tests.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401
from tests.test_fused import error
from tests.test_head_ops import exact_heads

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
# Queries, keys, weights and the result are rounded: four times at most.
ALLOWED = {BFLOAT16: 6e-3, FLOAT16: 8e-4}


@pytest.fixture(autouse=True, scope="module")
def _eight_bits_on_the_cpu():
    """The interpreter does not round to the nearest 8-bit number: mended here."""
    if DEVICE == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, pytest.MonkeyPatch()
    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self, source, target, rounding):
        if target.scalar != tl.float8e4nv:
            return convert(self, source, target, rounding)
        rounded = torch.from_numpy(source.data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return interpreter.TensorHandle(rounded, tl.float8e4nv)

    patch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
    yield
    patch.undo()


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape)).to(dtype).to(DEVICE)


def case(batch, tokens, heads, head, dtype, weight=1.0):
    cos, sin = rope_tables(tokens, head, torch.device(DEVICE))
    weights = [weight * (1 + draw(head, scale=0.3)) for _ in range(2)]
    return draw(batch, tokens, 3 * heads * head, dtype=dtype, scale=2), *weights, cos, sin


def exact(qkv, *rest, heads):
    *weights, cos, sin = (t.double() for t in rest)
    q, k, v = exact_heads(cos, sin, heads)(qkv.double(), *weights)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# --- attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "head", "dtype"),
    [
        (1, 272, 2, 64, BFLOAT16),
        (2, 17, 3, 64, BFLOAT16),
        (1, 64, 1, 64, FLOAT16),
        (1, 200, 1, 32, BFLOAT16),
        (1, 128, 1, 128, BFLOAT16),
    ],
)
def test_attention_is_exact(batch, tokens, heads, head, dtype):
    inputs = case(batch, tokens, heads, head, dtype)
    with torch.no_grad():
        assert sampling_ops.covers_attention(inputs[0], heads)
        got = sampling_ops.attention(*inputs, heads)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert error(got, exact(*inputs, heads=heads)) < ALLOWED[dtype]


@pytest.mark.parametrize(("dtype", "weight"), [(BFLOAT16, 6.0), (BFLOAT16, 40.0), (FLOAT16, 6.0)])
def test_large_scores(dtype, weight):
    """Beyond what exponentials without a shift hold; there attention is a choice of one key."""
    inputs = case(1, 150, 1, 64, dtype, weight)
    got = sampling_ops.attention(*inputs, 1)
    assert got.isfinite().all()
    # The rounding of scores counts: by how much is known from the same numbers in PyTorch.
    module = attention_of(1, 64, inputs)
    with devices.without_kernels():
        q, k, v = module.heads(inputs[0], *inputs[3:])
        plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    want = exact(*inputs, heads=1)
    assert error(got, want) < 1.2 * error(plain, want) + ALLOWED[dtype]


def attention_of(heads, head, inputs):
    module = Attention(DiTConfig(hidden_size=heads * head, num_heads=heads)).to(DEVICE)
    module.query_norm.weight.data, module.key_norm.weight.data = inputs[1:3]
    return module.requires_grad_(False)


def test_attention_is_that_of_the_module():
    """In bfloat16: the same numbers up to a rounding of each."""
    cos, sin = rope_tables(70, 64, torch.device(DEVICE))
    module = Attention(DiTConfig(hidden_size=128, num_heads=2)).to(DEVICE, BFLOAT16)
    x = draw(2, 70, 128, dtype=BFLOAT16)
    with torch.no_grad():
        got = module(x, cos, sin)
        with devices.without_kernels():
            plain = module(x, cos, sin)
            want = module.double()(x.double(), cos.double(), sin.double())
    assert error(got, plain) < 2 * ALLOWED[BFLOAT16]
    assert error(got, want) < 1.2 * error(plain, want)


def calls(monkeypatch):
    found = []
    real = sampling_ops.attention
    monkeypatch.setattr(dit, "attention", lambda *inputs: (found.append(inputs), real(*inputs))[1])
    return found


@pytest.mark.parametrize(
    ("options", "dtype", "used"),
    [
        ({}, BFLOAT16, 1),
        ({}, torch.float32, 0),
        ({"attention_float32": True}, BFLOAT16, 0),
        ({"rope": False}, BFLOAT16, 0),
        ({"qk_norm": False}, BFLOAT16, 0),
        ({"num_heads": 4}, BFLOAT16, 0),  # heads of 16
    ],
)
def test_where_attention_is_used(options, dtype, used, monkeypatch):
    found = calls(monkeypatch)
    sizes = {"input_size": 8, "hidden_size": 64, "num_heads": 2, "depth": 1, "context_tokens": 2}
    network = DiT(**{**sizes, "num_classes": 4, "style_codebooks": 1, **options}).to(DEVICE, dtype)
    noise, labels = network.sample_noise(2), torch.tensor([0, 1], device=DEVICE)
    if used:
        network(noise, labels).sum().backward()
        assert not found  # gradients are wanted
    with torch.inference_mode():
        network(noise, labels)
        assert len(found) == used
        with devices.without_kernels():
            network(noise, labels)
    network.requires_grad_(False)(noise, labels)
    assert len(found) == 2 * used


def test_what_attention_covers():
    qkv = torch.zeros(1, 272, 3 * 128, dtype=BFLOAT16, device=DEVICE)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    assert sampling_ops.covers_attention(qkv, 2, weight.detach())
    assert sampling_ops.covers_attention(qkv, 1)  # a head of 128
    assert not sampling_ops.covers_attention(qkv, 2, weight)
    assert not sampling_ops.covers_attention(qkv.float(), 2)
    assert not sampling_ops.covers_attention(qkv.expand(2, -1, -1).reshape(1, 544, -1), 2)
    assert not sampling_ops.covers_attention(qkv.new_zeros(1, 512, 384), 1)  # keys and values of 256 KiB
    with torch.no_grad():
        assert sampling_ops.covers_attention(qkv, 2, weight)
    with devices.without_kernels():
        assert not sampling_ops.covers_attention(qkv, 2)


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


# --- 8-bit numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(5, 48, BFLOAT16), (3, 2752, BFLOAT16), (4, 64, FLOAT16)]
)
def test_swiglu_in_eight_bits(rows, width, dtype):
    # silu of such numbers is exact, so that all of the rest has to be.
    gate = torch.randint(32, 100, (rows, width), device=DEVICE).to(dtype)
    value = draw(rows, width, dtype=dtype)
    value[1] = 0
    eights, scales = sampling_ops.swiglu_in_eight_bits(torch.cat([gate, value], 1))
    want, want_scales = quantize(F.silu(gate) * value)
    assert eights.dtype == torch.float8_e4m3fn
    assert torch.equal(scales, want_scales)
    assert torch.equal(eights.float(), want.float())


def test_silu():
    both = torch.linspace(-100, 100, 512, device=DEVICE).to(BFLOAT16).repeat(4, 1)
    both[:, 256:] = draw(4, 256, dtype=BFLOAT16)
    both[2:, :256] = draw(2, 256, dtype=BFLOAT16, scale=2)
    eights, scales = sampling_ops.swiglu_in_eight_bits(both)
    gate, value = both.chunk(2, dim=1)
    want, want_scales = quantize(F.silu(gate) * value)
    # Another last digit may fall on the other side of a rounding edge.
    torch.testing.assert_close(scales, want_scales, rtol=2**-7, atol=0)
    assert (eights.float() != want.float()).double().mean() < 1e-2
    assert error(eights.float() * scales, want.float() * want_scales) < 1e-2


def test_a_layer_in_eight_bits(monkeypatch):
    def product(rows, weight, scale, weight_scale, *, bias, out_dtype, use_fast_accum):
        return ((rows.float() * scale) @ (weight.float() * weight_scale) + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    layer = Fp8SwiGLU(SwiGLU(32, 48).to(DEVICE))
    used = []
    real = sampling_ops.swiglu_in_eight_bits
    monkeypatch.setattr(fp8, "swiglu_in_eight_bits", lambda both: (used.append(both.shape), real(both))[1])
    for dtype in (torch.float32, BFLOAT16):
        x = draw(2, 5, 32, dtype=dtype, scale=3)
        with torch.inference_mode():
            got = layer(x)
            assert used.pop() == (10, 96)
            with devices.without_kernels():
                want = layer(x)
        assert not used
        assert got.dtype == dtype
        assert got.shape == x.shape
        assert error(got, want) < 1e-2
