"""Fixtures that run the tests of Triton kernels: on an NVIDIA GPU, or on the CPU in Triton's interpreter. A
test file that imports them uses them."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from driftgen.drift.fused import coverage
from driftgen.ops import dispatch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", {"cuda", "cpu"})
    if DEVICE == "cpu":
        _patch_language_once(monkeypatch)


@pytest.fixture(autouse=True)
def _kernels_at_all_temperatures(monkeypatch):
    """Run the kernels also where drifts of the worst samples would underflow: those of the tests do not."""
    monkeypatch.setattr(coverage, "MAX_EXPONENT", dict.fromkeys(coverage.DTYPES, math.inf))


def _patch_language_once(monkeypatch):
    """Let the interpreter replace the language's functions once per kernel.

    It looks for functions to replace at every call of a function inside a kernel, where all are replaced
    already. That takes a third of the time of these tests.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton
        return
    patch = interpreter._patch_lang

    def patch_once(function):
        modules = _language_modules(function)
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()  # with nothing to restore
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


@cache
def _language_modules(function):
    """Return the modules of Triton's language that a function sees."""
    import triton.language as tl

    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


@pytest.fixture(autouse=True, scope="module")
def _bfloat16_on_the_cpu():
    """Fix bfloat16 in the interpreter, which multiplies its bits as integers and truncates on rounding.

    That of Triton 3.7 has no constants of bfloat16, either.
    """
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

    def get_bf16(self, value):
        return create_fp_trunc(self, self.get_fp32(value), tl.bfloat16)

    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "create_fp_trunc", create_fp_trunc)
    patch.setattr(builder, "get_bf16", get_bf16, raising=False)
    yield
    patch.undo()
