"""Odd arguments for every public function: a finite answer, or InputError in one line.

``python -m tests.support.odd_api_inputs --seconds 60`` tries as many as fit and prints the counts. A case is
a call that works, with one or two of its arguments replaced by odd values.
"""

import contextlib
import dataclasses
import io
import os
import random
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from tests.support.api_call import Call
from tests.support.api_calls import CALLS
from tests.support.fault_search import Counts, Fault, HangError, bounds, chosen, main, reproduction

os.environ["HF_HUB_OFFLINE"] = "1"  # names of repositories among the odd values are not looked up
NAN, INF, HUGE = float("nan"), float("inf"), 10**30
BATCH = 20  # cases of a call before the next one
OVERFLOWS = 1e15  # numbers above overflow in a network
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 1.5, -0.5, 1e-30, 1e30, 1e300, 2**31, 2**63, 10**12, HUGE, -HUGE, NAN, INF, -INF, True, 1j,
    "1", np.int64(2), np.float32(0.5), np.float64(NAN),
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "",
    "x",
    " ",
    "../x",
    "a" * 5000,
    "\n",
    "\0",
    "é",
    "~nouser/x",
    "hf://x",
    "cpu",
    b"x",
)
OTHERS: tuple[Any, ...] = (
    None, (), [], [None], ["x"], [NAN], {}, {"x": 1}, {1: 2}, {"x"}, object(), Path("missing"),
    range(3), iter(()), types.SimpleNamespace(), torch.float32, torch.device("cpu"), np.zeros((2, 3)),
    np.array(["x"]), np.array([None]),
)  # fmt: skip


