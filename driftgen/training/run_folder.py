"""Folder of a run: its configuration, its metrics and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from driftgen.errors import InputError
from driftgen.support.atomic_write import append_line, atomic_write, make_folder
from driftgen.support.folder_lock import is_empty
from driftgen.support.yaml_files import read_mapping
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.mae_width import check_mae_width
from driftgen.training.metrics_file import repair_metrics
from driftgen.training.recipes import differences, load_config, load_recipe, to_yaml
from driftgen.training.task import LoopConfig
from driftgen.training.view import View

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "METRICS",
    "SAMPLES",
    "append_row",
    "check_run",
    "create_run",
    "recorded_init",
]

CONFIG, METRICS, CHECKPOINTS, SAMPLES = "config.yaml", "metrics.jsonl", "checkpoints", "samples"
Config = TypeVar("Config", bound=BaseModel)


def check_run(folder: Path, config: Config, *, override: bool) -> Config:
    """Check that the folder is empty or holds a run of this configuration; return the one to run with.

    A run keeps the ``ema_warmup`` it started with, whatever the recipe says today: switching it halfway
    would mix two averages. Runs of versions without this field started without warm-up.
    """
    path = folder / CONFIG
    if not path.is_file():
        if not is_empty(folder):
            raise InputError(
                f"{folder} is not empty and holds no run: use another --out", topic="file-exists"
            )
        if isinstance(config, PretrainConfig):  # runs of older versions with such a width resume
            check_mae_width(config.mae)
        return config
    task, expected = read_mapping(path).get("task", "train"), getattr(config, "task", "train")
    if task != expected:
        raise InputError(f"{folder} holds a run of driftgen {task}, not {expected}: use another --out")
    old = load_config(path, type(config))
    warmup = "ema_warmup" in old.model_fields_set and getattr(old, "ema_warmup", False)
    old, config = (c.model_copy(update={"ema_warmup": warmup}) for c in (old, config))
    changed = differences(old, config)
    if changed and not override:
        raise InputError(
            f"{folder} holds a run of another configuration ({'; '.join(changed[:5])}): "
            "use another --out, or --override to resume with the new values",
            topic="changed-configuration",
        )
    return config


def create_run(folder: Path, config: LoopConfig, **header: Any) -> None:
    """Write the configuration of a run and, for a new run, the header of its metrics."""
    make_folder(folder)
    with atomic_write(folder / CONFIG) as scratch:
        scratch.write_text(to_yaml(config), encoding="utf-8")
    if not repair_metrics(folder / METRICS):
        append_line(folder / METRICS, json.dumps({"header": header}))


def append_row(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a row to the metrics of a run."""
    append_line(folder / METRICS, json.dumps(row))


def recorded_init(config: TrainConfig, folder: Path, view: View) -> TrainConfig:
    """Return the configuration with the ``init`` that the run in ``folder`` started from, if there is one."""
    if not (folder / CONFIG).is_file() or not Checkpoints(folder / CHECKPOINTS).steps:
        return config
    recorded = load_recipe(folder / CONFIG)
    if config.init is not None:
        view.info(f"{folder} has a checkpoint: resuming it, init={config.init} is ignored")
    return config.model_copy(update={"init": getattr(recorded, "init", None)})
