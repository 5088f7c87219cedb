"""The estimate for many GPUs in docs/scaling.md: ``python -m tests.support.cluster_estimate`` prints it.

The step is the paper's ablation configuration with 8 classes on each GPU, as measured on one GPU. GPUs
all-reduce the gradient of the generator once per step (in a ring each sends and receives 2 (n - 1) / n of it)
and the statistics of the loss twice (8 bytes per element). The lower figure assumes no overlap. The upper
figure overlaps the gradient's all-reduce with the generator's backward pass, as DistributedDataParallel does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

PARAMETERS = 132.7e6  # of B/2
BYTES = 4  # per gradient element
FEATURES, TEMPERATURES = 86, 3
LATENCY = 20e-6  # seconds per hop
BACKWARD = 0.35  # fraction of a step in the generator's backward pass (by operations: 50 of 140 TFLOP)
CARDS, BANDWIDTHS = (8, 64, 512), (50e9, 100e9, 200e9, 400e9)
MEASURED = Path(__file__).parents[2] / "results/speed-h200/step.json"


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


def step_seconds() -> float:
    """Return the measured time of the step with 8 classes on one GPU."""
    rows = json.loads(MEASURED.read_text())["rows"]
    whole = [row for row in rows if row["sizes"]["classes"] == 8 and row["sizes"]["micro"] == 1]
    return float(min(row["seconds"] for row in whole))


def table() -> str:
    """Return a Markdown table of the efficiency by number of GPUs and bandwidth."""
    step = step_seconds()
    lines = ["| GPUs | classes | " + " | ".join(f"{b / 1e9:.0f} GB/s" for b in BANDWIDTHS) + " |"]
    lines.append("|---|---|" + "---|" * len(BANDWIDTHS))
    for cards in CARDS:
        cells = ["{:.1%} to {:.1%}".format(*efficiency(step, cards, b)) for b in BANDWIDTHS]
        lines.append(f"| {cards} | {8 * cards} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
