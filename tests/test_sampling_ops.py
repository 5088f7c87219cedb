"""The kernel of sampling in 8-bit numbers against the modules in PyTorch; see ``tests/interpreter.py`` for
where it runs.
"""

import pytest
import torch
import torch.nn.functional as F

from driftgen import devices
from driftgen.generators import fp8, sampling_ops
from driftgen.generators.dit import SwiGLU
from driftgen.generators.fp8 import Fp8SwiGLU, quantize
from tests.block_cases import BFLOAT16, FLOAT16, draw
from tests.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401
from tests.test_fused import error


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
