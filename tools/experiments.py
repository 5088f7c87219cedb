"""Records of short training runs that change one thing each, and their tables.

    python -m tools.experiments RUN results/cifar10/experiments/NAME.json --changed "96 positives"
        --conclusion "..." [--evaluation FOLDER]

A record holds the configuration and the command of a run, its seed, hardware, samples and seconds, the curve
of its evaluations, and the rows of ``driftgen eval`` if ``--evaluation`` names its folder. The tables
``encoders``, ``generators`` and ``comparisons`` list the records of ``results/cifar10/experiments/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write
from driftgen.support.untrusted_files import read_json
from driftgen.support.yaml_files import read_mapping
from driftgen.training.metrics_file import read_metrics
from driftgen.training.run_folder import CONFIG, METRICS
from tools.records import Results, fill, markdown, without_folders

__all__ = ["comparisons", "encoders", "generators", "make_record"]

FOLDER = "cifar10/experiments"
FIGURES = ("reconstruction", "classification", "accuracy", "knn_accuracy")


def make_record(run: Path, changed: str, conclusion: str, evaluation: Path | None = None) -> dict[str, Any]:
    """Return the record of a run; paths in it lose the folders of the machine."""
    header, rows = read_metrics(run / METRICS)
    if not rows:
        raise InputError(f"{run / METRICS} has no rows: name the folder of a run")
    config = read_mapping(run / CONFIG)
    batch = config.get("batch")
    per_step = batch["classes"] * batch["generated"] if batch else config["batch_size"]
    last = rows[-1]
    record: dict[str, Any] = {
        "changed": changed,
        "conclusion": conclusion,
        "command": header.get("command", ""),
        "environment": header.get("environment", {}),
        "task": config["task"],
        "seed": config["seed"],
        "steps": last["step"],
        "samples": last["step"] * per_step,
        "seconds": last["seconds"],
        "samples_per_second": last["samples_per_second"],
        "curve": [
            {"step": row["step"], **row["evaluation"]} for row in rows if row.get("evaluation") is not None
        ],
        "config": config,
    }
    for name in FIGURES:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            record[name] = values[-1]
    if evaluation is not None:
        facts = read_json(evaluation / "evaluation.json", "the result of driftgen eval")
        names = ("command", "model", "seed", "samples", "dtype", "evaluator", "reference", "rows")
        record["evaluation"] = {name: facts[name] for name in names}
    shortened: dict[str, Any] = json.loads(without_folders(json.dumps(record)))
    return shortened


def encoders(results: Results) -> str:
    """Encoders: accuracy of k nearest neighbors on the test images, and the reconstruction error."""
    rows = [
        (
            name,
            record["changed"],
            fill("{steps:,}", record),
            fill("{seconds:,.0f s}", record),
            fill("{reconstruction:.3f}", record),
            fill("{knn_accuracy:.1%}", record),
            record["conclusion"],
        )
        for name, record in _records(results, "pretrain")
    ]
    return markdown(("encoder", "settings", "steps", "time", "reconstruction", "k-NN", "conclusion"), rows)


def generators(results: Results) -> str:
    """Generators evaluated by ``driftgen eval``: the row of the guidance with the least FID."""
    rows = []
    for name, record in _records(results, "train"):
        if "evaluation" not in record:
            continue
        best = min(record["evaluation"]["rows"], key=lambda row: row["FID"])
        rows.append(
            (
                name,
                record["changed"],
                f"{record['samples'] / 1e6:.1f}M",
                fill("{seconds:,.0f s}", record),
                fill("{FID:.2f} at {guidance:g}", best),
                fill("{precision:.3f}", best),
                fill("{recall:.3f}", best),
                record["conclusion"],
            )
        )
    header = (
        "run", "settings", "samples", "time", "FID at guidance", "precision", "recall", "conclusion",
    )  # fmt: skip
    return markdown(header, rows)


def comparisons(results: Results) -> str:
    """Runs evaluated only while they trained: FID of the first average at each evaluation."""
    rows = []
    for name, record in _records(results, "train"):
        if "evaluation" in record:
            continue
        per_step = record["samples"] / record["steps"]
        curve = [
            f"{next(iter(point['ema'].values()))['FID']:.1f} at {point['step'] * per_step / 1e6:.1f}M"
            for point in record["curve"]
        ]
        count = f"{record['curve'][-1]['samples']:,}"
        rate = f"{record['samples_per_second']:,.0f}"
        rows.append((name, record["changed"], ", ".join(curve), count, rate, record["conclusion"]))
    return markdown(("run", "settings", "FID at samples", "FID of", "samples/s", "conclusion"), rows)


def _records(results: Results, task: str) -> list[tuple[str, dict[str, Any]]]:
    folder = results.folder / FOLDER
    records = [(path.stem, results.load(f"{FOLDER}/{path.name}")) for path in sorted(folder.glob("*.json"))]
    return [(name, record) for name, record in records if record["task"] == task]


def main(arguments: list[str]) -> int:
    """Write one record. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("out", type=Path, help="file of the record")
    parser.add_argument("--changed", required=True, help="settings that differ, in a few words")
    parser.add_argument("--conclusion", required=True, help="in one sentence")
    parser.add_argument("--evaluation", type=Path, help="folder of driftgen eval")
    options = parser.parse_args(arguments)
    try:
        record = make_record(options.run, options.changed, options.conclusion, options.evaluation)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    with atomic_write(options.out) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
