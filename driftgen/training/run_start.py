"""Before the first step of a run: its folder, its initial state, and its encoder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from driftgen.errors import InputError
from driftgen.support.distributed import Distributed
from driftgen.support.folder_lock import hold_folder
from driftgen.training.auto_encoder import (
    EncoderChoice,
    choose_encoder,
    is_auto,
    pretrain_command,
    pretrain_config,
)
from driftgen.training.build import NO_PARTS, Parts, build_mae, check_encoder_paths, open_data
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.compact_state import place_state
from driftgen.training.config import MODULE, Encoder, PretrainConfig, TrainConfig
from driftgen.training.own_images import ENCODER, NEXT, SIZE, TIME, WARNING
from driftgen.training.recipe_sizes import size_overrides
from driftgen.training.recipes import RunConfig, load_recipe
from driftgen.training.run_folder import CHECKPOINTS, CONFIG, check_run
from driftgen.training.view import View

__all__ = [
    "NO_PERMISSION",
    "Permission",
    "Phase",
    "fresh_folder",
    "place_compact_state",
    "planned_phases",
    "with_encoder",
]


class Permission(NamedTuple):
    """Permission to pretrain an encoder: given, or asked for by a function that gets the question."""

    given: bool = False
    ask: Callable[[str], bool] | None = None


NO_PERMISSION = Permission()


class Phase(NamedTuple):
    """One of the trainings of a command: its configuration, its folder, and parts from Python."""

    config: RunConfig
    folder: Path
    parts: Parts = NO_PARTS


def with_encoder(
    config: TrainConfig,
    folder: Path,
    processes: Distributed,
    parts: Parts,
    permission: Permission,
    pretrain: Callable[[PretrainConfig, Path], bool],
) -> TrainConfig | Path:
    """Return the configuration with an encoder in place of ``auto``; pretrain the encoder if need be.

    A run that resumes keeps the encoder it started with.

    Args:
        config: of the run.
        folder: of the run.
        processes: of the run.
        parts: data that were passed from Python.
        permission: to pretrain.
        pretrain: trains an encoder in a folder, or resumes its training; returns True if it is complete.

    Returns:
        The configuration, or the folder of the encoder run if pretraining was interrupted.
    """
    if not is_auto(config):
        check_encoder_paths(config)
        return config
    recorded = _recorded_encoder(config, folder)
    if recorded is not None:
        return recorded
    choice = choose_encoder(config, folder, processes.device)
    path, reason = str(choice.entry.path), choice.reason
    if choice.how == "pretrain":
        if not choice.started:
            _require(permission, config, path, processes)
        if not pretrain(_pretraining(config, folder, parts), Path(path)):
            return Path(path)
        reason = f"pretrained for this run, because {reason}"
    return _with_choice(config, choice._replace(reason=reason))


def planned_phases(config: RunConfig, folder: Path, device: str | None) -> list[Phase]:
    """Return the trainings that a command would run, for a dry run: an untrained encoder stands for one that
    would be pretrained.
    """
    if not isinstance(config, TrainConfig) or not is_auto(config):
        return [Phase(config, folder)]
    recorded = _recorded_encoder(config, folder)
    if recorded is not None:
        return [Phase(recorded, folder)]
    choice = choose_encoder(config, folder, Distributed.start(device).device)
    if choice.how != "pretrain":
        return [Phase(_with_choice(config, choice), folder)]
    first = _pretraining(config, folder, NO_PARTS)
    opened = open_data(config.data)
    encoder = build_mae(first.mae, opened.shape, len(opened.class_names))
    opened.close()
    second = _with_choice(config, choice._replace(reason=f"pretrained first, because {choice.reason}"))
    name = {"class": "not trained yet"}  # what the summary calls it
    untrained = Encoder(kind=MODULE, options=name, switches=choice.entry.switches)
    second = second.model_copy(update={"encoders": (untrained,)})
    return [Phase(first, Path(str(choice.entry.path))), Phase(second, folder, Parts(encoders=(encoder,)))]


def _with_choice(config: TrainConfig, choice: EncoderChoice) -> TrainConfig:
    """Return the configuration with an encoder in place of ``auto``, and the reason for it."""
    chosen = {**config.chosen, ENCODER: f"{choice.entry.path}: {choice.reason}"}
    if choice.warning:
        chosen[WARNING] = choice.warning
    return config.model_copy(update={"encoders": (choice.entry,), "chosen": chosen})


def _recorded_encoder(config: TrainConfig, folder: Path) -> TrainConfig | None:
    """Return the configuration with the encoder that the run in ``folder`` started with, if any."""
    if not (folder / CONFIG).is_file():
        return None
    recorded = load_recipe(folder / CONFIG)
    if not isinstance(recorded, TrainConfig) or ENCODER not in recorded.chosen:
        return None
    kept = {key: recorded.chosen[key] for key in (ENCODER, WARNING) if key in recorded.chosen}
    chosen = {**config.chosen, **kept}
    return config.model_copy(update={"encoders": recorded.encoders, "chosen": chosen})


def _pretraining(config: TrainConfig, folder: Path, parts: Parts) -> PretrainConfig:
    """Return the configuration that pretrains an encoder for the run in ``folder``, at the same size."""
    opened = open_data(config.data, parts.data)
    classes = len(opened.class_names)
    if parts.data is None:
        opened.close()
    size = config.chosen.get(SIZE)
    overrides = size_overrides("mae-folder", size) if size is not None else []
    first = pretrain_config(config, overrides, classes)
    return first.model_copy(update={"chosen": {**first.chosen, NEXT: str(folder)}})


def _require(permission: Permission, config: TrainConfig, path: str, processes: Distributed) -> None:
    """Raise unless the user permits to pretrain an encoder."""
    if permission.given:
        return
    shown = config.data.path or "this data"
    command = pretrain_command(path, config.data.path, config.chosen.get(SIZE))
    if permission.ask is not None and processes.world_size == 1:
        time = config.chosen.get(TIME)
        duration = "" if time is None else f" Encoder and generator take {time}."
        if permission.ask(f"Pretrain an encoder for {shown} first, in {path}?{duration}"):
            return
        raise InputError(f"not started: train the encoder with {command}, or use none: --set encoders=[]")
    raise InputError(
        f"no encoder for {shown} yet: add --yes to pretrain one first (in Python: pretrain=True), or type "
        f"{command}"
    )


def place_compact_state(
    state: str | Path,
    folder: Path,
    config: RunConfig,
    override: bool,
    processes: Distributed,
    view: View,
) -> None:
    """Place a compact state into the run's folder, if the run has this configuration."""

    def place() -> None:
        path, expected = Path(state) / CONFIG, config
        if path.is_file() and not Checkpoints(folder / CHECKPOINTS).steps:
            if isinstance(expected, TrainConfig) and expected.init is None:
                expected = expected.model_copy(update={"init": getattr(load_recipe(path), "init", None)})
            check_run(Path(state), expected, override=override)
        place_state(state, folder, view)

    with hold_folder(folder, processes):
        processes.run_main(place)


def fresh_folder(name: str, processes: Distributed) -> Path:
    """Return a folder in ``runs`` that does not exist yet; all processes agree on it.

    After a restart by ``torchrun --max-restarts`` it is the folder of the attempt before.
    """
    folder, last, i = Path("runs") / name, None, 1
    while folder.exists():
        last, i = folder, i + 1
        folder = Path("runs") / f"{name}-{i}"
    if last is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        folder = last
    if processes.group is not None:
        shared: list[Any] = [folder]
        dist.broadcast_object_list(shared, src=0, group=processes.group)
        folder = shared[0]
    return folder
