"""What a run on many cards should cost, from what one card was measured at: an estimate on paper, not a
measurement.

    python -m benchmarks.cluster

A step of the paper's ablation configuration, 8 classes on each card. Cards exchange the gradient of the
generator once (a ring: each sends and receives 2 (n - 1) / n of it) and the statistics of the loss twice (8
bytes for each number). In the worst case nothing of it is hidden behind the arithmetic; in the best the
gradient hides behind the backward pass of the generator, as DistributedDataParallel has it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

PARAMETERS = 132.7e6  # of B/2
BYTES = 4  # of a number of the gradient
FEATURES, TEMPERATURES = 86, 3
LATENCY = 20e-6  # seconds of one hop, and of one launch
BACKWARD = 0.35  # share of a step that the generator's backward pass takes (by operations: 50 of 140 TFLOP)
CARDS, BANDWIDTHS = (8, 64, 512), (50e9, 100e9, 200e9, 400e9)
MEASURED = Path(__file__).parents[1] / "results/speed-h200/step.json"


def loss_bytes() -> int:
    """Of the two collectives of the loss: distances and counts; products of drifts."""
    return 8 * (2 * FEATURES + 1) + 8 * FEATURES * TEMPERATURES**2


def exchange_seconds(cards: int, bandwidth: float) -> tuple[float, float]:
    """Of the gradient, and of the loss's two collectives."""
    share = 2 * (cards - 1) / cards
    hops = math.log2(cards) * LATENCY
    gradient = share * PARAMETERS * BYTES / bandwidth + hops
    return gradient, 2 * hops + share * loss_bytes() / bandwidth


def efficiency(step: float, cards: int, bandwidth: float) -> tuple[float, float]:
    """Time of one card over that of many, at worst and at best."""
    gradient, loss = exchange_seconds(cards, bandwidth)
    hidden = min(gradient, BACKWARD * step)
    return step / (step + gradient + loss), step / (step + gradient - hidden + loss)


def step_seconds() -> float:
    """Of the whole step with 8 classes on one card, as measured."""
    rows = json.loads(MEASURED.read_text())["rows"]
    found = [row for row in rows if row["sizes"]["classes"] == 8 and row["sizes"]["micro"] == 1]
    return float(min(row["seconds"] for row in found))


def table() -> str:
    """Markdown: expected efficiency by cards and bandwidth."""
    step = step_seconds()
    lines = ["| cards | classes | " + " | ".join(f"{b / 1e9:.0f} GB/s" for b in BANDWIDTHS) + " |"]
    lines.append("|---|---|" + "---|" * len(BANDWIDTHS))
    for cards in CARDS:
        cells = ["{:.1%} to {:.1%}".format(*efficiency(step, cards, b)) for b in BANDWIDTHS]
        lines.append(f"| {cards} | {8 * cards} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
