"""Recipes: YAML files that hold a whole configuration, packaged or a person's own, and changes on top."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError

from driftgen.errors import InputError
from driftgen.training.config import PretrainConfig, TrainConfig

__all__ = ["Recipe", "differences", "header", "load_recipe", "recipe_names", "to_yaml"]

FOLDER = Path(__file__).parent
TASKS: dict[str, type[TrainConfig] | type[PretrainConfig]] = {
    "train": TrainConfig,
    "pretrain": PretrainConfig,
}
SHOWN = 3  # problems in one message
# What only describes a run; changing it changes nothing.
DESCRIPTION = ("about", "expect")

# PyYAML reads 2e-4, yes and 12:30 as YAML 1.1 does: a string, a truth and 750. These are YAML 1.2's rules.
FLOAT = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
RULES = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789"),
    ("float", FLOAT, "-+0123456789."),
    ("merge", re.compile(r"<<$"), "<"),
)


class Recipe(NamedTuple):
    """One line of the list of recipes."""

    name: str
    task: str
    about: str


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    task: Literal["train", "pretrain"] | None = None,
) -> TrainConfig | PretrainConfig:
    """The configuration of a packaged recipe or of a ``.yaml`` file, with changes such as ``optim.lr=2e-4``.

    Args:
        name_or_path: a name of :func:`recipe_names`, or a file.
        overrides: ``key=value`` each, the value in YAML; numbers pick from a list (``encoders.0.path=...``).
        task: refuses a recipe for the other command; None takes either.
    """
    path = _find(name_or_path)
    record = _read(path)
    kind = record.get("task", task or "train")
    if not isinstance(kind, str) or kind not in TASKS:
        raise InputError(f"{path}: task: Input should be 'train' or 'pretrain', got {_shown(kind)}")
    if task is not None and kind != task:
        raise InputError(
            f"{name_or_path} is a recipe for driftgen {kind}: run driftgen {kind} {name_or_path}"
        )
    model = TASKS[kind]
    _refuse(_unknown(model, model, record), f"{path}: ")
    changed = []
    for override in overrides:
        keys, text = _split(override)
        record = _change(model, record, model, keys, text)
        changed.append(".".join(keys))
    _refuse(_unknown(model, model, record))
    try:
        return model.model_validate(record)
    except ValidationError as error:
        every = [_problem(found) for found in error.errors()]
        # A list with a wrong entry is counted as too short as well; the entry is what matters.
        problems = [(w, line) for w, line in every if not any(v.startswith(f"{w}.") for v, _ in every)]
        # The file is named unless one of the changes may be to blame.
        blamed = any(w.startswith(c) or c.startswith(w) for w, _ in problems for c in changed)
        _refuse((line for _, line in problems), "" if blamed else f"{path}: ")
        raise


def recipe_names() -> list[Recipe]:
    """Every packaged recipe: its name, the command it is for and one line about it."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        record = _read(path)
        found.append(Recipe(path.stem, str(record.get("task", "train")), str(record.get("about", ""))))
    return found


def header(name_or_path: str | Path) -> str:
    """The comment that a recipe opens with: hardware, hours and the number to expect."""
    lines = []
    for line in _text(_find(name_or_path)).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def to_yaml(config: TrainConfig | PretrainConfig) -> str:
    """Every value of a configuration, in a fixed order; :func:`load_recipe` reads it back as it was."""
    record = _plain(config.model_dump())
    record = {"task": record.pop("task"), **record}
    text: str = yaml.dump(
        record, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )
    return text


def differences(old: TrainConfig | PretrainConfig, new: TrainConfig | PretrainConfig) -> list[str]:
    """``key: old -> new`` for each value that differs; descriptions do not count."""
    before, after = (dict(_leaves(_plain(c.model_dump(exclude=set(DESCRIPTION))))) for c in (old, new))
    return [
        f"{key}: {_shown(before[key]) if key in before else 'not set'} -> "
        f"{_shown(after[key]) if key in after else 'not set'}"
        for key in dict.fromkeys((*before, *after))
        if key not in before or key not in after or before[key] != after[key]
    ]


# Files


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values only, numbers as YAML 1.2 writes them, no key twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (filled in below, as PyYAML asks)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes what the loader would take for a number; lists of plain values stay on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: list[Any]) -> Any:
        flat = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


for _tag, _pattern, _first in RULES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))
_Dumper.add_representer(list, _Dumper.represent_list)


