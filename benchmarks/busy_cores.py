"""Time of a CPU step while other programs use the cores: ``python -m benchmarks.busy_cores [FILE.json]``.

Trains the recipe ``digits`` for a few steps with threads that spin for different times while they
wait: on an idle machine, and beside one busy process per core. The best of three runs of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from driftgen.support.provenance import provenance

STEPS, RUNS = 200, 3
SETTINGS = {
    "waiting threads spin for milliseconds": {"GOMP_SPINCOUNT": "300000"},  # the library's own default
    "for microseconds (the command)": {"GOMP_SPINCOUNT": "10000"},
    "not at all": {"GOMP_SPINCOUNT": "0"},
}


def measure(setting: dict[str, str], folder: Path) -> float:
    """Return the seconds per step of a run, from its first row of metrics to its last one."""
    command = [sys.executable, "-m", "driftgen", "train", "digits", "--out", str(folder), "--device", "cpu"]
    command += ["--set", f"optim.steps={STEPS}", "--set", "output.metrics_every=20"]
    subprocess.run(command, env=os.environ | setting, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "seconds" in row and "loss" in row]
    return float((rows[-1]["seconds"] - rows[0]["seconds"]) / (rows[-1]["step"] - rows[0]["step"]))


def main() -> None:
    """Measure every setting, idle and busy, and print or write the record."""
    cores = len(os.sched_getaffinity(0))
    seconds: dict[str, dict[str, float]] = {}
    for busy in (0, cores):
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            for _ in range(busy):
                process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(process.wait)
                stack.callback(process.kill)
            found = {
                name: min(measure(setting, Path(folder) / f"{name}-{run}") for run in range(RUNS))
                for name, setting in SETTINGS.items()
            }
        seconds["idle" if busy == 0 else f"{busy} other busy processes"] = found
    record: dict[str, Any] = provenance("python -m benchmarks.busy_cores") | {
        "evaluator": f"seconds per step of the recipe digits, {STEPS} steps, best of {RUNS} runs",
        "cores": cores,
        "seconds": seconds,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
