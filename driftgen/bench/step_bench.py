"""One whole training step on synthetic samples and random weights: generator, encoder of generated (with
gradient) and real samples, drifting loss, clipping, AdamW, EMA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from driftgen.bench.cards import card_of
from driftgen.bench.clock import Timing, free, timed
from driftgen.bench.loss_bench import Case, loss_operations
from driftgen.bench.memory import count_bytes
from driftgen.bench.profiler import Cost, Phases, profile_step
from driftgen.bench.record import Row, least_time
from driftgen.bench.weights import randomize_zero_weights
from driftgen.drift.guidance import sample_alpha
from driftgen.drift.loss import DriftingLoss
from driftgen.errors import InputError, unknown_name
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.features.stack import FeatureStack
from driftgen.generators.dit import PRESETS, DiT
from driftgen.ops.compile import compile_parts, to_channels_last
from driftgen.ops.dispatch import has_kernels, without_kernels
from driftgen.training.config import Optimizer
from driftgen.training.ema import EMA
from driftgen.training.graphed_step import GraphedStep
from driftgen.training.microbatch import MicroBatchedStep
from driftgen.training.optimizer import clip, make_optimizer
from driftgen.training.step import DriftStep, StepInputs, StepOutput, guided_inputs

__all__ = [
    "Built",
    "Sizes",
    "build_step",
    "count_operations",
    "default_sizes",
    "measure_steps",
    "profile_sizes",
]

LATENT = (4, 32, 32)
ENLIVENED = 0.02  # standard deviation of the weights that start at zero
REFERENCE_REPEATS = 2  # of the plain way, which takes several times as long
PRESET_DEPTH = 12  # of the paper's B/2


@dataclass(frozen=True)
class Sizes:
    """What a step is made of. The defaults are the paper's ablation configuration at an eighth of its
    classes, the most that the authors' code has been measured with on one card; attention is in float32
    there, as in their configuration of it.
    """

    classes: int = 8
    generated: int = 64
    positives: int = 64
    unconditional: int = 16
    preset: str = "B/2"
    depth: int = 12
    base: int = 256
    micro: int = 1
    mode: Literal["exact", "previous"] = "exact"
    compile: bool = False
    graph: bool = False
    channels_last: bool = False
    attention_float32: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name, least in (("classes", 1), ("generated", 2), ("positives", 1), ("unconditional", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("depth", "base", "micro"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.micro > self.classes:
            raise InputError(f"micro={self.micro} must not be above classes={self.classes}")
        if self.graph and self.micro > 1:
            raise InputError(f"graph: a step in {self.micro} parts is not recorded; give micro=1")
        if self.mode not in ("exact", "previous"):
            raise unknown_name("mode", self.mode, ("exact", "previous"))
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)

    @property
    def real(self) -> int:
        """Positives and unconditional samples of a class."""
        return self.positives + self.unconditional


def default_sizes(device: torch.device) -> Sizes:
    """The paper's networks on a GPU; small ones on the CPU, where they would take minutes."""
    if device.type == "cuda":
        return Sizes()
    return Sizes(2, 4, 4, 1, preset="S/2-32px", depth=2, base=16, dtype=torch.float32)


@dataclass(frozen=True)
class Built:
    """A step that can be run, its parts, and what they hold before the first one."""

    run: Callable[[], torch.Tensor]
    generator: DiT
    features: FeatureStack
    optimizer: torch.optim.Optimizer
    held_bytes: int


