"""``driftgen bench step``: one training step of the paper's ablation on synthetic latents and random weights.

A step is the generator, the encoder of generated (with gradient) and real samples, the drifting loss,
clipping, AdamW and EMA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from driftgen.bench.cards import card_of
from driftgen.bench.clock import Timing, free, timed
from driftgen.bench.loss_bench import Case, loss_operations
from driftgen.bench.memory import count_bytes
from driftgen.bench.profiler import Cost, Phases, profile_step
from driftgen.bench.record import Row, least_time
from driftgen.bench.switches import op_names, without_op
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
    "count_step_operations",
    "default_sizes",
    "measure_steps",
    "profile_sizes",
]

LATENT = (4, 32, 32)
RANDOM_STD = 0.02  # of the weights that are initialized to zero
REFERENCE_REPEATS = 2  # the reference takes several times as long
PRESET_DEPTH = 12  # blocks of the paper's B/2


@dataclass(frozen=True)
class Sizes:
    """Sizes and options of a step.

    The defaults are the paper's ablation configuration with 8 of its 64 classes, the largest batch that the
    authors' code was measured with on one card. Attention is in float32, as in their configuration.
    ``without`` names an op of ``driftgen.ops`` to switch off.
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
    checkpoint_blocks: bool = False
    attention_float32: bool = True
    without: str | None = None
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
            raise InputError(
                f"--graph with micro={self.micro}: only a whole step is captured; give --micro 1"
            )
        if self.mode not in ("exact", "previous"):
            raise unknown_name("mode", self.mode, ("exact", "previous"))
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)
        if self.without is not None and self.without not in op_names():
            raise unknown_name("without", self.without, op_names())

    @property
    def real(self) -> int:
        """Real samples of a class: positives and unconditional ones."""
        return self.positives + self.unconditional


def default_sizes(device: torch.device) -> Sizes:
    """Return the paper's sizes for a GPU, small ones for the CPU."""
    if device.type == "cuda":
        return Sizes()
    return Sizes(2, 4, 4, 1, preset="S/2-32px", depth=2, base=16, dtype=torch.float32)


@dataclass(frozen=True)
class Built:
    """A step that can be run, its parts, and the bytes of their weights."""

    run: Callable[[], torch.Tensor]
    generator: DiT
    features: FeatureStack
    optimizer: torch.optim.Optimizer
    held_bytes: int


def build_step(sizes: Sizes, device: torch.device, phases: Phases | None = None) -> Built:
    """Build the networks and the step as a run does; ``phases`` marks the beginning of each part."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"in_channels": LATENT[0], "num_classes": 1000, "depth": sizes.depth}
    options |= {"attention_float32": sizes.attention_float32, "checkpoint_blocks": sizes.checkpoint_blocks}
    generator = DiT.preset(sizes.preset, **options).to(device)
    randomize_zero_weights(generator, RANDOM_STD)
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
    if autocast is not None:
        phi.cast_convolutions(autocast)
    step = DriftStep(generator, phi.features, loss, generated=sizes.generated, autocast=autocast)
    compute: Callable[[StepInputs], StepOutput] = step
    if sizes.micro > 1:
        compute = MicroBatchedStep(step, sizes.micro, sizes.mode)
    elif sizes.graph:
        compute = GraphedStep(step, generator.parameters(), _refuse)
    inputs = _draw(sizes, generator, device)

    def run() -> torch.Tensor:
        if phases is not None:
            phases.begin("optimizer")
        optimizer.zero_grad()
        out = compute(inputs)
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
    """Raise an error, since a step without a CUDA graph must not be shown as one with it."""
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
    """Count the floating-point operations of the matrix products, convolutions and attention in one call."""
    # The counter does not see Triton kernels, and sees attention on every device only as matrix products.
    with without_kernels(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return int(counter.get_total_flops())


def step_operations(sizes: Sizes, built: Built) -> float:
    """Count the operations of a step without recomputation."""
    counts = sizes.classes, sizes.generated, sizes.positives, sizes.unconditional
    return count_step_operations(built.generator, built.features.features, *counts)


def count_step_operations(
    generator: Any,
    features: Callable[[Tensor], Mapping[str, Tensor]],
    classes: int,
    generated: int,
    positives: int,
    unconditional: int,
    *,
    cached: bool = False,
) -> float:
    """Count the operations of a training step of these networks without recomputation.

    The backward pass costs two forward passes of the generator, and one of the frozen encoder. ``cached``
    real samples do not pass through the encoder.
    """
    device = next(generator.parameters()).device
    sample = torch.randn(1, *generator.sample_shape, device=device)
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    noise = generator.sample_noise(1)
    generate = count_operations(lambda: generator(noise, labels, 1.0))
    shapes: dict[str, tuple[int, int]] = {}

    def encode() -> None:
        vectors = features(sample)
        shapes.update({name: (value.shape[1], value.shape[2]) for name, value in vectors.items()})

    encoder = count_operations(encode)
    case = Case("", classes, generated, positives, unconditional, shapes)
    real = 0 if cached else positives + unconditional
    each = generated * (3 * generate + 2 * encoder) + real * encoder
    return classes * each + loss_operations(case)


def measure_steps(
    variants: Sequence[Sizes],
    device: torch.device,
    repeats: int,
    on_row: Callable[[int, float], None] = lambda done, seconds: None,
) -> list[Row]:
    """Measure variants of a step. The reference is one whole batch, not compiled, without Triton kernels."""
    plain = _plain_sizes(variants[0])
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
    words += ["channels last"] * sizes.channels_last + ["checkpoint"] * sizes.checkpoint_blocks
    words += ["16-bit attention"] * (sizes.dtype != torch.float32 and not sizes.attention_float32)
    if sizes.without is not None:
        words = [f"without {sizes.without}"]
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
        # Bytes depend on recomputation, and are a weaker bound than operations.
        least_time(card, moved=0, operations=operations, dtype=sizes.dtype),
        held_bytes=held,
        more={"sizes": values | {"dtype": str(sizes.dtype).removeprefix("torch.")}},
    )


def profile_sizes(sizes: Sizes, device: torch.device) -> list[Cost]:
    """Profile one step without a CUDA graph, since only single launches can be assigned to a part."""
    phases = Phases()
    with without_op(sizes.without):
        built = build_step(replace(sizes, graph=False), device, phases)
        for _ in range(2):
            built.run()
        return profile_step(built.run, device)


def _plain_sizes(sizes: Sizes) -> Sizes:
    changes: dict[str, Any] = {"micro": 1, "mode": "exact", "checkpoint_blocks": False, "without": None}
    return replace(sizes, compile=False, graph=False, channels_last=False, **changes)


def _time_step(sizes: Sizes, device: torch.device, repeats: int) -> tuple[Timing | None, int]:
    """Return the timing, None if out of memory, and the bytes of the networks and the optimizer."""
    timing, held = None, 0
    torch.compiler.reset()
    try:
        with without_op(sizes.without):
            built = build_step(sizes, device)
            held = built.held_bytes
            timing = timed(built.run, device, repeats, meter=not sizes.compile, cold_peak=sizes.graph)
        if device.type == "cpu":  # allocated in the first step; on a GPU the statistics include them
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
