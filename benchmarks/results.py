"""What a benchmark leaves in results/: its figures, and where they come from."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from driftgen.support.atomic_write import atomic_write
from driftgen.support.provenance import provenance

__all__ = ["save"]


def save(path: Path | None, evaluator: str, found: Mapping[str, Any]) -> None:
    """Write what was found to a file, if one is named, behind the command of this process, versions, machine
    and how it was measured.
    """
    if path is None:
        return
    program, *given = sys.argv
    options = [path.name if option == str(path) else option for option in given]
    command = shlex.join(["python", "-m", f"benchmarks.{Path(program).stem}", *options])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    record = {**provenance(command), "gpu": gpu, "evaluator": evaluator, **found}
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
