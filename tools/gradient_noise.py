"""Noise of a generator's gradient, by the sizes of a step.

    python -m tools.gradient_noise cifar10 MODEL --set data.path=train.npz --set "encoders=[...]" ...
        --step 10x64/96/32 --step 10x64/256/32:16 --step 2x320/512/64:8 --reference 5x320/1024/64:16
        --out results/cifar10/gradient-noise.json

A step ``C x N/P/U:K`` has C classes with N generated, P positive and U unconditional samples each, and
compares K vectors of a feature (all without ``:K``). Its gradient g at the weights of MODEL is drawn several
times. The mean of the reference's gradients stands for the truth μ. For each step the record holds

- ``cosine``: mean of cos(g, μ);
- ``cosine_adam``: the same with each coordinate divided by its root mean square, as AdamW does;
- ``signal_to_noise``: ‖E g‖² / E‖g − E g‖²;
- ``bias``: cos(E g, μ), below 1 if the step aims elsewhere than the reference.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write
from driftgen.support.distributed import Distributed
from driftgen.support.provenance import environment
from driftgen.training.config import TrainConfig
from driftgen.training.recipes import load_recipe
from driftgen.training.trainer import Training
from tools.records import Results, fill, markdown

__all__ = ["Reference", "StepSize", "compare", "main", "table"]

STEP = re.compile(r"(\d+)x(\d+)/(\d+)/(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class StepSize:
    """Sizes of a step, written ``CxN/P/U:K``."""

    classes: int
    generated: int
    positives: int
    unconditional: int
    vectors: int | None

    @classmethod
    def parse(cls, text: str) -> StepSize:
        """Read ``10x64/256/32:16``."""
        found = STEP.fullmatch(text)
        if found is None:
            raise InputError(f"--step {text}: write classes, sizes and vectors as in 10x64/256/32:16")
        classes, generated, positives, unconditional = map(int, found.groups()[:4])
        return cls(classes, generated, positives, unconditional, int(found[5]) if found[5] else None)

    def changes(self) -> list[str]:
        """Return the settings of a recipe."""
        names = ("classes", "generated", "positives", "unconditional")
        batch = ", ".join(f"{name}: {getattr(self, name)}" for name in names)
        return [f"batch={{{batch}}}", f"vectors={json.dumps(self.vectors)}"]


@dataclass(frozen=True)
class Reference:
    """The mean of the reference's gradients, and its agreement with the truth.

    Attributes:
        mean: μ.
        scale: root mean square of each coordinate.
        agreement: estimate of cos(mean, truth), by halves of the draws; raw and divided by ``scale``.
    """

    mean: Tensor
    scale: Tensor
    agreement: tuple[float, float]

    @classmethod
    def measure(cls, gradients: Iterable[Tensor]) -> Reference:
        """Take the mean of an even number of gradients."""
        halves: list[Any] = [0.0, 0.0]
        squares, count = torch.zeros(()), 0
        for count, gradient in enumerate(gradients, 1):
            halves[count % 2] = halves[count % 2] + gradient
            squares = squares + gradient.square()
        scale = (squares / count).sqrt().clamp_min(1e-20)
        a, b = halves
        # For two halves with cosine h, the mean of both has the cosine √(2h / (1 + h)) with the truth.
        cosines = (max(cosine(a, b), 1e-3), max(cosine(a / scale, b / scale), 1e-3))
        raw, adam = ((2 * h / (1 + h)) ** 0.5 for h in cosines)
        return cls((a + b) / count, scale, (raw, adam))


def compare(gradients: Iterable[Tensor], reference: Reference) -> dict[str, float]:
    """Return the statistics of independent gradients, see the top of this file."""
    total, figures = torch.zeros(()), list[tuple[float, float, float]]()
    for gradient in gradients:
        total = total + gradient
        scaled = cosine(gradient / reference.scale, reference.mean / reference.scale)
        figures.append((float(gradient @ gradient), cosine(gradient, reference.mean), scaled))
    count = len(figures)
    squares, raw, adam = map(sum, zip(*figures, strict=True))
    signal = max((float(total @ total) - squares) / (count * (count - 1)), 1e-30)
    along = float(total @ reference.mean) / count / float(reference.mean.norm())
    return {
        "cosine": raw / count / reference.agreement[0],
        "cosine_adam": adam / count / reference.agreement[1],
        "signal_to_noise": signal / max(squares / count - signal, 1e-30),
        "bias": along / signal**0.5 / reference.agreement[0],
    }


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two vectors."""
    return float(a @ b / (a.norm() * b.norm()))


def table(results: Results) -> str:
    """Noise of gradients by the sizes of a step."""
    rows = [
        (
            fill("{classes} x {generated}/{positives}/{unconditional}", row),
            "all" if row["vectors"] is None else str(row["vectors"]),
            *(fill(f"{{{name}:.2f}}", row) for name in ("cosine", "cosine_adam", "signal_to_noise", "bias")),
        )
        for row in results.load("cifar10/gradient-noise.json")["rows"]
    ]
    header = ("step", "vectors", "cosine", "as AdamW weighs", "signal / noise", "cosine of the means")
    return markdown(header, rows)


def draw_gradients(
    recipe: str, changes: list[str], size: StepSize, model: str, draws: int, device: torch.device, seed: int
) -> Iterable[Tensor]:
    """Yield gradients of a step at the weights of a model, each as one vector."""
    plain = ["compile=false", "cuda_graph=false", "cache_features=false", f"seed={seed}"]
    config = load_recipe(recipe, [*changes, *plain, *size.changes()], "train")
    assert isinstance(config, TrainConfig)
    task = Training(config, Distributed.start(str(device)), init=model)
    parameters = [p for p in task.generator.parameters() if p.requires_grad]
    try:
        for step in range(draws):
            task.generator.zero_grad()
            task.compute_gradient(step)
            yield torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])
    finally:
        task.data.close()


def main(
    arguments: list[str],
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> int:
    """Measure all steps and write the record. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gradient_noise")
    parser.add_argument("recipe")
    parser.add_argument("model", help="saved generator")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="KEY=VALUE of the recipe")
    parser.add_argument("--step", action="append", required=True, dest="steps")
    parser.add_argument("--reference", required=True)
    parser.add_argument("--draws", type=int, default=40, help="gradients of each step, an even number")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)

    def draw(text: str, seed: int) -> Iterable[Tensor]:
        size = StepSize.parse(text)
        return draw_gradients(
            options.recipe, options.changes, size, options.model, options.draws, device, seed
        )

    try:
        sizes = [StepSize.parse(text) for text in options.steps]
        reference = Reference.measure(draw(options.reference, 0))
        report(f"reference {options.reference}, agreement {reference.agreement[0]:.3f}")
        rows = []
        for number, (text, size) in enumerate(zip(options.steps, sizes, strict=True), 1):
            start = time.perf_counter()
            row = {**vars(size), **compare(draw(text, number), reference)}
            row["seconds"] = time.perf_counter() - start
            report(f"{text} {row}")
            rows.append(row)
    except InputError as error:
        report(f"gradient_noise: error: {error}")
        return 2
    record = {
        "command": f"python -m tools.gradient_noise {options.recipe} MODEL --reference {options.reference} "
        + " ".join(f"--step {text}" for text in options.steps),
        **environment(device),
        "evaluator": f"{options.draws} gradients of each step against the mean of {options.draws} of "
        f"{options.reference}",
        "agreement": reference.agreement,
        "rows": rows,
    }
    with atomic_write(options.out) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
