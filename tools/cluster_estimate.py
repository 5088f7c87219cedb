"""The estimate for many GPUs in docs/scaling.md, from the step measured on one.

The step is the paper's ablation configuration with 8 classes on each GPU, as measured on one GPU. GPUs
all-reduce the gradient of the generator once per step (in a ring each sends and receives 2 (n - 1) / n of it)
and the statistics of the loss twice (8 bytes per element). The lower figure assumes no overlap. The upper
figure overlaps the gradient's all-reduce with the generator's backward pass, as DistributedDataParallel does.
"""

from __future__ import annotations

import math

from tools.records import Results, markdown

__all__ = ["PARAMETERS", "efficiency", "exchange_seconds", "loss_bytes", "table"]

PARAMETERS = 132.7e6  # of B/2
BYTES = 4  # per gradient element
FEATURES, TEMPERATURES = 86, 3
LATENCY = 20e-6  # seconds per hop
BACKWARD = 0.35  # fraction of a step in the generator's backward pass (by operations: 50 of 140 TFLOP)
CARDS, BANDWIDTHS = (8, 64, 512), (50e9, 100e9, 200e9, 400e9)


def loss_bytes() -> int:
    """Bytes of the two collectives of the loss: distances and counts; products of drifts."""
    return 8 * (2 * FEATURES + 1) + 8 * FEATURES * TEMPERATURES**2


def exchange_seconds(cards: int, bandwidth: float) -> tuple[float, float]:
    """Seconds of the gradient's all-reduce, and of the two collectives of the loss."""
    share = 2 * (cards - 1) / cards
    hops = math.log2(cards) * LATENCY
    gradient = share * PARAMETERS * BYTES / bandwidth + hops
    return gradient, 2 * hops + share * loss_bytes() / bandwidth


def efficiency(step: float, cards: int, bandwidth: float) -> tuple[float, float]:
    """Return the time on one GPU over the time on many, without and with overlap."""
    gradient, loss = exchange_seconds(cards, bandwidth)
    hidden = min(gradient, BACKWARD * step)
    return step / (step + gradient + loss), step / (step + gradient - hidden + loss)


def table(results: Results) -> str:
    """Return a Markdown table of the efficiency by number of GPUs and bandwidth."""
    step = results.row("speed-h200/step.json")["seconds"]
    rows = [
        (
            f"{cards}",
            f"{8 * cards}",
            *("{:.1%} to {:.1%}".format(*efficiency(step, cards, bandwidth)) for bandwidth in BANDWIDTHS),
        )
        for cards in CARDS
    ]
    return markdown(("GPUs", "classes", *(f"{b / 1e9:.0f} GB/s" for b in BANDWIDTHS)), rows)
