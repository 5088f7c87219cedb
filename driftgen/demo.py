"""The demo: train a one-step generator of digits, evaluate it, and show the drift on a toy."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from driftgen.data.toy import get_toy
from driftgen.evaluation.digits import BARS, evaluate_digits
from driftgen.pipeline import DriftPipeline
from driftgen.report.page import Section, section_html
from driftgen.report.run_page import write_report
from driftgen.report.toy_files import evolution_title, write_evolution
from driftgen.support.atomic_write import atomic_write
from driftgen.support.distributed import Distributed
from driftgen.support.progress import drawing, track
from driftgen.support.provenance import provenance
from driftgen.training.config import TrainConfig
from driftgen.training.loop import View
from driftgen.training.recipes import load_recipe
from driftgen.training.toy_study import EVALUATED, ToyConfig, evolve, show_energy_distance
from driftgen.training.trainer import train

__all__ = ["GUIDANCE", "demo_config", "evaluate_run", "metric_rows", "run_demo"]

GUIDANCE, EACH = 1.5, 100
TOY_TEXT = """<p>The same training in two dimensions. Generated points
(<span class="orange">orange</span>) start collapsed on one of the two modes of the data
(<span class="blue">blue</span>). The data attract the generated points, and the generated points repel each
other. When both distributions match, the two forces cancel. The digits above moved in the same way, in the 64
dimensions of their pixels.</p>"""


def demo_config(seed: int = 0, changes: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration of the demo: the digits recipe."""
    config = load_recipe("digits", [f"seed={seed}", *changes], "train")
    assert isinstance(config, TrainConfig)
    return config


def run_demo(
    out: Path, view: View, seed: int = 0, changes: Sequence[str] = (), toy_steps: int | None = None
) -> tuple[Path, dict[str, float]] | None:
    """Train, sample, evaluate and write the report; return its path and the metrics.

    Returns None if training was interrupted; the next call resumes it. A complete run is not trained again.
    """
    config = demo_config(seed, changes)
    if not train(config, out, Distributed.start("cpu"), view, name="digits", report=write_report):
        return None
    figures = evaluate_run(out, seed)
    return write_report(out, _toy(out / "toy", seed, toy_steps)), figures


def evaluate_run(folder: Path, seed: int = 0) -> dict[str, float]:
    """Sample 100 of each digit from a run, count the network calls and write ``evaluation.json``."""
    pipe = DriftPipeline.from_pretrained(folder, batch_size=EACH)
    labels = [label for label in range(10) for _ in range(EACH)]
    rows = 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal rows
        rows += len(output)

    hook = pipe.generator.register_forward_hook(count)
    samples = pipe(labels, guidance=GUIDANCE, seed=seed, output="tensor")
    hook.remove()
    figures = evaluate_digits(samples, torch.tensor(labels))
    record = {
        **provenance("driftgen demo"),
        "evaluator": "classifier and k=3 neighbors on raw pixels, 1,000 samples, the 1,437 training and 360 "
        "held-out digits",
        "guidance": GUIDANCE,
        "seed": seed,
        "network_calls_per_image": rows / len(labels),
        "milliseconds_per_image": _milliseconds(pipe),
        "figures": figures,
        "bars": BARS,
    }
    with atomic_write(folder / "evaluation.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return figures


def _milliseconds(pipe: DriftPipeline, repeats: int = 50) -> float:
    """Return the median time to sample a single image, from noise to PIL image."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        pipe(i % 10, guidance=GUIDANCE, seed=i)
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[repeats // 2]


def _toy(folder: Path, seed: int, steps: int | None) -> str:
    config = ToyConfig(init="collapsed", seed=seed, steps=steps)
    with track("toy", config.total_steps, "drift") as on_step:
        evolution = evolve(get_toy("bimodal"), config, on_step)
    command = f"driftgen toy bimodal --init collapsed --seed {seed}"
    with drawing():
        picture, animation, _ = write_evolution(evolution, folder, command)
    rows = metric_rows(evolution.metrics)
    return section_html(
        Section(evolution_title("bimodal", config), TOY_TEXT, picture, animation, rows, command)
    )


def metric_rows(metrics: dict[str, Any]) -> dict[str, str]:
    """Format the metrics of a toy run for display."""
    rows = {
        "energy distance to fresh data, start": show_energy_distance(metrics["energy_distance_at_start"]),
        "energy distance to fresh data, end": show_energy_distance(metrics["energy_distance"]),
        "energy distance between fresh data": show_energy_distance(
            metrics["energy_distance_of_data_to_itself"]
        ),
        "mean squared drift, first step": f"{metrics['drift_of_first_step']:.3g}",
        "mean squared drift, last step": f"{metrics['drift_of_last_step']:.3g}",
        f"drift against {2 * EVALUATED:,} data points": f"{metrics['drift_at_start']:.3g} to "
        f"{metrics['drift_at_end']:.3g}",
    }
    if "mode_shares" in metrics:
        rows["share of the smallest mode (ideal: 1)"] = f"{metrics['least_mode_share']:.2f}"
    rows["seconds"] = f"{metrics['seconds']:.1f}"
    return rows
