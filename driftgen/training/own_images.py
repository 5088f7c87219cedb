"""Start from a folder of images: the recipe, the size and the augmentation that fit it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch

from driftgen.data.images import RealData, open_images
from driftgen.data.locate import is_pattern
from driftgen.errors import InputError
from driftgen.interop.saved_config import model_options
from driftgen.model_io import load_any, registered_name
from driftgen.support.distributed import Distributed, choose_device
from driftgen.support.untrusted_files import shown
from driftgen.support.user_paths import expand_user
from driftgen.training.auto_encoder import is_auto, pretrain_config
from driftgen.training.build import Parts, build_mae
from driftgen.training.config import MODULE, Encoder, TrainConfig
from driftgen.training.dry_run import measure_run
from driftgen.training.recipe_options import FROM_DATA
from driftgen.training.recipe_sizes import (
    SIZED,
    SIZES,
    Choice,
    choose_size,
    few_images,
    few_images_limit,
    size_note,
    size_overrides,
    size_start,
    size_time,
)
from driftgen.training.recipes import Command, RunConfig, load_recipe, recipe_names
from driftgen.training.run_folder import CONFIG

__all__ = ["ENCODER", "NEXT", "SIZE", "TIME", "WARNING", "NamedRecipe", "name_recipe", "notes", "plan"]

Task = Command
Config = RunConfig
SIZE, REASON, AUGMENTATION, ENCODER = "size", "reason of the size", "augmentation", "encoder"
GENERATOR = "generator"
TIME = "time"  # of both parts, at a size as it is
EXPECT = "expect"  # of a size
RECORDED = "as the run started"  # reason of a size whose run does not say it
WARNING = "warning about the encoder"
# Changes that leave the time of a size as it is.
TIMELESS = ("data.path=", "data.augment", "data.conditional", "seed=", "output.", "init=")
# Changes of users who choose the initial weights, a network or a shape of their own.
OWN_START = ("init=", "generator", "tokenizer", "data.size=", "data.channels=", "data.kind=")
NEXT = "next"  # the run that an encoder is pretrained for


class NamedRecipe(NamedTuple):
    """A recipe, the changes that its argument implies, and the name of the run."""

    recipe: str | Path
    overrides: tuple[str, ...]
    run: str


def name_recipe(argument: str | Path, task: Task = "train") -> NamedRecipe:
    """Return the recipe that an argument means.

    A packaged name or a ``.yaml`` file is itself. Any other path that exists holds images, and so does a
    pattern of shards such as ``photos-{000..009}.tar``: they mean the recipe for images of one's own, and the
    run is named after them. ``digits`` is the recipe; ``digits/`` and ``./digits`` are folders.
    """
    path, text = Path(argument), str(argument)
    packaged = {recipe.name for recipe in recipe_names()}
    if (isinstance(argument, str) and text in packaged) or path.suffix in (".yaml", ".yml"):
        return NamedRecipe(argument, (), path.stem)
    if not expand_user(path).exists() and not is_pattern(text):
        if "/" in text:
            raise InputError(
                f"{text} does not exist: give a folder of images, a .yaml file, or a name of driftgen "
                "recipes",
                topic="not-found",
            )
        if not get_close_matches(text, packaged, n=1):
            raise InputError(
                f"{text} is neither in this folder nor a recipe: give a folder of images, a .yaml file, or a "
                "name of driftgen recipes",
                topic="not-found",
            )
        return NamedRecipe(argument, (), path.stem)  # load_recipe names the known recipes
    recipe = "folder" if task == "train" else "mae-folder"
    name = _name_files(path)
    run = name if task == "train" else f"mae-{name}"
    return NamedRecipe(recipe, (f"data.path={json.dumps(str(path), ensure_ascii=False)}",), run or recipe)


def _name_files(path: Path) -> str:
    """Return the name of a folder or a file without its suffix; of a pattern, the text before its wildcards.

    The run on ``photos-{000..009}.tar`` is ``photos``, that on ``photos/*.tar`` is ``photos``, too.
    """
    place = expand_user(path).resolve()
    if place.exists():
        return place.stem if place.is_file() else place.name
    fixed = re.split(r"[*?\[{]", place.name)[0]
    return re.sub(r"[-_. ]+\d*$", "", fixed) or _name_files(place.parent)


def plan(
    task: Task,
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    size: str | None = None,
    folder: Path | None = None,
    device: str | None = None,
    data: RealData | None = None,
) -> Config:
    """Return the configuration of a recipe, at the size and with the augmentation that fit.

    Recipes without sizes are only loaded. The size of an existing run stays what it is.

    Args:
        task: of the recipe.
        recipe: name or path of a recipe.
        overrides: changes of the user, ``key=value``; they come last.
        size: one of :data:`~driftgen.training.recipe_sizes.SIZES`; ``auto`` if None.
        folder: of the run, for the size that it started with.
        device: of the run; the best one if None.
        data: data that were passed from Python.
    """
    name = str(recipe)
    if name not in SIZED:
        if size is not None:
            size_overrides(name, size)  # raises: names the recipes that have sizes
        return load_recipe(recipe, overrides, task)
    if size is not None and size not in SIZES:
        raise InputError(f"size={size} is not known: choose from {', '.join(SIZES)}")
    load_recipe(name, overrides, task)  # raises before anything is measured
    choice = _recorded_size(folder) if size in (None, "auto") else Choice(str(size), "as asked")
    if choice is None:
        place = choose_device(device)
        named = data is not None or load_recipe(name, overrides, task).data.path is not None
        choice = choose_size(place, (lambda s: _measure(s, overrides, place, data)) if named else None)
    sized = size_overrides(name, choice.value)
    config = load_recipe(name, [*sized, *overrides], task)
    start = _initial_model(config, choice.value, overrides, folder)
    if start:
        overrides = [*start, *overrides]
        config = load_recipe(name, [*sized, *overrides], task)
    same, init = _generator_of_init(config, overrides, folder), None
    if same:
        init = getattr(config, "init", None)
        sized = [*size_overrides(name, choice.value, init), *same]
        config = load_recipe(name, [*sized, *overrides], task)
    chosen = {SIZE: choice.value, REASON: choice.reason, EXPECT: size_note(choice.value, init)}
    if init is not None:
        fresh = start and (folder is None or not (folder / CONFIG).is_file())
        other = "; for random weights and a smaller one: --set init=null" if fresh else ""
        chosen[GENERATOR] = f"as in {init}, whose weights the run starts from{other}"
    if size_time(choice.value, init) and all(override.startswith(TIMELESS) for override in overrides):
        chosen[TIME] = size_time(choice.value, init)
    least = _smallest_class(config, data)
    own = any(override.startswith("data.augment") for override in overrides)
    if least is not None and least < few_images_limit(choice.value) and few_images(name) and not own:
        config = load_recipe(name, [*sized, *few_images(name), *overrides], task)
        chosen[AUGMENTATION] = (
            f"{least} images in the smallest class: flips, small rotations, zooms and shifts are on, because "
            "a generator can memorize so few"
        )
    return config.model_copy(update={"chosen": chosen})


def notes(config: Config, folder: Path) -> list[str]:
    """Return one line for each automatic choice of the run in ``folder``, and what to expect."""
    chosen, lines = getattr(config, "chosen", {}), []
    if NEXT in chosen:
        lines.append(f"part 1 of 2: an encoder, in {folder}; part 2 is the generator, in {chosen[NEXT]}")
    if ENCODER in chosen:
        lines.append(f"encoder {chosen[ENCODER]}")
    if WARNING in chosen:
        lines.append(f"warning: {chosen[WARNING]}")
    if SIZE in chosen:
        time = f"{chosen[TIME]}. " if TIME in chosen else ""
        pixels = f"{getattr(config.data, 'size', None)} pixels{', ' if time else '. '}"
        # Runs of earlier versions have no note, and other hands may have changed the choices.
        note = chosen.get(EXPECT) or (size_note(chosen[SIZE]) if chosen[SIZE] in SIZES[1:] else "")
        text = f"size {chosen[SIZE]} ({chosen.get(REASON, RECORDED)}): {pixels}{time}{note}"
        lines.append(text.removesuffix(". "))
    if GENERATOR in chosen:
        lines.append(f"generator {chosen[GENERATOR]}")
    if AUGMENTATION in chosen and config.task == "train":
        lines.append(f"{chosen[AUGMENTATION]}. Check for copies afterwards: driftgen neighbors {folder}")
    return lines


def _recorded_size(folder: Path | None) -> Choice | None:
    """Return the size of the run in a folder; None if there is no run, or one without a size."""
    if folder is None or not (folder / CONFIG).is_file():
        return None
    chosen = getattr(load_recipe(folder / CONFIG), "chosen", {})
    if SIZE not in chosen:
        return None
    if chosen[SIZE] not in SIZES[1:]:
        raise InputError(
            f"{folder / CONFIG}: chosen.size={shown(chosen[SIZE])} is not known: name the size of the "
            f"run with --size, one of {', '.join(SIZES[1:])}"
        )
    return Choice(chosen[SIZE], chosen.get(REASON, RECORDED))


def _initial_model(config: Config, size: str, overrides: Sequence[str], folder: Path | None) -> list[str]:
    """Return the change that starts a run on image files from the model that its size names.

    A run that resumes keeps the model that it started from, or none.
    """
    if not isinstance(config, TrainConfig) or config.data.path is None:
        return []
    if folder is not None and (folder / CONFIG).is_file():
        recorded = load_recipe(folder / CONFIG, task="train")
        return [f"init={json.dumps(getattr(recorded, 'init', None))}"]
    start = size_start(size)
    if start is None or any(override.startswith(OWN_START) for override in overrides):
        return []
    return [f"init={json.dumps(start)}"]


def _generator_of_init(config: Config, overrides: Sequence[str], folder: Path | None) -> list[str]:
    """Return the changes that give a run the generator and the image shape of the model in ``init``.

    Nothing changes without ``init``, or if the user chose a generator. A run that resumes keeps its own.
    """
    if not isinstance(config, TrainConfig) or config.init is None:
        return []
    if any(override.startswith("generator") for override in overrides):
        return []
    if folder is not None and (folder / CONFIG).is_file():
        recorded = load_recipe(folder / CONFIG, task="train")
        assert isinstance(recorded, TrainConfig)
        return [
            f"generator={recorded.generator.model_dump_json()}",
            f"data.size={json.dumps(recorded.data.size)}",
            f"data.channels={recorded.data.channels}",
        ]
    model = load_any(config.init).model
    kind, options = registered_name(type(model), saved=False), model_options(model)
    if kind is None or "input_size" not in options or options.get("in_channels") not in (1, 3):
        return []  # load_initial_weights names the two classes
    own = {name: value for name, value in options.items() if name not in FROM_DATA}
    return [
        f"generator={json.dumps({'kind': kind, 'options': own})}",
        f"data.size={options['input_size']}",
        f"data.channels={options['in_channels']}",
    ]


def _smallest_class(config: Config, data: RealData | None) -> int | None:
    """Return the number of images in the smallest class; None if the data cannot be opened yet."""
    opened = data
    if opened is None:
        if config.data.path is None or config.data.kind != "images":
            return None
        opened = open_images(config.data.model_copy(update={"workers": 0}))
        opened.close()
    return int(torch.bincount(opened.labels, minlength=len(opened.class_names)).min())


def _measure(size: str, overrides: Sequence[str], device: torch.device, data: RealData | None) -> float:
    """Return the seconds that a size takes on this machine, measured on a few steps of both recipes."""
    config: Any = load_recipe("folder", [*size_overrides("folder", size), *_applicable(overrides)], "train")
    processes = Distributed(0, 1, device, None)
    opened = data if data is not None else open_images(config.data)
    pretraining = pretrain_config(config, size_overrides("mae-folder", size), len(opened.class_names))
    seconds = measure_run(pretraining, processes, parts=Parts(data)).seconds()
    encoders: tuple[Any, ...] = ()
    if is_auto(config):  # an untrained encoder takes as long as a trained one
        encoders = (build_mae(pretraining.mae, opened.shape, len(opened.class_names)),)
        untrained = Encoder(kind=MODULE, switches=config.encoders[0].switches)
        config = config.model_copy(update={"encoders": (untrained,)})
    if data is None:
        opened.close()
    return seconds + measure_run(config, processes, parts=Parts(data, None, encoders)).seconds()


def _applicable(overrides: Sequence[str]) -> list[str]:
    """Return the changes that both recipes know: those of the data."""
    return [override for override in overrides if override.startswith("data.")]
