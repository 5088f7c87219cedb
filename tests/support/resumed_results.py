"""What a command reads when it is typed again: the choices of a run and the results of evaluations."""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import torch

import driftgen as dg
from driftgen.evaluation.sweep import _stored_rows
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.policy.environments import find_task
from driftgen.policy.score import _known_checkpoints, _record, score_table
from driftgen.policy.score_files import _summary
from driftgen.report.evaluation_files import format_rows
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.studio.training_job import TrainingJob
from driftgen.training.auto_encoder import choose_encoder
from driftgen.training.own_images import notes, plan
from driftgen.training.recipes import load_recipe, to_yaml

LATENCY = {"batch": 1, "milliseconds": 2.0, "actions_per_second": 9.0, "network_calls": 1, "device": "CPU"}
CHECKPOINT = {"weights": "abc", "scores": [0.5, 1.0], "successes": [False, True], "latency": [LATENCY]}
SCORES = {"task": "pusht", "seeds": [7, 8], "checkpoints": [CHECKPOINT, CHECKPOINT | {"weights": "def"}]}
ROW = {"guidance": 1.0, "FID": 3.0, "KID": 0.1, "precision": 1, "samples": 9, "compared": [9, 9]}
EVALUATION = {"key": "abc", "rows": [ROW, ROW | {"guidance": 1.5}]}


def own_run(folder: Path) -> None:
    """The configuration of a run on images of one's own, with the choices that a resumed run keeps."""
    config = load_recipe("folder", ["data.size=8"])
    chosen = {
        "size": "tiny",
        "reason of the size": "no GPU",
        "expect": "noise",
        "encoder": "a",
        "time": "1 s",
    }
    (folder / "config.yaml").write_text(to_yaml(config.model_copy(update={"chosen": chosen})))


def resume(folder: Path, *changes: str) -> Any:
    """Plan a run that exists, as the command that started it does when it is typed again."""
    return notes(plan("train", "folder", changes, folder=folder, device="cpu"), folder)


def evaluated(folder: Path) -> Any:
    """The rows of an interrupted evaluation, as it goes on with them."""
    rows = {row["guidance"]: row for row in _stored_rows(folder / "e.json", "abc", ["guidance"])}
    return format_rows([rows[alpha] for alpha in sorted(rows)])


def scored(folder: Path) -> Any:
    """The results of the checkpoints that an evaluation of a policy need not run again."""
    protocol = {key: SCORES[key] for key in ("task", "seeds")}
    if found := list(_known_checkpoints(folder / "e.json", protocol).values()):
        record = _record(protocol, found, find_task("pusht"), "")
        return score_table([("a", record | {"observe": "state"})]), _summary("PushT", record)


def training(folder: Path) -> None:
    """The record of a training that a studio started, and that runs."""
    (folder / ".studio").mkdir()
    began = psutil.Process().create_time()
    record = {"pid": os.getpid(), "began": began, "command": "driftgen train", "run": "a", "since": "today"}
    (folder / ".studio" / "job.json").write_text(json.dumps(record))


def trained(folder: Path) -> Any:
    """The state of that training, as the page shows it."""
    return TrainingJob(ReadableFolders(folder, folder)).state()


def encoder_run(folder: Path) -> None:
    """A complete encoder run beside the folder of a new run."""
    run = folder / "mae-photos"
    config = load_recipe("mae-folder", ["data.size=8", "data.path=photos", "optim.steps=3"])
    dg.save_model(ResNetMAE(3, 8, (1, 1, 1, 1), num_classes=2), run / "model", class_names=["a", "b"],
                  source={"step": 3})  # fmt: skip
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "accuracy": 0.5}) + "\n")


def encoder_choice(folder: Path) -> Any:
    """The encoder of the new run."""
    config = load_recipe("folder", ["data.size=8", "data.path=photos"], "train")
    return choose_encoder(config, folder / "photos", torch.device("cpu"), folder)