def _find(name_or_path: str | Path) -> Path:
    packaged = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    if isinstance(name_or_path, str) and name_or_path in packaged:
        return packaged[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise InputError(f"{path} does not exist" if not path.exists() else f"{path} is a folder")
    near = get_close_matches(str(name_or_path), packaged, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"recipe {str(name_or_path)!r} is not known: {hint}choose from {', '.join(packaged)}, "
        "or give a path to a .yaml file"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text in UTF-8: save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _read(path: Path) -> dict[str, Any]:
    record = _parse(_text(path), str(path), name_line=True)
    if not isinstance(record, dict):
        raise InputError(f"{path} holds no configuration: write key: value lines, or copy a recipe's")
    return record


def _parse(text: str, where: str, name_line: bool = False) -> Any:
    """The value of a YAML text: plain data only, tags that name Python objects are refused."""
    try:
        loader = _Loader(text)
        try:
            return _plain(loader.get_single_data())  # a value that holds itself ends here too
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line, reason = text.count("\n", 0, error.position), "a character that YAML does not allow"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, reason = (mark.line if mark else 0), " ".join(str(error.problem or error.context).split())
    except RecursionError:
        line, reason = 0, "values lie too deep in each other"
    except ValueError as error:  # a tagged value that cannot be read as what its tag says
        line, reason = 0, " ".join(str(error).split())
    raise InputError(f"{where}{f', line {line + 1}' if name_line else ''}: {reason}")


# Keys


def _unknown(
    root: type[BaseModel], model: type[BaseModel], record: Mapping[Any, Any], at: tuple[str, ...] = ()
) -> Iterator[str]:
    """One line for each key that the configuration does not have."""
    for key, value in record.items():
        field = model.model_fields.get(key)
        if field is None:
            yield _not_known(root, model, at, str(key))
            continue
        inside, item = _section(field.annotation), _section(_item(field.annotation))
        if inside is not None and isinstance(value, Mapping):
            yield from _unknown(root, inside, value, (*at, key))
        elif item is not None and isinstance(value, list):
            for i, part in enumerate(value):
                if isinstance(part, Mapping):
                    yield from _unknown(root, item, part, (*at, key, str(i)))


def _not_known(
    root: type[BaseModel], model: type[BaseModel], at: tuple[str, ...], key: str, rest: Sequence[str] = ()
) -> str:
    typed = ".".join((*at, key, *rest))
    elsewhere = [".".join(path) for path in _paths(root) if path[-1] == (key, *rest)[-1]]
    near = [".".join((*at, n, *rest)) for n in get_close_matches(key, model.model_fields, n=1)]
    # The very name in another section is a better guess than a name that looks like it.
    for guess in (near + elsewhere) if rest else (elsewhere + near):
        return f"{typed} is not known: did you mean {guess}?"
    return f"{typed} is not known: choose from {', '.join('.'.join((*at, n)) for n in model.model_fields)}"


def _paths(model: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the configuration; the first entry stands for those of a list."""
    for key, field in model.model_fields.items():
        yield (*at, key)
        inside, item = _section(field.annotation), _section(_item(field.annotation))
        if inside is not None:
            yield from _paths(inside, (*at, key))
        elif item is not None:
            yield from _paths(item, (*at, key, "0"))


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _item(annotation: Any) -> Any:
    """What a list holds; None for what is no list."""
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def _kinds(annotation: Any) -> set[Any]:
    """The types that a value may have, None left out."""
    if annotation is Any or get_origin(annotation) in (dict, tuple, Literal):
        return {get_origin(annotation) or Any}
    return {get_origin(a) or a for a in get_args(annotation) or (annotation,)} - {NoneType}


# Changes


def _split(override: str) -> tuple[list[str], str]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        example = f"{key.strip()}=VALUE" if key.strip() else "optim.lr=2e-4"
        raise InputError(f"{override!r} is no change of a value: write it as key=value, such as {example}")
    return key.strip().split("."), text.strip()


def _change(
    root: type[BaseModel], old: Any, annotation: Any, keys: Sequence[str], text: str, at: tuple[str, ...] = ()
) -> Any:
    """A copy of ``old`` in which the value at ``keys`` is that of ``text``."""
    if not keys:
        return _value(annotation, text, ".".join(at))
    key, rest = keys[0], keys[1:]
    section, kinds = _section(annotation), _kinds(annotation)
    if section is not None:
        if key not in section.model_fields:
            raise InputError(_not_known(root, section, at, key, rest))
        record = dict(old) if isinstance(old, Mapping) else {}
        field = section.model_fields[key]
        inner = record.get(key, field.get_default(call_default_factory=True))
        return {**record, key: _change(root, inner, field.annotation, rest, text, (*at, key))}
    if _item(annotation) is not None or (Any in kinds and isinstance(old, list)):
        items = list(old) if isinstance(old, list | tuple) else []
        if not key.isdecimal() or int(key) > len(items):
            name, valid = ".".join(at), f"0 to {len(items)}" if items else "0"
            raise InputError(f"{name}.{key} is not known: {name} has {len(items)} entries, choose {valid}")
        i = int(key)
        inner = items[i] if i < len(items) else None
        new = _change(root, inner, _item(annotation) or Any, rest, text, (*at, key))
        return [*items[:i], new, *items[i + 1 :]]
    if dict in kinds or Any in kinds:
        record = dict(old) if isinstance(old, Mapping) else {}
        return {**record, key: _change(root, record.get(key), Any, rest, text, (*at, key))}
    raise InputError(f"{'.'.join((*at, *keys))} is not known: {'.'.join(at)} is a single value")


def _value(annotation: Any, text: str, where: str) -> Any:
    if _kinds(annotation) != {str}:
        return _parse(text, where)
    # Names of files may be all digits, or hold what is a sign of YAML.
    try:
        value = _parse(text, where)
    except InputError:
        return text
    return value if isinstance(value, str) or value is None else text


# Values


def _refuse(problems: Iterator[str], where: str = "") -> None:
    found = list(problems)
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise InputError(where + "; ".join(found[:SHOWN]) + more)


def _problem(found: Any) -> tuple[str, str]:
    """Where a value is wrong, and the line that says so."""
    where, message = ".".join(map(str, found["loc"])), found["msg"].removeprefix("Value error, ")
    message = message.replace("valid tuple", "valid list").replace("Tuple", "List")
    if not where:
        return where, message
    if found["type"] == "missing":
        return where, f"{where} is not set: give it a value"
    if found["type"] == "model_type":
        message = "Input should be a section of its own, key: value"
    return where, f"{where}: {message}, got {_shown(found['input'])}"


def _plain(value: Any) -> Any:
    """The same with lists for tuples, as YAML has them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Single values and lists of them, by key; an empty section counts as nothing."""
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
