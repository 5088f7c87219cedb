"""``driftgen bench sampling``: from noise to samples on the device (eager, compiled, CUDA graph, fp8); from
labels to samples on the host, one batch per call (pipeline) or several (stream).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from driftgen.bench.cards import card_of
from driftgen.bench.clock import Timing, free, timed
from driftgen.bench.memory import count_bytes
from driftgen.bench.record import Row, least_time
from driftgen.bench.step_bench import count_operations
from driftgen.bench.weights import randomize_zero_weights
from driftgen.errors import InputError, unknown_name
from driftgen.generators import dit, unet
from driftgen.generators.fp8 import check_fp8, use_fp8
from driftgen.ops.compile import compile_parts
from driftgen.ops.cuda_graphs import GraphedFunction, check_compiler, static_shapes
from driftgen.pipeline import DriftPipeline
from driftgen.support.whole_numbers import check_count

__all__ = [
    "MODES",
    "check_sampling",
    "default_modes",
    "default_presets",
    "fp8_errors",
    "make_generator",
    "measure_sampling",
]

MODES = ("eager", "compiled", "graph", "fp8", "pipeline", "stream")
LARGEST_BATCH = 2**31 - 1
STREAMED = 8  # batches of one call: the host draws noise and copies results while the GPU computes
Network = dit.DiT | unet.UNet2D


def default_presets(device: torch.device) -> tuple[list[str], list[int]]:
    """Return presets and batch sizes: the paper's for a GPU, those of 32-pixel images for the CPU."""
    return (["B/2", "L/2"], [1, 64, 256]) if device.type == "cuda" else (["32px", "S/2-32px"], [1, 8])


def default_modes(device: torch.device, presets: Sequence[str]) -> list[str]:
    """Return all modes that the device and the presets support; eager and compiled for the CPU."""
    if device.type != "cuda":
        return list(MODES[:2])
    try:
        _check_fp8(presets, device)
    except InputError:
        return [mode for mode in MODES if mode != "fp8"]
    return list(MODES)


def make_generator(preset: str) -> Network:
    """Build a DiT or a UNet by the name of its preset, with random weights."""
    if preset in dit.PRESETS:
        return dit.DiT.preset(preset)
    if preset in unet.PRESETS:
        return unet.UNet2D.preset(preset)
    raise unknown_name("preset", preset, [*dit.PRESETS, *unet.PRESETS])


def check_sampling(
    presets: Sequence[str], batches: Sequence[int], modes: Sequence[str], device: torch.device
) -> None:
    """Raise an InputError for a combination that cannot be measured."""
    for preset in presets:
        if preset not in dit.PRESETS and preset not in unet.PRESETS:
            raise unknown_name("preset", preset, [*dit.PRESETS, *unet.PRESETS])
    for batch in batches:
        check_count("batch", batch, most=LARGEST_BATCH)
    for mode in modes:
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
    if "graph" in modes and device.type != "cuda":
        raise InputError(f"mode=graph needs an NVIDIA GPU: device={device.type} has no CUDA graphs")
    if "fp8" in modes:
        _check_fp8(presets, device)
    for mode in modes:
        if mode not in ("eager", "graph"):
            try:
                check_compiler(device)
            except RuntimeError as error:
                raise _not_compiled(mode, error) from None


def _check_fp8(presets: Sequence[str], device: torch.device) -> None:
    check_fp8(device)
    for preset in presets:
        if preset not in dit.PRESETS:
            raise InputError(f"mode=fp8: preset={preset} has no fp8 layers; give a DiT preset, such as B/2")


