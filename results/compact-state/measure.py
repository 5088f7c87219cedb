"""Train digits without a break, and in four pieces with a compact state between two of them.

    python results/compact-state/measure.py

Every piece after the first resumes from the state alone, in a new folder. ``init`` continues once, from
averaged weights in bfloat16, with a new optimizer and 50 steps of warm-up. Takes about 5 minutes for each
seed on one core.
"""

import json
import shutil
import tempfile
from pathlib import Path

import driftgen as dg
from driftgen.support.atomic_write import atomic_write
from driftgen.support.provenance import provenance
from driftgen.training.compact_state import write_state
from driftgen.training.model_shards import save_shards

HERE = Path(__file__).parent
SEEDS, BITS, BREAKS, STEPS, EVERY = (0, 1, 2), (24, 16, 8, 7), (400, 500, 600), 700, 100
OUTPUT = {"eval_every": EVERY, "eval_samples": 2000, "eval_encoder": "pixels", "metrics_every": 20}
OUTPUT |= {"samples_every": STEPS, "report_every": STEPS, "checkpoint_every": EVERY}


def train(folder, seed, steps, **options):
    changes = {"optim.steps": steps, "optim.warmup": 200, "output": OUTPUT, "seed": seed}
    return dg.train("digits", folder, device="cpu", override=True, **{**changes, **options})


def curve(rows, shift=0):
    """Return FD-pixels, loss and drift at the largest temperature by step."""
    figures = {}
    for row in rows:
        figures[row["step"] + shift] = {"loss": row["loss"], "drift": row["drift"][-1]}
        if "evaluation" in row:
            scores = next(iter(row["evaluation"]["ema"].values()))
            figures[row["step"] + shift]["FD-pixels"] = scores["FD-pixels"]
    return figures


def in_pieces(first, folder, seed, bits):
    """Resume from compact states; return the curve after the first break and the sizes."""
    run, sizes = first, []
    for i, steps in enumerate((*BREAKS[1:], STEPS)):
        report = write_state(run, folder / f"state-{i}", bits=bits)
        sizes.append(report)
        run = folder / f"run-{i}"
        done = train(run, seed, steps, state=folder / f"state-{i}")
    rows = [row for row in done.metrics if row["step"] > BREAKS[0]]
    return curve(rows), sizes


def continued(first, folder, seed):
    """Continue once from the averaged weights alone."""
    shards = save_shards(first, folder / "shards", max_shard_size="100KB")
    optim = {"optim.warmup": 50, "ema_warmup": False}
    done = train(folder / "run", seed + 100, STEPS - BREAKS[0], init=shards, **optim)
    return curve(done.metrics, BREAKS[0])


if __name__ == "__main__":
    curves, sizes = {}, {}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            train(folder / "first", seed, BREAKS[0])
            parts = {"uninterrupted": None, **{f"{bits} bits": bits for bits in BITS}, "init": None}
            for part, bits in parts.items():
                place = folder / part.replace(" ", "-")
                if part == "uninterrupted":
                    # An exact resume has the bits of a run without a break.
                    shutil.copytree(folder / "first", folder / "straight")
                    done = train(folder / "straight", seed, STEPS)
                    rows = [row for row in done.metrics if row["step"] > BREAKS[0]]
                    curves[f"{part}, seed {seed}"] = curve(rows)
                elif part == "init":
                    curves[f"{part}, seed {seed}"] = continued(folder / "first", place, seed)
                else:
                    place.mkdir()
                    curves[f"{part}, seed {seed}"], reports = in_pieces(folder / "first", place, seed, bits)
                    report = reports[-1]
                    sizes[part] = {
                        "bytes_per_parameter": report.size / report.parameters,
                        "relative_error": report.errors,
                    }
        record = {
            **provenance("python results/compact-state/measure.py"),
            "evaluator": "FD-pixels: Fréchet distance of raw pixels, 2,000 samples of EMA 0.995 at guidance "
            "1.5 against the 1,437 training digits",
            "breaks": BREAKS,
            "steps": STEPS,
            "sizes": sizes,
            "curves": curves,
        }
        with atomic_write(HERE / "metrics.json") as scratch:
            scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
