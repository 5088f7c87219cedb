"""The demo: train a one-step generator of digits and evaluate it; show a toy and a packaged model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from driftgen.data.toy import get_toy
from driftgen.evaluation.digits import BARS, evaluate_digits
from driftgen.interop.packaged import best_packaged
from driftgen.pipeline import DriftPipeline
from driftgen.report.run_page import PACKAGED, TOY, write_report
from driftgen.report.toy_files import write_evolution
from driftgen.support.atomic_write import atomic_write
from driftgen.support.distributed import Distributed
from driftgen.support.progress import drawing, track
from driftgen.support.provenance import provenance
from driftgen.support.sheets import Sheet, write_sheet
from driftgen.training.config import TrainConfig
from driftgen.training.recipes import load_recipe
from driftgen.training.stop_request import resume_hint
from driftgen.training.summary import resume_command
from driftgen.training.toy_study import ToyConfig, evolve
from driftgen.training.trainer import train
from driftgen.training.view import View

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["GUIDANCE", "QUICK", "QUICK_TOY_STEPS", "demo_config", "evaluate_run", "run_demo"]

GUIDANCE, EACH = 1.5, 100
COLUMNS = 8  # samples of each class of a packaged model
# Changes of a run of seconds, which shows that everything works; its digits are not those of the whole demo.
QUICK = ("optim.steps=300", "optim.warmup=50", "output.samples_every=100", "output.report_every=300")
QUICK_TOY_STEPS = 30


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
    with resume_hint(lambda: out, lambda: resume_command("train", "digits", out), view.info):
        if not train(config, out, Distributed.start("cpu"), view, name="digits", report=write_report):
            return None
        figures = evaluate_run(out, seed)
        _draw_toy(out / TOY, seed, toy_steps)
        _draw_packaged(out / PACKAGED, seed)
        return write_report(out), figures


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


def _draw_toy(folder: Path, seed: int, steps: int | None) -> None:
    """Run the toy whose figures the report shows."""
    config = ToyConfig(init="collapsed", seed=seed, steps=steps)
    with track("toy", config.total_steps, "drift") as on_step:
        evolution = evolve(get_toy("bimodal"), config, on_step)
    with drawing():
        write_evolution(evolution, folder, f"driftgen toy bimodal --init collapsed --seed {seed}")


def _draw_packaged(path: Path, seed: int) -> None:
    """Sample the best model that ships with the package, unless it is one of digits as well."""
    name = best_packaged()
    if name == "digits" or path.is_file():
        return
    pipe = DriftPipeline.from_pretrained(name, batch_size=COLUMNS)
    classes = pipe.class_names or [str(label) for label in range(pipe.num_classes or 1)]
    labels = [label for label in range(len(classes)) for _ in range(COLUMNS)]
    images: list[Image.Image] = []
    with track(name, len(labels), "network calls per image") as on_step:
        for part in pipe.stream(labels, seed=seed, output="pil"):
            images += part
            on_step(len(images), 1)
    note = f"{name}, a model that ships with the package: driftgen sample {name}"
    write_sheet(path, Sheet(images, COLUMNS, row_names=classes, note=note))
