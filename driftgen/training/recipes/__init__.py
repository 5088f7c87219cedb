"""Recipes: YAML files with a complete configuration, packaged or the user's own, and overrides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from driftgen.errors import InputError
from driftgen.support.untrusted_files import check_regular
from driftgen.support.yaml_files import dump, plain, read_mapping, read_text
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.recipes.overrides import change, split_override, unknown_keys

__all__ = [
    "COMMANDS",
    "Command",
    "Recipe",
    "RunConfig",
    "config_class",
    "differences",
    "header",
    "load_config",
    "load_recipe",
    "recipe_names",
    "to_yaml",
]

FOLDER = Path(__file__).parent
RunConfig = TrainConfig | PretrainConfig | PolicyConfig
Command = Literal["train", "pretrain", "policy train"]
TASKS: dict[str, type[TrainConfig] | type[PretrainConfig] | type[PolicyConfig]] = {
    "train": TrainConfig,
    "pretrain": PretrainConfig,
    "policy": PolicyConfig,
}
# Tasks that a command takes; driftgen train takes recipes of policies, too.
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "policy"),
    "pretrain": ("pretrain",),
    "policy train": ("policy",),
}
SHOWN = 3  # problems listed in one message
DESCRIPTION = ("about", "expect", "chosen")  # fields without effect on a run
Config = TypeVar("Config", bound=BaseModel)


class Dumpable(Protocol):
    """A pydantic model."""

    def model_dump(self, *, exclude: Any = ...) -> dict[str, Any]: ...


class Recipe(NamedTuple):
    """Summary of a packaged recipe."""

    name: str
    task: str
    about: str


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    task: Command | None = None,
) -> RunConfig:
    """Load a packaged recipe or a ``.yaml`` file, with changes such as ``optim.lr=2e-4``.

    Args:
        name_or_path: a name of :func:`recipe_names`, or a file.
        overrides: ``key=value`` each, the value in YAML; integers index lists (``encoders.0.path=...``).
        task: command that rejects recipes for other commands; None accepts all.
    """
    return load_config(_find(name_or_path), config_class(name_or_path, task), overrides)


def config_class(
    name_or_path: str | Path, task: Command | None = None
) -> type[TrainConfig] | type[PretrainConfig] | type[PolicyConfig]:
    """Return the class of a recipe's configuration; ``task`` is as in :func:`load_recipe`."""
    path = _find(name_or_path)
    accepted = tuple(TASKS) if task is None else COMMANDS[task]
    kind = read_mapping(path).get("task", accepted[0])
    if not isinstance(kind, str) or kind not in TASKS:
        names = "', '".join(TASKS)
        raise InputError(f"{path}: task: Input should be one of '{names}', got {_shown(kind)}")
    if kind not in accepted:
        command = next(name for name in reversed(COMMANDS) if kind in COMMANDS[name])
        raise InputError(
            f"{name_or_path} is a recipe for driftgen {command}: run driftgen {command} {name_or_path}"
        )
    return TASKS[kind]


def load_config(path: Path, model: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Load a ``.yaml`` file as a configuration of one class; see :func:`load_recipe` for ``overrides``."""
    record = read_mapping(path)
    _raise_problems(unknown_keys(model, model, record), f"{path}: ")
    changed = []
    for override in overrides:
        keys, text = split_override(override)
        record = change(model, record, model, keys, text)
        changed.append(".".join(keys))
    _raise_problems(unknown_keys(model, model, record))
    try:
        return model.model_validate(record)
    except ValidationError as error:
        described = [_describe(problem) for problem in error.errors()]
        # pydantic also reports a list with an invalid entry as too short: report the entry alone.
        problems = [
            (w, line) for w, line in described if not any(v.startswith(f"{w}.") for v, _ in described)
        ]
        # Name the file, unless an override may have caused the problem.
        overridden = any(w.startswith(c) or c.startswith(w) for w, _ in problems for c in changed)
        _raise_problems((line for _, line in problems), "" if overridden else f"{path}: ")
        raise


def recipe_names() -> list[Recipe]:
    """Return every packaged recipe: its name, its command and a one-line description."""
    records = {path.stem: read_mapping(path) for path in _files()}
    return [Recipe(name, str(r.get("task", "train")), str(r.get("about", ""))) for name, r in records.items()]


def header(name_or_path: str | Path) -> str:
    """Return the leading comment of a recipe: hardware, hours and the expected result."""
    lines = []
    for line in read_text(_find(name_or_path)).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def to_yaml(config: Dumpable) -> str:
    """Return every value of a configuration in a fixed order; :func:`load_config` reads it back."""
    record = plain(config.model_dump())
    return dump({"task": record.pop("task"), **record})


def differences(old: Dumpable, new: Dumpable) -> list[str]:
    """Return ``key: old -> new`` for each value that differs, descriptions excluded."""
    before, after = (dict(_leaves(plain(c.model_dump(exclude=set(DESCRIPTION))))) for c in (old, new))
    return [
        f"{key}: {_shown(before[key]) if key in before else 'not set'} -> "
        f"{_shown(after[key]) if key in after else 'not set'}"
        for key in dict.fromkeys((*before, *after))
        if key not in before or key not in after or before[key] != after[key]
    ]


def _files() -> list[Path]:
    return sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)


def _find(name_or_path: str | Path) -> Path:
    packaged = {path.stem: path for path in _files()}
    if isinstance(name_or_path, str) and name_or_path in packaged:
        return packaged[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        if not path.exists():
            raise InputError(f"{path} does not exist")
        return check_regular(path)  # raises
    near = get_close_matches(str(name_or_path), packaged, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"recipe {str(name_or_path)!r} is not known: {hint}choose from {', '.join(packaged)}, "
        "or give a path to a .yaml file",
        topic="unknown-name",
    )


def _raise_problems(problems: Iterator[str], where: str = "") -> None:
    lines = list(problems)
    if lines:
        more = f" (and {len(lines) - SHOWN} more)" if len(lines) > SHOWN else ""
        raise InputError(where + "; ".join(lines[:SHOWN]) + more)


def _describe(problem: Any) -> tuple[str, str]:
    """Return the key of an invalid value and a line that describes the problem."""
    where, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
    message = message.replace("valid tuple", "valid list").replace("Tuple", "List")
    if not where:
        return where, message
    if problem["type"] == "missing":
        return where, f"{where} is not set: add it, or use --set {where}=VALUE"
    if problem["type"] == "model_type":
        message = "Input should be a section of key: value lines"
    return where, f"{where}: {message}, got {_shown(problem['input'])}"


def _leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield scalars and lists of scalars by key; empty sections are skipped."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*at, str(key)))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for i, inner in enumerate(value):
            yield from _leaves(inner, (*at, str(i)))
    elif at and value != []:
        yield ".".join(at), value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
