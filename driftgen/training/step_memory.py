"""Memory of a step from its sizes alone, before anything is drawn or allocated, and ways to reduce it."""

from __future__ import annotations

import math

from driftgen.support.distributed import Distributed
from driftgen.support.peak_memory import check_fits
from driftgen.training.config import Batch, TrainConfig

__all__ = ["check_samples", "check_step", "memory_advice", "step_bytes"]

FLOAT = 4  # bytes


def step_bytes(batch: Batch, shape: tuple[int, ...], processes: int = 1, *, fused: bool = False) -> int:
    """Return a lower bound of the bytes of a step on one of several processes.

    Counted are the generated samples with their gradients, the real samples and, unless kernels are
    ``fused``, the distances of the samples of one class. Activations of the networks come on top.
    """
    real = batch.positives + batch.unconditional
    samples = batch.classes * (2 * batch.generated + real) * math.prod(shape) // processes
    distances = 0 if fused else batch.generated * (batch.generated + real)
    return FLOAT * (samples + distances)


def check_step(batch: Batch, shape: tuple[int, ...], distributed: Distributed) -> None:
    """Raise if a step of this process cannot fit into its memory."""
    sizes = {name: getattr(batch, name) for name in ("generated", "positives", "unconditional")}
    largest = max(sizes, key=lambda name: sizes[name])
    keys = sorted(("classes", largest), key=lambda name: getattr(batch, name), reverse=True)
    check_fits(
        f"a step of {batch.classes:,} classes with batch.{largest}={sizes[largest]:,} samples each",
        step_bytes(batch, shape, distributed.world_size, fused=distributed.device.type == "cuda"),
        distributed.device,
        f"lower batch.{keys[0]} or batch.{keys[1]}",
    )


def check_samples(option: str, count: int, size: int, distributed: Distributed) -> None:
    """Raise if ``count`` samples of ``size`` floats each cannot fit into the memory of the processes.

    Args:
        option: key and value of the recipe, for the message.
        count: samples of a step.
        size: floats of a sample.
        distributed: the processes.
    """
    needed = FLOAT * count * size // distributed.world_size
    check_fits(f"a step of {option}", needed, distributed.device, "lower it")


def memory_advice(config: TrainConfig) -> str:
    """Return the changes that reduce the memory of a step."""
    batch, changes = config.batch, []
    if 2 * batch.micro <= batch.classes:
        changes.append(f"batch.micro={2 * batch.micro} (the same step in micro-batches)")
    if batch.micro > 1 and batch.mode == "exact":
        changes.append("batch.mode=previous")
    if config.generator.kind in ("dit", "unet") and not config.checkpoint_blocks:
        changes.append("checkpoint_blocks=true")
    return f"use --set {' or '.join(changes or ['batch.generated=N with fewer samples'])}"