def build_step(sizes: Sizes, device: torch.device, phases: Phases | None = None) -> Built:
    """The networks and the step, as a run has them; ``phases`` marks where each part begins."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"in_channels": LATENT[0], "num_classes": 1000, "depth": sizes.depth}
    generator = DiT.preset(sizes.preset, attention_float32=sizes.attention_float32, **options).to(device)
    randomize_zero_weights(generator, ENLIVENED)
    encoder: Any = ResNetMAE(LATENT[0], sizes.base, decoder=False)
    phi = FeatureStack([encoder]).to(device)
    averages = EMA(generator, [0.999])
    optimizer = make_optimizer(generator.parameters(), Optimizer())
    if sizes.compile:
        compile_parts(generator)
        compile_parts(phi)
    if sizes.compile or sizes.channels_last:
        to_channels_last(generator)
        to_channels_last(phi)
    loss = DriftingLoss()
    if phases is not None:
        phases.watch(generator, phi, loss)
    autocast = None if sizes.dtype == torch.float32 else sizes.dtype
    step = DriftStep(generator, phi.features, loss, generated=sizes.generated, autocast=autocast)
    compute: Callable[[StepInputs], StepOutput] = step
    if sizes.micro > 1:
        compute = MicroBatchedStep(step, sizes.micro, sizes.mode)
    elif sizes.graph:
        compute = GraphedStep(step, generator.parameters(), _refuse)
    drawn = _draw(sizes, generator, device)

    def run() -> torch.Tensor:
        if phases is not None:
            phases.begin("optimizer")
        optimizer.zero_grad()
        out = compute(drawn)
        if phases is not None:
            phases.begin("optimizer")
        clip(generator.parameters(), 2.0)
        optimizer.step()
        averages.update(generator)
        return out.loss

    networks = [generator, phi, *averages.models.values()]
    held = count_bytes(tensor for network in networks for tensor in network.state_dict().values())
    return Built(run, generator, phi, optimizer, held)


def _refuse(why: str) -> None:
    """What was not recorded must not be shown as if it were."""
    raise InputError(f"graph: {why}")


def _draw(sizes: Sizes, generator: DiT, device: torch.device) -> StepInputs:
    classes = sizes.classes
    labels, alpha = torch.randint(1000, (classes,), device=device), sample_alpha(classes).to(device)
    return guided_inputs(
        generator.sample_noise(classes * sizes.generated),
        labels,
        alpha,
        torch.randn(classes, sizes.positives, *LATENT, device=device),
        torch.randn(classes, sizes.unconditional, *LATENT, device=device),
        generated=sizes.generated,
    )


@torch.no_grad()
def count_operations(call: Callable[[], Any]) -> int:
    """Operations of the products, convolutions and attention in one call."""
    # Only attention written out as products is counted on every device, and none in kernels of our own.
    with without_kernels(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return int(counter.get_total_flops())


def step_operations(sizes: Sizes, built: Built) -> float:
    """Of a step without recomputation: the backward pass costs two forward ones, one through the frozen
    encoder.
    """
    sample = torch.randn(1, *LATENT, device=next(built.generator.parameters()).device)
    labels = torch.zeros(1, dtype=torch.int64, device=sample.device)
    noise = built.generator.sample_noise(1)
    generator = count_operations(lambda: built.generator(noise, labels, 1.0))
    shapes: dict[str, tuple[int, int]] = {}

    def encode() -> None:
        found = built.features.features(sample)
        shapes.update({name: (value.shape[1], value.shape[2]) for name, value in found.items()})

    encoder = count_operations(encode)
    case = Case("", sizes.classes, sizes.generated, sizes.positives, sizes.unconditional, shapes)
    each = sizes.generated * (3 * generator + 2 * encoder) + sizes.real * encoder
    return sizes.classes * each + loss_operations(case)


def measure_steps(
    variants: Sequence[Sizes],
    device: torch.device,
    repeats: int,
    on_row: Callable[[int, float], None] = lambda done, seconds: None,
) -> list[Row]:
    """Ways to run the same step, beside the plain way: whole, not compiled, with the loss in PyTorch."""
    plain = _plainest(variants[0])
    with without_kernels():
        reference, held = _time_step(plain, device, min(repeats, REFERENCE_REPEATS))
    on_row(1, 0.0 if reference is None else reference.seconds)
    operations = _count_step(plain, device)
    rows = []
    for sizes in variants:
        if sizes == plain and not has_kernels(device):
            rows.append(_row(sizes, device, reference, reference, held, operations))
        else:
            timing, held = _time_step(sizes, device, repeats)
            rows.append(_row(sizes, device, timing, reference, held, operations))
        on_row(1 + len(rows), 0.0 if rows[-1].timing is None else rows[-1].timing.seconds)
    return rows


def _row(
    sizes: Sizes,
    device: torch.device,
    timing: Timing | None,
    reference: Timing | None,
    held: int,
    operations: float,
) -> Row:
    card = card_of(device)
    words = [f"{sizes.micro} parts, {sizes.mode}" if sizes.micro > 1 else "whole"]
    words += ["compiled"] * sizes.compile + ["CUDA graph"] * sizes.graph
    words += ["channels last"] * sizes.channels_last
    words += ["16-bit attention"] * (sizes.dtype != torch.float32 and not sizes.attention_float32)
    release = None
    if card is not None and sizes.dtype == torch.bfloat16 and sizes.depth == PRESET_DEPTH:
        counts = sizes.classes, sizes.generated, sizes.positives, sizes.unconditional
        release = card.step.get((sizes.preset, sizes.base, *counts))
    values = {name: getattr(sizes, name) for name in sizes.__dataclass_fields__}
    return Row(
        f"{sizes.classes} x {sizes.generated}/{sizes.positives}/{sizes.unconditional}",
        ", ".join(words),
        timing,
        {"eager": reference},
        release,
        # Bytes depend on what is recomputed, and bound the step less tightly.
        least_time(card, moved=0, operations=operations, dtype=sizes.dtype),
        held_bytes=held,
        more={"sizes": values | {"dtype": str(sizes.dtype).removeprefix("torch.")}},
    )


def profile_sizes(sizes: Sizes, device: torch.device) -> list[Cost]:
    """Where the time of one step goes: launch by launch, as only launches tell which part they belong to."""
    phases = Phases()
    built = build_step(replace(sizes, graph=False), device, phases)
    for _ in range(2):
        built.run()
    return profile_step(built.run, device)


def _plainest(sizes: Sizes) -> Sizes:
    return replace(sizes, micro=1, mode="exact", compile=False, graph=False, channels_last=False)


def _time_step(sizes: Sizes, device: torch.device, repeats: int) -> tuple[Timing | None, int]:
    """None if it does not fit; and the bytes of the networks and of the optimiser."""
    timing, held = None, 0
    torch.compiler.reset()
    try:
        built = build_step(sizes, device)
        held = built.held_bytes
        timing = timed(built.run, device, repeats, meter=not sizes.compile, cold_peak=sizes.graph)
        if device.type == "cpu":  # made in the first step, where the GPU's statistics count them
            held += count_bytes(t for state in built.optimizer.state.values() for t in state.values())
    except torch.cuda.OutOfMemoryError:
        pass
    built = None  # type: ignore[assignment]
    free(device)
    return timing, held


def _count_step(sizes: Sizes, device: torch.device) -> float:
    built = build_step(replace(sizes, classes=1, generated=2, positives=1, unconditional=0), device)
    operations = step_operations(sizes, built)
    del built
    free(device)
    return operations
