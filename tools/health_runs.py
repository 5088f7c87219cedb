"""Train one healthy run and several that fail, each for one known reason, and draw what they show.

    python -m tools.health_runs [NAME ...] [--out results/health] [--steps 900]

All runs are the recipe ``digits`` with one change. Each takes about 20 seconds on one core. The folder gets a
picture of each run (samples, then loss, drift, spread and diversity over the steps), ``health.json`` with the
changes, the last figures and the warnings, and ``config.yaml`` of the healthy run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import driftgen as dg
from driftgen.errors import unknown_name
from driftgen.support.atomic_write import atomic_write
from driftgen.support.images import contact_sheet
from driftgen.support.provenance import provenance
from driftgen.training.run import Run

__all__ = ["CASES", "Case", "draw", "measure"]

EACH = 8  # samples of each class
LEAST, MOST = 1e-2, 1e2  # of the axis of spread and diversity
BLUE, ORANGE, GRAY = "#3b6fb6", "#d9822b", "#9aa0a6"


def _random_encoder() -> Any:
    import torch

    torch.manual_seed(0)
    return dg.features.ResNetMAE(base_channels=32, blocks=(1,), in_channels=1)


@dataclass(frozen=True)
class Case:
    """A run of the recipe ``digits`` with one change.

    Attributes:
        title: one line about the run.
        changes: values of the recipe.
        topic: topic of the warning that the run must raise, see ``driftgen explain``; "" for none.
        encoder: makes an encoder of its own, or None.
    """

    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""
    encoder: Callable[[], Any] | None = None


CASES = {
    "healthy": Case("healthy"),
    "collapse": Case("no repulsion: loss.repulsion=0", {"loss.repulsion": 0.0}, "collapse"),
    "divergence": Case("too much repulsion: loss.repulsion=2", {"loss.repulsion": 2.0}, "divergence"),
    "skipped-steps": Case(
        "learning rate 1,000 times too high: optim.lr=1",
        {"optim.lr": 1.0, "optim.warmup": 1},
        "skipped-steps",
    ),
    "low-temperature": Case(
        "temperatures too low: loss.temperatures=[1e-5]",
        {"loss.temperatures": (1e-5,), "vanilla": True},
        "low-temperature",
    ),
    "untrained-encoder": Case(
        "an encoder with random weights",
        {"optim.steps": 300, "batch.generated": 8, "batch.positives": 16, "batch.unconditional": 4},
        "untrained-encoder",
        _random_encoder,
    ),
    "initial-weights": Case(
        "an average that is too slow: ema=[0.9995], ema_warmup=false",
        {"ema": (0.9995,), "ema_warmup": False},
        "initial-weights",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases, draw them and write the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.health_runs", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all without")
    parser.add_argument("--out", type=Path, default=Path("results/health"))
    parser.add_argument("--steps", type=int, default=900)
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in CASES:
            raise unknown_name("NAME", name, CASES)
    path = options.out / "health.json"
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or CASES:
        rows[name] = measure(name, options.out, options.steps)
        record = {
            **provenance("python -m tools.health_runs"),
            "evaluator": "the run's own metrics and warnings; figures of the last step",
            "recipe": "digits",
            "seed": 0,
            "rows": {name: rows[name] for name in CASES if name in rows},
        }
        with atomic_write(path) as scratch:
            scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure(name: str, out: Path, steps: int) -> dict[str, Any]:
    """Train a case, write its picture, and return its row of the record."""
    case = CASES[name]
    changes = {"optim.steps": steps, "optim.warmup": steps // 4, "output.metrics_every": 10, **case.changes}
    encoders = None if case.encoder is None else [case.encoder()]
    with tempfile.TemporaryDirectory() as folder:
        run = dg.train("digits", folder, encoders=encoders, device="cpu", **changes)
        if run.metrics[-1]["step"] < changes["optim.steps"]:
            raise SystemExit(f"{name}: interrupted, nothing is written")
        draw(run, case.title, out / f"{name}.png")
        if not case.changes:
            (out / "config.yaml").write_bytes((run.folder / "config.yaml").read_bytes())
        rows = run.metrics
    warnings = [{"step": row["step"], "text": text} for row in rows for text in row.get("warnings", [])]
    last = {key: rows[-1].get(key) for key in ("step", "loss", "drift", "spread", "diversity", "neighbors")}
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    return {"title": case.title, "topic": case.topic, "changes": shown, "last": last, "warnings": warnings}


def draw(run: Run, title: str, path: Path) -> None:
    """Draw samples of a run, and its loss, drift, spread and diversity over the steps."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    rows = [row for row in run.metrics if row.get("loss") is not None]
    steps = [row["step"] for row in rows]
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.7), width_ratios=(1.2, 1, 1, 1), dpi=110)
    images = run.pipeline()(labels=[*range(10)] * EACH, seed=0)
    axes[0].imshow(contact_sheet(images, columns=10), cmap="gray", interpolation="nearest")
    axes[0].set_title("samples, one class per column", fontsize=9)
    axes[0].axis("off")
    axes[1].plot(steps, [row["loss"] for row in rows], color=GRAY)
    axes[1].set(ylim=(0, None))
    axes[1].set_title("loss: flat by design", fontsize=9)
    for number, color in zip(range(len(rows[0]["drift"])), (BLUE, ORANGE, GRAY), strict=False):
        axes[2].semilogy(steps, [row["drift"][number] for row in rows], color=color)
    axes[2].set_title("raw drift, one line per temperature", fontsize=9)
    for key, color in (("spread", BLUE), ("diversity", ORANGE)):
        axes[3].semilogy(
            steps, [row.get(f"batch_{key}", row.get(key)) for row in rows], color=color, label=key
        )
    axes[3].axhline(1, color=GRAY, linestyle=":", linewidth=1)
    low, high = axes[3].get_ylim()
    axes[3].set_ylim(max(min(low, 0.3), LEAST), min(max(high, 3), MOST))
    axes[3].yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes[3].yaxis.set_major_formatter("{x:g}")
    axes[3].yaxis.set_minor_locator(NullLocator())
    axes[3].set_title("spread and diversity (data: 1)", fontsize=9)
    axes[3].legend(fontsize=8, frameon=False)
    for axis in axes[1:]:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("step", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout()
    with atomic_write(path) as scratch:
        figure.savefig(scratch, format="png")
    plt.close(figure)


if __name__ == "__main__":
    main()
