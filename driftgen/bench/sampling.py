"""One-step sampling, from drawn noise to samples on the device: eager, compiled, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from driftgen.bench.cards import card_of
from driftgen.bench.clock import Timing, free, timed
from driftgen.bench.memory import count_bytes
from driftgen.bench.record import Row, least_time
from driftgen.bench.step import count_operations
from driftgen.errors import InputError, unknown_name
from driftgen.generators import dit, unet

__all__ = [
    "MODES",
    "check_sampling",
    "default_modes",
    "default_presets",
    "make_generator",
    "measure_sampling",
]

MODES = ("eager", "compiled", "graph")
Network = dit.DiT | unet.UNet2D


def default_presets(device: torch.device) -> tuple[list[str], list[int]]:
    """Presets and batches: the paper's on a GPU; on the CPU those of 32-pixel images, the UNet of the
    ``cifar10`` recipe first.
    """
    return (["B/2", "L/2"], [1, 64, 256]) if device.type == "cuda" else (["32px", "S/2-32px"], [1, 8])


def default_modes(device: torch.device) -> list[str]:
    """All that the device knows."""
    return list(MODES if device.type == "cuda" else MODES[:2])


def make_generator(preset: str) -> Network:
    """A DiT or a UNet by the name of its preset, with random weights."""
    if preset in dit.PRESETS:
        return dit.DiT.preset(preset)
    if preset in unet.PRESETS:
        return unet.UNet2D.preset(preset)
    raise unknown_name("preset", preset, [*dit.PRESETS, *unet.PRESETS])


def check_sampling(
    presets: Sequence[str], batches: Sequence[int], modes: Sequence[str], device: torch.device
) -> None:
    """Refuses what cannot be measured, before anything is."""
    for preset in presets:
        if preset not in dit.PRESETS and preset not in unet.PRESETS:
            raise unknown_name("preset", preset, [*dit.PRESETS, *unet.PRESETS])
    for batch in batches:
        if batch < 1:
            raise InputError(f"batch={batch} must be at least 1")
    for mode in modes:
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
    if "graph" in modes and device.type != "cuda":
        raise InputError("mode=graph needs an NVIDIA GPU: CUDA graphs are a thing of theirs")


def measure_sampling(
    preset: str,
    batches: Sequence[int],
    modes: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    on_row: Callable[[float], None] = lambda seconds: None,
) -> list[Row]:
    """One generator at each batch, in each mode; the eager call of the same run is the reference."""
    torch.manual_seed(0)
    network = make_generator(preset).to(device, dtype).eval()
    held = count_bytes(network.state_dict().values())
    operations = count_operations(_call(network, network, 1))
    card, rows = card_of(device), []
    for batch in batches:
        found: dict[str, Timing | None] = {}
        for mode in sorted({"eager", *modes}, key=MODES.index):
            compiled = mode == "compiled" or (mode == "graph" and "compiled" in modes)
            found[mode] = _time_mode(network, mode, compiled, batch, device, repeats)
            timing = found[mode]
            on_row(0.0 if timing is None else timing.seconds)
            if mode not in modes:
                continue
            numbers = 2 * batch * network.config.in_channels * network.config.input_size**2
            moved = held + numbers * dtype.itemsize
            rows.append(
                Row(
                    f"{type(network).__name__} {preset} x {batch}",
                    f"graph, {'compiled' if compiled else 'eager'}" if mode == "graph" else mode,
                    timing,
                    {} if mode == "eager" else {"eager": found["eager"]},
                    card.sampling.get((preset, batch)) if card and dtype == torch.bfloat16 else None,
                    least_time(card, moved=moved, operations=batch * operations, dtype=dtype),
                    held_bytes=held,
                    images=batch,
                    more={"preset": preset, "batch": batch, "mode": mode, "operations_an_image": operations},
                )
            )
    del network
    free(device)
    return rows


def _time_mode(
    network: Network, mode: str, compiled: bool, batch: int, device: torch.device, repeats: int
) -> Timing | None:
    """None if it does not fit."""
    # A form for each batch, as one for all sizes would be slower; forgotten before the next, or compiling
    # would stop after a few of them.
    torch.compiler.reset()
    forward: Callable[..., Tensor] = torch.compile(network, dynamic=False) if compiled else network
    call = _call(network, forward, batch)
    timing = None
    try:
        if mode == "graph":
            timing = timed(_Graphed(call), device, repeats, warmup=3, cold_peak=True)
        else:
            timing = timed(call, device, repeats, warmup=3, meter=not compiled)
    except torch.cuda.OutOfMemoryError:
        pass
    except TorchDynamoException as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"mode={mode}: torch.compile fails here: {why}; or give --mode eager") from None
    del call, forward
    free(device)
    return timing


def _call(network: Network, forward: Callable[..., Tensor], batch: int) -> Callable[[], Tensor]:
    device = network.conditioning.classes.weight.device
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    alpha = torch.ones(batch, device=device)

    def call() -> Tensor:
        with torch.inference_mode():
            return forward(network.sample_noise(batch), labels, alpha)

    return call


class _Graphed:
    """A call recorded at its first use and replayed after; the noise is drawn anew in each replay."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.call = call
        self.recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def __call__(self) -> Tensor:
        if self.recorded is None:
            self.recorded = self._record()
        graph, output = self.recorded
        graph.replay()
        return output

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # What is compiled or set up at a first call must not be recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.call()
        return graph, output