def measure_sampling(
    preset: str,
    batches: Sequence[int],
    modes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    on_row: Callable[[float], None] = lambda seconds: None,
) -> list[Row]:
    """Measure a generator at each batch size in each mode; the reference is the eager call."""
    torch.manual_seed(0)
    network = make_generator(preset).to(device, dtype).eval()
    operations = count_operations(_call(network, 1))
    errors = fp8_errors(preset, dtype, device) if "fp8" in modes else []
    card, rows = card_of(device), []
    for batch in batches:
        timings: dict[str, Timing | None] = {}
        for mode in sorted({"eager", *modes}, key=MODES.index):
            compiled = "compiled" in modes if mode == "graph" else mode != "eager"
            timings[mode], held = _time_mode(network, mode, compiled, batch, device, repeats)
            timing = timings[mode]
            on_row(0.0 if timing is None else timing.seconds)
            if mode not in modes:
                continue
            elements = 2 * batch * network.config.in_channels * network.config.input_size**2
            moved = held + elements * dtype.itemsize
            detail = {"graph": f"graph, {'compiled' if compiled else 'eager'}", "fp8": "graph, fp8"}
            detail["stream"] = f"pipeline, {STREAMED} batches"
            more = {"preset": preset, "batch": batch, "mode": mode, "operations_an_image": operations}
            rows.append(
                Row(
                    f"{type(network).__name__} {preset} x {batch}",
                    detail.get(mode, mode),
                    timing,
                    {} if mode == "eager" else {"eager": timings["eager"]},
                    card.sampling.get((preset, batch)) if card and dtype == torch.bfloat16 else None,
                    least_time(
                        card, moved=moved, operations=batch * operations, dtype=dtype, fp8=mode == "fp8"
                    ),
                    held_bytes=held,
                    images=batch,
                    more=more | ({"errors": errors} if mode == "fp8" else {}),
                )
            )
    del network
    free(device)
    return rows


def fp8_errors(preset: str, dtype: torch.dtype, device: torch.device, count: int = 8) -> list[dict[str, Any]]:
    """Compute ‖x - y‖ / ‖y‖ of fp8 samples against ``dtype`` and float32 samples from the same noise.

    Weights are random; blocks contribute more with the larger standard deviation.
    """
    rows = []
    for std in (0.02, 0.3):
        wide = make_generator(preset).to(device).eval()
        randomize_zero_weights(wide, std)
        plain = copy.deepcopy(wide).to(dtype)
        small = copy.deepcopy(plain)
        use_fp8(small)
        labels = torch.arange(count, device=device) % wide.config.num_classes
        with torch.inference_mode():
            noise = wide.sample_noise(count)
            exact, ours, rounded = (f(noise, labels, 1.0).double() for f in (wide, plain, small))
        rows.append(
            {
                "std": std,
                "against_eager": _distance(rounded, ours),
                "against_float32": _distance(rounded, exact),
                "eager_against_float32": _distance(ours, exact),
            }
        )
    return rows


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def _time_mode(
    network: Network, mode: str, compiled: bool, batch: int, device: torch.device, repeats: int
) -> tuple[Timing | None, int]:
    """Return the timing, None if out of memory, and the bytes of the weights."""
    # Each mode compiles from scratch, so that its first call is a cold one.
    torch.compiler.reset()
    variant = network if mode == "eager" else copy.deepcopy(network)
    if mode == "fp8":
        use_fp8(variant)
    held = count_bytes(variant.state_dict().values())
    timing, call = None, None
    try:
        with static_shapes():
            call = _prepare(variant, mode, compiled, batch)
            captured = mode not in ("eager", "compiled")
            timing = timed(call, device, repeats, warmup=3, meter=not compiled, cold_peak=captured)
            if mode == "stream":
                timing = replace(timing, seconds=timing.seconds / STREAMED, best=timing.best / STREAMED)
                timing = replace(timing, queued_seconds=None)  # each call waits for its results
    except torch.cuda.OutOfMemoryError:
        pass
    except TorchDynamoException as error:
        raise _not_compiled(mode, error) from None
    del call, variant
    free(device)
    return timing, held


def _not_compiled(mode: str, error: RuntimeError) -> InputError:
    why = next(iter(str(error).splitlines()), type(error).__name__)
    return InputError(f"mode={mode}: torch.compile fails: {why}; give --mode eager")


def _prepare(network: Network, mode: str, compiled: bool, batch: int) -> Callable[[], Tensor]:
    if mode in ("pipeline", "stream"):
        pipe = DriftPipeline(network, batch_size=batch).compile()
        count = batch * (STREAMED if mode == "stream" else 1)
        return functools.partial(pipe, [0] * count, seed=0, output="latent")
    if compiled:
        compile_parts(network)
    call = _call(network, batch)
    return call if mode in ("eager", "compiled") else GraphedFunction(call)


def _call(network: Network, batch: int) -> Callable[[], Tensor]:
    device = network.conditioning.classes.weight.device
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    alpha = torch.ones(batch, device=device)

    def call() -> Tensor:
        with torch.inference_mode():
            return network(network.sample_noise(batch), labels, alpha)  # type: ignore[no-any-return]

    return call
