"""Sizes of the compact state of a run, for every number of bits: python results/compact-state/sizes.py RUN

The stored run is that of the recipe cifar10 with few samples a step, on random images, 40 steps on a CPU.
"""

import json
import sys
import tempfile
from pathlib import Path

from driftgen.support.provenance import provenance
from driftgen.training.compact_state import write_state
from driftgen.training.state_encoding import LEVELS

if __name__ == "__main__":
    run, rows = sys.argv[1], {}
    for level in LEVELS:
        with tempfile.TemporaryDirectory() as folder:
            report = write_state(run, Path(folder) / "state", bits=level.bits)
            rows[f"{level.bits} bits"] = {
                "megabytes": report.size / 1e6,
                "files": report.files,
                "megabytes_of_parts": {part: size / 1e6 for part, size in report.parts.items()},
                "relative_error": report.errors,
                "codecs": level._asdict(),
            }
    record = {
        **provenance("python results/compact-state/sizes.py RUN"),
        "evaluator": "bytes of all files of a state with two averages",
        "parameters": report.parameters,
        "rows": rows,
    }
    place = Path(__file__).parent / "sizes.json"
    place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
