"""Fixtures that run the tests of Triton kernels: on an NVIDIA GPU, or on the CPU in Triton's interpreter. A
test file that imports them uses them."""

import numpy as np
import pytest
import torch

from driftgen.ops import dispatch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", {"cuda", "cpu"})


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_on_the_cpu():
    """Fix bfloat16 in the interpreter, which multiplies its bits as integers and truncates on rounding."""
    if DEVICE == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, pytest.MonkeyPatch()
    dot, truncate = builder.create_dot, builder.create_fp_trunc

    def wide(handle):
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, *(wide(t) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)), *rest)

    def create_fp_trunc(self, source, target):
        if target.scalar != tl.bfloat16:
            return truncate(self, source, target)
        rounded = torch.from_numpy(source.data.astype(np.float32)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "create_fp_trunc", create_fp_trunc)
    yield
    patch.undo()
