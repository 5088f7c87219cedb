"""Models in the folder of a training run, one folder for each set of weights.

``model/`` holds the first average, ``model-ema-DECAY/`` each further one, ``model-live/`` the trained weights
and ``model-best/`` the average with the best evaluation. The run replaces them at every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.interop.saved_config import CONFIG, read_config
from driftgen.support.atomic_write import PARTIAL, REPLACED
from driftgen.support.untrusted_files import parse_json, read_bytes
from driftgen.support.yaml_files import read_mapping

__all__ = ["LIVE", "RUN_MODEL", "choose_weights", "find_run_model", "model_folders", "weight_sets"]

RUN_MODEL = "model"  # the model's folder inside a run's folder
LIVE = "live"  # the trained weights, in contrast to their averages
RUN_CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"  # other files of a run


def model_folders(names: Iterable[str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield each set of weights of a run with its folder and the record of its source in the model.

    ``names`` are EMA decays, of which the first one has ``model/``, and ``live``.
    """
    for i, name in enumerate(names):
        source, ending = ({"weights": LIVE}, LIVE) if name == LIVE else ({"ema": name}, f"ema-{name}")
        yield name, RUN_MODEL if i == 0 else f"{RUN_MODEL}-{ending}", source


def find_run_model(folder: Path) -> Path | None:
    """Return the folder of the first average if ``folder`` is a run, None if it is none.

    Raises:
        InputError: the run has saved no model yet.
    """
    if (folder / CONFIG).is_file():
        return None
    # A process that is killed while it replaces the model may leave the old one under this name.
    for name in (RUN_MODEL, RUN_MODEL + REPLACED):
        if (folder / name / CONFIG).is_file():
            return folder / name
    if (folder / RUN_CONFIG).is_file():
        raise InputError(_no_model_yet(folder))
    return None


def weight_sets(folder: Path) -> dict[str, Path]:
    """Return the saved model of each set of weights of a run: ``ema-0.999``, ``live``, ``best``.

    A saved model outside a run has one set: ``ema-DECAY`` if it comes from a run, or else ``saved``.
    """
    first = find_run_model(folder)
    sets = {_set_name(first or folder): first or folder}
    if first is not None:
        for path in sorted(folder.glob(f"{RUN_MODEL}-*")):
            if (path / CONFIG).is_file() and not path.name.endswith((PARTIAL, REPLACED)):
                sets.setdefault(path.name.removeprefix(f"{RUN_MODEL}-"), path)
    return sets


def choose_weights(folder: Path, weights: str) -> Path:
    """Return the saved model of one of the :func:`weight_sets`."""
    sets = weight_sets(folder)
    if weights in sets:
        return sets[weights]
    if find_run_model(folder) is None:
        raise InputError(
            f"weights={weights!r}: {folder} is a saved model with one set of weights, {next(iter(sets))}; "
            "give the folder of a run to choose another"
        )
    raise InputError(f"weights={weights!r}: {folder} has {', '.join(sets)}; choose one of them")


def _set_name(model: Path) -> str:
    if not (model / CONFIG).is_file():
        return "saved"
    source = read_config(model).source
    return f"ema-{source['ema']}" if "ema" in source else str(source.get("weights", "saved"))


def _no_model_yet(run: Path) -> str:
    """Return when a run without a model will save its first one."""
    try:
        config: Any = read_mapping(run / RUN_CONFIG)
        every, steps = int(config["output"]["checkpoint_every"]), int(config["optim"]["steps"])
        saved = [int(p.name[5:]) for p in (run / CHECKPOINTS).glob("step-*") if p.name[5:].isdigit()]
        first = min((max(saved, default=0) // every + 1) * every, steps)
    except (ValueError, LookupError, TypeError, ZeroDivisionError, OverflowError):
        return f"{run} has no model yet: a run saves one at every checkpoint"
    at = _last_step(run / METRICS)
    return (
        f"{run} has no model yet: it saves one at its next checkpoint, at step {first:,}"
        f"{f', and is at step {at:,} now' if at else ''}; wait for it, resume the run if it has stopped, or "
        "press Ctrl-C in it, which saves one"
    )


def _last_step(metrics: Path) -> int:
    """Return the step of the last row of metrics, 0 if there is none."""
    try:
        lines = read_bytes(metrics).splitlines()
    except (OSError, InputError):
        lines = []
    for line in reversed(lines):
        with suppress(ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return int(parse_json(line, finite=False).get("step", 0))  # unless the row is being written
    return 0
