"""``driftgen bench scaling``: growth of time and memory with classes, samples, features, width, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from driftgen.bench.clock import free, timed
from driftgen.bench.loss_bench import TEMPERATURES, Case
from driftgen.bench.record import machine
from driftgen.bench.step_bench import Sizes, build_step
from driftgen.drift.loss import DriftingLoss
from driftgen.errors import InputError
from driftgen.support.untrusted_files import read_json
from driftgen.support.whole_numbers import check_count

__all__ = [
    "PARTS",
    "Curve",
    "Point",
    "check_points",
    "count_points",
    "exponent",
    "measure_growth",
    "measure_processes",
    "show_growth",
]

PARTS = ("loss", "step", "processes")
# (start, value while other axes vary) of each axis; each point doubles the previous one.
LOSS_AXES = {
    "cpu": {"classes": (8, 16), "samples": (8, 32), "features": (1, 4), "width": (16, 64)},
    "cuda": {"classes": (64, 256), "samples": (4, 64), "features": (1, 4), "width": (32, 256)},
}
STEP_AXES = {
    "cpu": {"classes": (1, 2), "samples": (2, 4)},
    "cuda": {"classes": (1, 4), "samples": (8, 32)},
}
MOST_POINTS = 20
VECTORS = 16  # per feature
OnPoint = Callable[[float], None]


@dataclass(frozen=True)
class Point:
    """One measurement along an axis."""

    value: int
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Curve:
    """Points along one axis, and the exponents of time and memory."""

    part: str
    axis: str
    points: list[Point]

    @property
    def exponents(self) -> dict[str, float | None]:
        """Exponents of ``seconds`` and ``peak_bytes``."""
        x = [float(p.value) for p in self.points]
        return {
            "seconds": exponent(x, [p.seconds for p in self.points]),
            "peak_bytes": exponent(x, [float(p.peak_bytes or 0) for p in self.points]),
        }

    def as_record(self) -> dict[str, Any]:
        """Return the entry of the JSON record."""
        return asdict(self) | {"exponents": self.exponents}


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Fit p of y ∝ xᵖ by least squares of logarithms; None for fewer than two points.

    Only the upper half of the points counts, since the constant cost of a call matters least there.
    """
    keep = slice(min((len(x) - 1) // 2, len(x) - 2), None)
    if len(x) < 2 or min(y[keep]) <= 0:
        return None
    return float(np.polyfit(np.log(x[keep]), np.log(y[keep]), 1)[0])


def check_points(points: int) -> None:
    """Raise unless a number of points per axis is possible."""
    check_count("points", points, most=MOST_POINTS, least=2)


def count_points(parts: Sequence[str], device: torch.device, points: int) -> int:
    """Return the number of measurements."""
    axes = {"loss": len(LOSS_AXES[device.type]), "step": len(STEP_AXES[device.type])}
    return sum(axes[part] * points if part in axes else 2 for part in parts)


def measure_growth(
    part: str, device: torch.device, points: int, repeats: int, on_point: OnPoint = lambda seconds: None
) -> list[Curve]:
    """Measure the curves of ``"loss"`` or ``"step"``. An axis ends early if memory runs out."""
    check_points(points)
    axes = (LOSS_AXES if part == "loss" else STEP_AXES)[device.type]
    measure = _measure_loss if part == "loss" else _measure_step
    fixed = {axis: value for axis, (_, value) in axes.items()}
    curves = []
    for axis, (start, _) in axes.items():
        measured = []
        for i in range(points):
            value = start * 2**i
            try:
                measured.append(Point(value, *measure(fixed | {axis: value}, device, repeats)))
            except torch.cuda.OutOfMemoryError:
                break
            finally:
                free(device)
            on_point(measured[-1].seconds)
        curves.append(Curve(part, axis, measured))
    return curves


def _measure_loss(at: dict[str, int], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Return seconds and peak bytes beyond the inputs of the loss.

    There are as many positives as generated samples, and a quarter as many negatives.
    """
    n = at["samples"]
    shapes = {f"feature {i}": (VECTORS, at["width"]) for i in range(at["features"])}
    case = Case("", at["classes"], n, n, n // 4, shapes)
    sets = case.draw(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    leaves = [tensor.requires_grad_() for tensor in sets[0].values()]
    loss = DriftingLoss(TEMPERATURES)
    timing = timed(lambda: torch.autograd.grad(loss(*sets).loss, leaves), device, repeats)
    return timing.seconds, timing.peak_bytes


def _measure_step(at: dict[str, int], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Return seconds and peak bytes beyond the networks of a whole step."""
    n = at["samples"]
    sizes = Sizes(at["classes"], n, n, max(n // 4, 1))
    if device.type == "cpu":
        sizes = replace(sizes, preset="S/2-32px", depth=1, base=8, dtype=torch.float32)
    timing = timed(build_step(sizes, device).run, device, repeats)
    return timing.seconds, timing.peak_bytes


def measure_processes(counts: Sequence[int], repeats: int, on_point: OnPoint = lambda _: None) -> list[Any]:
    """Measure one step shared by ``count`` CPU processes of one thread each, for each count.

    Each record holds seconds, collectives and their bytes.
    """
    records = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "record.json"
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", str(count), "-m", "driftgen.bench.process", str(out), str(repeats)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            if done.returncode or not out.exists():
                why = next(iter(done.stderr.strip().splitlines()[-1:]), "no message")
                raise InputError(f"{count} processes failed to run: {why}")
            records.append(read_json(out, "the record of a process", finite=False))
        on_point(records[-1]["seconds"])
    return records


def show_growth(
    curves: Sequence[Curve],
    processes: Sequence[dict[str, Any]],
    device: torch.device,
    console: Console | None = None,
) -> None:
    """Print the exponents, and the collectives of a step."""
    console = console or Console()
    if curves:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        console.print(f"[bold]Growth\n{machine(device)}[/]", highlight=False)
        for column in ("part", "axis", "from", "to", "time ~", "last, ms", "memory ~", "last, MiB"):
            table.add_column(column, justify="left" if column in ("part", "axis") else "right")
        for curve in curves:
            first, last, powers = curve.points[0], curve.points[-1], curve.exponents
            table.add_row(
                curve.part,
                curve.axis,
                str(first.value),
                str(last.value),
                _power(powers["seconds"]),
                _milliseconds(last.seconds),
                _power(powers["peak_bytes"]),
                "" if last.peak_bytes is None else f"{last.peak_bytes / 2**20:,.0f}",
            )
        console.print(table)
        console.print("[dim]~ n^p: power fit over the upper half of the points.[/]")
    if processes:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        console.print("[bold]One step shared by CPU processes of one thread each[/]")
        for column in ("processes", "ms", "speed", "loss collectives", "gradient collectives", "KiB"):
            table.add_column(column, justify="right")
        for row in processes:
            table.add_row(
                str(row["processes"]),
                _milliseconds(row["seconds"]),
                f"{processes[0]['seconds'] / row['seconds']:.2f}x",
                str(row["loss_collectives"]),
                str(row["gradient_collectives"]),
                f"{row['collective_bytes'] / 1024:,.0f}",
            )
        console.print(table)


def _power(value: float | None) -> str:
    return "" if value is None else f"n^{value:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"
