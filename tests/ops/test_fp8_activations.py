"""The float8 kernels of sampling against PyTorch; ``tests.support.interpreter`` decides where they run."""

import pytest
import torch
import torch.nn.functional as F

from driftgen.generators import DiT, fp8
from driftgen.generators.dit import SwiGLU
from driftgen.generators.fp8 import Fp8SwiGLU
from driftgen.ops import dispatch, fp8_activations
from driftgen.ops.fp8_activations import Fp8Activation, fp8_norm, fp8_swiglu, quantize, supports_fp8_norm
from tests.support.accuracy import error
from tests.support.block_cases import BFLOAT16, FLOAT16, draw
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _float8_on_the_cpu():
    """Round to the nearest float8 in the interpreter, which does not."""
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


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(5, 48, BFLOAT16), (3, 2752, BFLOAT16), (4, 64, FLOAT16)]
)
def test_swiglu_in_float8(rows, width, dtype):
    # silu of these gates is exact, so the rest must be exact too.
    gate = torch.randint(32, 100, (rows, width), device=DEVICE).to(dtype)
    value = draw(rows, width, dtype=dtype)
    value[1] = 0
    with torch.no_grad():
        rounded = fp8_swiglu(torch.cat([gate, value], 1))
    want, want_scales = quantize(F.silu(gate) * value)
    assert rounded.rows.dtype == torch.float8_e4m3fn
    assert (rounded.shape, rounded.dtype) == (value.shape, dtype)
    assert torch.equal(rounded.scale, want_scales)
    assert torch.equal(rounded.rows.float(), want.float())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5, 48), BFLOAT16), ((1, 19, 768), BFLOAT16), ((2, 4, 64), FLOAT16)], ids=str
)
def test_norm_in_float8(shape, dtype, gated):
    batch, _, width = shape
    x, branch = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    gate, scale, shift = draw(batch, 1, 3 * width, dtype=dtype, scale=0.3).chunk(3, dim=-1)
    weight = 1 + draw(width, scale=0.1)
    shift[0], x[0, 1] = 0, 0
    if gated:
        branch[0, 1] = 0
    added = (branch, gate) if gated else (None, None)
    with torch.inference_mode():
        assert supports_fp8_norm(x)
        total, rounded = fp8_norm(x, *added, weight, scale, shift)
    wide = x.double() + gate.double() * branch.double() if gated else x.double()
    assert torch.equal(total, wide.to(dtype)) if not gated else error(total, wide) < 3e-3
    normed = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normed = normed * weight.double() * (1 + scale.double()) + shift.double()
    want, want_scale = quantize(normed.to(dtype).flatten(0, 1))
    assert isinstance(rounded, Fp8Activation)
    assert (rounded.shape, rounded.dtype) == (x.shape, dtype)
    assert rounded.rows.dtype == torch.float8_e4m3fn
    # Another summation order may round to the other neighbor.
    torch.testing.assert_close(rounded.scale, want_scale, rtol=2**-7, atol=0)
    assert (rounded.rows.float() != want.float()).double().mean() < 2e-2
    assert error(rounded.rows.float() * rounded.scale, want.float() * want_scale) < 1e-2
    assert rounded.rows[1].float().abs().sum() == 0  # a token of zeros stays zero


def test_supported_streams():
    x = draw(2, 3, 48, dtype=BFLOAT16)
    assert not supports_fp8_norm(x)
    with torch.inference_mode():
        assert supports_fp8_norm(x)
        assert not supports_fp8_norm(x[..., :40])
        assert not supports_fp8_norm(x.double())


@pytest.mark.slow
def test_norms_of_a_float8_block(monkeypatch):
    """A block of float8 layers with and without the kernels."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(fp8, "check_fp8", lambda device: None)
    network = DiT(input_size=8, hidden_size=64, depth=2, num_heads=2, num_classes=4, context_tokens=4)
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    network.to(DEVICE, BFLOAT16)
    assert fp8.use_fp8(network) == 10
    noise, labels = network.sample_noise(2), torch.tensor([1, 3], device=DEVICE)
    called, real = [], fp8_activations._norm_fp8
    monkeypatch.setattr(fp8_activations, "_norm_fp8", lambda *a: (called.append(a[1] is None), real(*a))[1])
    with torch.inference_mode():
        got = network(noise, labels, 1.0)
        assert called == [True, False] * 2
        with dispatch.without_kernels():
            want = network(noise, labels, 1.0)
        assert len(called) == 4
        assert error(got, want) < 0.03
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(noise, labels, 1.0), got)
        seen = []
        network.blocks[0].attention.register_forward_pre_hook(lambda _, given: seen.append(type(given[0])))
        network(noise, labels, 1.0)
        assert seen == [torch.Tensor]


def product(rows, weight, scale, weight_scale, *, bias, out_dtype, use_fast_accum):
    return ((rows.float() * scale) @ (weight.float() * weight_scale) + bias.float()).to(out_dtype)


def test_silu():
    both = torch.linspace(-100, 100, 512, device=DEVICE).to(BFLOAT16).repeat(4, 1)
    both[:, 256:] = draw(4, 256, dtype=BFLOAT16)
    both[2:, :256] = draw(2, 256, dtype=BFLOAT16, scale=2)
    with torch.no_grad():
        rounded = fp8_swiglu(both)
    gate, value = both.chunk(2, dim=1)
    want, want_scales = quantize(F.silu(gate) * value)
    # Another last digit may round to the other neighbor.
    torch.testing.assert_close(rounded.scale, want_scales, rtol=2**-7, atol=0)
    assert (rounded.rows.float() != want.float()).double().mean() < 1e-2
    assert error(rounded.rows.float() * rounded.scale, want.float() * want_scales) < 1e-2


def test_a_swiglu_layer_in_float8(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", product)
    layer = Fp8SwiGLU(SwiGLU(32, 48).to(DEVICE))
    used = []
    real = fp8_activations._swiglu_fp8
    monkeypatch.setattr(fp8_activations, "_swiglu_fp8", lambda both: (used.append(both.shape), real(both))[1])
    for dtype in (torch.float32, BFLOAT16):
        x = draw(2, 5, 32, dtype=dtype, scale=3)
        with torch.inference_mode():
            got = layer(x)
            assert used.pop() == (10, 96)
            with dispatch.without_kernels():
                want = layer(x)
        assert not used
        assert got.dtype == dtype
        assert got.shape == x.shape
        assert error(got, want) < 1e-2
