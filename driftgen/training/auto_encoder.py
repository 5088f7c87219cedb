"""Choose the encoder of a run whose recipe says ``encoders: auto``, and find encoder runs.

The order of choice: an encoder run beside the run that was trained on the same data, a backbone in the local
Hugging Face cache, an encoder that is pretrained first. Nothing is downloaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from driftgen.data.config import Data
from driftgen.errors import InputError
from driftgen.model_io import RUN_MODEL, read_config
from driftgen.support.untrusted_files import read_json
from driftgen.support.user_paths import expand_user
from driftgen.support.yaml_files import read_mapping
from driftgen.training.config import AUTO, Encoder, PretrainConfig, TrainConfig
from driftgen.training.metrics_file import read_metrics
from driftgen.training.recipe_sizes import size_overrides
from driftgen.training.recipes import load_config, load_recipe, recipe_names
from driftgen.training.run_folder import CONFIG, METRICS

__all__ = [
    "EncoderChoice",
    "cached_backbones",
    "choose_encoder",
    "is_auto",
    "pretrain_command",
    "pretrain_config",
]

# Families of transformers whose feature maps are known to work as φ, best first.
FAMILIES = ("convnextv2", "dinov2", "dinov2_with_registers", "resnet")
SHORT = 0.5  # share of its recipe's steps below which an encoder run gets a warning
NEAR_CHANCE = 0.1  # accuracy on the 64 images of the metrics has a standard deviation of 0.05
SAME_DATA = ("kind", "size", "channels", "conditional", "limit", "memory")


class EncoderChoice(NamedTuple):
    """The encoder of a run.

    Attributes:
        how: a complete encoder run, a cached backbone, or a run to pretrain or to resume.
        entry: entry of ``encoders`` in the configuration.
        reason: one line.
        started: True for an encoder run that was interrupted; resuming it needs no new permission.
        warning: reason to doubt a complete encoder run, and what to do about it; "" if there is none.
    """

    how: Literal["run", "backbone", "pretrain"]
    entry: Encoder
    reason: str
    started: bool = False
    warning: str = ""


def is_auto(config: TrainConfig) -> bool:
    """Return True if the configuration leaves the choice of an encoder to :func:`choose_encoder`."""
    return any(entry.kind == AUTO for entry in config.encoders)


def choose_encoder(
    config: TrainConfig, folder: Path, device: torch.device, cache: Path | None = None
) -> EncoderChoice:
    """Choose the encoder for ``encoders: auto``; a masked autoencoder gets the switches of that entry.

    Args:
        config: of the run.
        folder: of the run; encoder runs are searched beside it.
        device: of the run. A backbone takes hours per hundred steps on a CPU, so it is chosen on a GPU only.
        cache: of the Hugging Face Hub; the usual one if None.
    """
    if config.tokenizer is not None or config.data.kind == "latents":
        raise InputError("encoders: auto is for images: name an encoder of latents with encoders.0.path")
    shown = config.data.path or "this data"
    switches = next(entry.switches for entry in config.encoders if entry.kind == AUTO)
    for run in _encoder_runs(folder):
        if _complete(run) and _same_data(_read_run(run).data, config.data):
            entry = Encoder(kind="mae", path=str(run), switches=switches)
            facts, warning = _assess(run, config)
            return EncoderChoice("run", entry, f"trained on {shown} before, {facts}", warning=warning)
    backbones = cached_backbones(cache)
    if backbones and device.type == "cuda":
        name, snapshot = backbones[0]
        entry = Encoder(kind="backbone", path=str(snapshot))
        return EncoderChoice("backbone", entry, f"{name} lies in the local Hugging Face cache")
    target = _encoder_folder(folder, config.data)
    unused = f"; {backbones[0][0]} in the cache is too slow on a CPU" if backbones else ""
    started = (target / CONFIG).is_file()
    reason = f"there was no encoder for {shown}{unused}"
    entry = Encoder(kind="mae", path=str(target), switches=switches)
    return EncoderChoice("pretrain", entry, reason, started)


def pretrain_config(config: TrainConfig, overrides: Sequence[str], classes: int) -> PretrainConfig:
    """Return the configuration of the recipe mae-folder for the data of a run.

    ``overrides`` are those of the size; the augmentation is that of mae-folder. One class leaves nothing to
    classify.
    """
    recipe = load_recipe("mae-folder", overrides, "pretrain")
    assert isinstance(recipe, PretrainConfig)
    keep = {name: getattr(config.data, name) for name in ("path", *SAME_DATA)}
    masking = recipe.mae
    if classes == 1:
        masking = masking.model_copy(update={"finetune_steps": 0})
    update: dict[str, Any] = {"data": recipe.data.model_copy(update=keep), "mae": masking}
    return recipe.model_copy(update=update | {"seed": config.seed, "chosen": config.chosen})


def pretrain_command(path: str, data: str | None, size: str | None = None, about: str = "") -> str:
    """Return the command that trains the encoder of a run folder.

    Its recipe is the one that the folder is named after, the one that belongs to the packaged recipe with
    this description (``about``), or mae-folder.
    """
    packaged = [r.name for r in recipe_names() if r.task == "pretrain"]
    recipe = Path(path).name if Path(path).name in packaged else _own_pretraining(about, packaged)
    command = f"driftgen pretrain {recipe}"
    command += f" --set data.path={shlex.quote(data or 'PATH')}" if recipe != "mae-digits" else ""
    command += f" --size {size}" if size is not None and recipe == "mae-folder" else ""
    return command + ("" if Path(path) == Path("runs") / recipe else f" --out {shlex.quote(path)}")


def _own_pretraining(about: str, packaged: Sequence[str]) -> str:
    """Return the pretraining recipe whose encoder the packaged recipe of this description uses."""
    for name in [r.name for r in recipe_names() if r.task == "train" and r.about == about]:
        recipe = load_recipe(name, (), "train")
        for entry in recipe.encoders if isinstance(recipe, TrainConfig) else ():
            # The authors' encoders have underscores: hf://mae_latent_256.
            own = Path(entry.path or "").name.replace("_", "-")
            if own in packaged:
                return own
    return "mae-folder"


def cached_backbones(cache: Path | None = None) -> list[tuple[str, Path]]:
    """Return name and folder of each backbone in the local Hugging Face cache that this package supports.

    Without transformers there are none.
    """
    if find_spec("transformers") is None:
        return []
    if cache is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = Path(HF_HUB_CACHE)
    found = []
    for place in sorted(cache.glob("models--*")):
        snapshot = _newest_snapshot(place)
        family = _family(snapshot) if snapshot is not None else None
        if snapshot is not None and family is not None:
            name = place.name.removeprefix("models--").replace("--", "/")
            found.append((FAMILIES.index(family), name, snapshot))
    return [(name, snapshot) for _, name, snapshot in sorted(found)]


def _assess(run: Path, config: TrainConfig) -> tuple[str, str]:
    """Return steps and accuracy of a complete encoder run, and a warning if it hardly learned anything."""
    steps, saved = _read_run(run).optim.steps, read_config(run / RUN_MODEL)
    rows = read_metrics(run / METRICS)[1] if (run / METRICS).is_file() else []
    accuracy = rows[-1].get("accuracy") if rows else None
    facts, doubts = f"{steps:,} steps", []
    size = config.chosen.get("size")
    overrides = size_overrides("mae-folder", size) if size is not None else ()
    usual = load_recipe("mae-folder", overrides, "pretrain").optim.steps
    if steps < SHORT * usual:
        doubts.append(f"was trained for {steps:,} steps, its recipe has {usual:,}")
    if isinstance(accuracy, float) and 0 <= accuracy <= 1 and saved.class_names:
        chance = 1 / len(saved.class_names)
        facts += f", accuracy {accuracy:.2f} (chance {chance:.2g})"
        if accuracy < min(2 * chance, chance + NEAR_CHANCE):
            doubts.append(f"has an accuracy of {accuracy:.2f}, near chance ({chance:.2g})")
    if not doubts:
        return facts, ""
    command = pretrain_command(str(run), config.data.path, size)
    longer = f" --set optim.steps={max(usual, 2 * steps)}" if max(usual, 2 * steps) != usual else ""
    return facts, f"the encoder {' and '.join(doubts)}: train it for longer with {command}{longer} --override"


def _newest_snapshot(place: Path) -> Path | None:
    """Return the snapshot that ``refs/main`` names, or any other one."""
    main = place / "refs" / "main"
    text = main.read_text(encoding="utf-8", errors="replace") if main.is_file() else None
    named = [] if text is None else [place / "snapshots" / text.strip()]
    return next((s for s in (*named, *sorted((place / "snapshots").glob("*"))) if s.is_dir()), None)


def _family(snapshot: Path) -> str | None:
    """Return the family of a complete snapshot that this package supports."""
    try:
        record = read_json(snapshot / "config.json", "a configuration")
    except InputError:
        return None
    weights = [*snapshot.glob("*.safetensors"), *snapshot.glob("pytorch_model*.bin")]
    family = record.get("model_type")
    return family if family in FAMILIES and any(path.is_file() for path in weights) else None


def _encoder_runs(folder: Path) -> Iterator[Path]:
    """Yield encoder runs beside a run, that of the same name first."""
    own = folder.parent / f"mae-{folder.name}"
    others = sorted(path for path in folder.parent.glob("mae-*") if path != own)
    yield from (path for path in (own, *others) if _is_pretraining(path))


def _encoder_folder(folder: Path, data: Data) -> Path:
    """Return the folder of the encoder run that belongs to a run: interrupted on the same data, or new."""
    base = folder.parent / f"mae-{folder.name}"
    target, i = base, 1
    while target.exists() and not (_is_pretraining(target) and _same_data(_read_run(target).data, data)):
        i += 1
        target = base.with_name(f"{base.name}-{i}")
    return target


def _is_pretraining(folder: Path) -> bool:
    path = folder / CONFIG
    try:
        return path.is_file() and read_mapping(path).get("task") == "pretrain"
    except InputError:
        return False


def _read_run(folder: Path) -> PretrainConfig:
    return load_config(folder / CONFIG, PretrainConfig)


def _complete(folder: Path) -> bool:
    """Return True if the saved encoder is that of the run's last step."""
    if not (folder / RUN_MODEL / "config.json").is_file():
        return False
    step = read_config(folder / RUN_MODEL).source.get("step")
    return isinstance(step, int) and step >= _read_run(folder).optim.steps


def _same_data(one: Data, other: Data) -> bool:
    """Return True if two runs train on the same images at the same size."""
    if any(getattr(one, name) != getattr(other, name) for name in SAME_DATA):
        return False
    paths = [None if d.path is None else expand_user(d.path).resolve() for d in (one, other)]
    return paths[0] == paths[1]