def odd_tensor(tensor: Tensor, rng: random.Random) -> Any:
    """Return a tensor of another kind, shape, dtype or content."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and quantized tensors
        return rng.choice(TENSORS)(tensor, rng)


def _spoiled(value: float) -> Callable[[Tensor, random.Random], Tensor]:
    def spoil(tensor: Tensor, rng: random.Random) -> Tensor:
        changed = tensor.detach().double() if abs(value) > 1e38 and abs(value) != INF else tensor.detach()
        changed = changed.clone() if changed.is_floating_point() else changed.float()
        flat = changed.reshape(-1)
        if len(flat):
            flat[rng.randrange(len(flat)) if rng.random() < 0.5 else slice(None)] = value
        return flat.reshape(changed.shape)

    return spoil


def _quantized(tensor: Tensor, rng: random.Random) -> Tensor:
    return torch.quantize_per_tensor(tensor.detach().float(), 0.1, 0, torch.qint8)


def _nested(tensor: Tensor, rng: random.Random) -> Tensor:
    layout = rng.choice([torch.strided, torch.jagged])
    return torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=layout)


def _reshaped(tensor: Tensor, rng: random.Random) -> Tensor:
    shape = list(tensor.shape)
    place = rng.randrange(len(shape) + 1)
    kind = rng.choice(["add", "drop", "empty", "more", "flat", "scalar"])
    if kind == "add" or not shape:
        return tensor.unsqueeze(place)
    place = min(place, len(shape) - 1)
    if kind == "drop":
        return tensor.select(place, 0) if shape[place] else tensor
    if kind == "flat":
        return tensor.reshape(-1)
    if kind == "scalar":
        return tensor.reshape(-1)[:1].reshape(()) if tensor.numel() else tensor
    shape[place] = 0 if kind == "empty" else shape[place] + rng.choice([1, 3])
    return torch.zeros(shape, dtype=tensor.dtype)


def _dtype(*dtypes: torch.dtype) -> Callable[[Tensor, random.Random], Tensor]:
    return lambda tensor, rng: tensor.detach().to(rng.choice(dtypes))


TENSORS: tuple[Callable[[Tensor, random.Random], Any], ...] = (
    lambda t, rng: t.detach().to_sparse(),
    lambda t, rng: t.detach().reshape(len(t) if t.ndim else 1, -1).to_sparse_csr(),
    _dtype(torch.float8_e4m3fn, torch.float8_e5m2),
    _dtype(torch.complex64, torch.complex128),
    _dtype(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    _dtype(torch.float16, torch.bfloat16, torch.float64),
    lambda t, rng: torch.empty(t.shape, dtype=t.dtype, device="meta"),
    _quantized,
    _nested,
    _reshaped,
    _reshaped,
    _reshaped,
    _spoiled(NAN),
    _spoiled(INF),
    _spoiled(1e30),
    _spoiled(-1e30),
    _spoiled(1e300),
    _spoiled(0.0),
    lambda t, rng: t.detach().numpy(),
    lambda t, rng: t.detach().tolist(),
    lambda t, rng: [t],
)


def odd_value(value: Any, rng: random.Random) -> Any:
    """Return an odd value in place of a valid one: most are of the same type."""
    if rng.random() < 0.25:
        return rng.choice((*NUMBERS, *TEXTS, *OTHERS, torch.zeros(2, 3), torch.tensor(1.0)))
    if isinstance(value, Tensor):
        return odd_tensor(value, rng)
    if isinstance(value, np.ndarray):
        odd = odd_tensor(torch.from_numpy(value), rng)
        dense = isinstance(odd, Tensor) and odd.layout == torch.strided and not odd.is_nested
        return odd.numpy() if dense and odd.device.type == "cpu" and not odd.is_quantized and \
            odd.dtype.itemsize > 1 and odd.dtype != torch.bfloat16 else odd  # fmt: skip
    if isinstance(value, bool) or value is None:
        return rng.choice((*NUMBERS, *TEXTS, *OTHERS))
    if isinstance(value, int | float):
        return rng.choice(NUMBERS)
    if isinstance(value, str | Path):
        return rng.choice(TEXTS)
    if isinstance(value, Mapping) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        rest = {name: each for name, each in value.items() if name != key}
        return rest if rng.random() < 0.1 else {**rest, key: odd_value(value[key], rng)}
    if isinstance(value, tuple | list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        items = [odd_value(each, rng) if i == place else each for i, each in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items[:-1] if rng.random() < 0.1 else items)
    return rng.choice(OTHERS)


def largest(value: Any) -> float:
    """Return the largest absolute number in a value, infinite for NaN; 0 if it holds none."""
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and not (value.is_nested or value.is_quantized)
        known = plain and value.is_floating_point() and value.device.type != "meta" and value.numel()
        return largest(float(value.detach().double().abs().max())) if known else 0.0
    if isinstance(value, np.ndarray):
        return largest(float(np.abs(value).max())) if value.dtype.kind == "f" and value.size else 0.0
    if isinstance(value, float):
        return INF if value != value else abs(value)
    if isinstance(value, int):
        return float(min(abs(value), HUGE))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return largest([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, Mapping):
        return largest(list(value.values()))
    return max(map(largest, value), default=0.0) if isinstance(value, tuple | list) else 0.0


class Case(NamedTuple):
    """A call, its arguments, and the names of the odd ones."""

    call: Call
    arguments: dict[str, Any]
    odd: tuple[str, ...]


def make_case(call: Call, number: int, folder: Path) -> Case:
    """Return the case of a call with a number; ``folder`` is for the files of the call."""
    rng = random.Random(f"{call.name} {number}")
    torch.manual_seed(number)
    arguments = call.arguments(folder)
    odd = rng.sample(sorted(arguments), min(len(arguments), 1 if rng.random() < 0.8 else 2))
    return Case(call, {**arguments, **{name: odd_value(arguments[name], rng) for name in odd}}, tuple(odd))


def try_case(case: Case, seconds: float | None = None) -> tuple[str, str | None]:
    """Make the call. Return the kind of the answer, and what is wrong with it or None."""
    overflows = largest(case.arguments) > OVERFLOWS
    try:
        with (
            bounds(*(() if seconds is None else (seconds,))),
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            answer = case.call.function(**case.arguments)
    except InputError as error:
        return "refused", f"more than one line: {str(error)[:200]!r}" if "\n" in str(error) else None
    except (Exception, HangError) as error:
        return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if largest(answer) == INF and not (overflows and case.call.propagates):
        return "answered", "the answer is not finite"
    return "answered", None


def describe(value: Any) -> str:
    """Return an odd value in a few words."""
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{value.dtype} {value.layout} {value.device} {shape}".replace("torch.", "")
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(describe, value)) + "]"
    return repr(value)[:60]


def try_call(call: Call, seed: int, count: int) -> Counts:
    """Try ``count`` cases of a call, with numbers from ``seed`` on."""
    counts = Counts()
    for number in range(seed, seed + count):
        # Relative paths among the odd values lead into the folder.
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            case = make_case(call, number, Path(folder))
            start = time.perf_counter()
            kind, problem = try_case(case)
            counts.took(time.perf_counter() - start)
        counts.tried += 1
        counts.kinds[kind] += 1
        if problem is not None:
            odd = ", ".join(f"{name}={describe(case.arguments[name])}" for name in case.odd)
            again = reproduction("tests.support.odd_api_inputs", number, call.name)
            counts.faults.append(Fault(f"{call.name}, seed {number}, {odd}: {problem}", again))
    return counts


def search(seed: int, only: str, seconds: float) -> Iterator[Counts]:
    """Try cases of all calls in turn."""
    calls = {call.name: call for call in CALLS}
    names = chosen(calls, only)
    while True:
        for name in names:
            yield try_call(calls[name], seed, BATCH if calls[name].quick else 2)
        seed += BATCH


if __name__ == "__main__":
    main(search)
