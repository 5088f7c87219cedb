"""Changes of configuration values by ``key=value``, and unknown keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from driftgen.errors import InputError
from driftgen.support.yaml_files import parse

__all__ = ["change", "split_override", "unknown_keys"]


def split_override(override: str) -> tuple[list[str], str]:
    """Split ``optim.lr=2e-4`` into its keys and the text of its value."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        example = f"{key.strip()}=VALUE" if key.strip() else "optim.lr=2e-4"
        raise InputError(f"{override!r} is not an override: write key=value, such as {example}")
    return key.strip().split("."), text.strip()


def change(
    root: type[BaseModel], old: Any, annotation: Any, keys: Sequence[str], text: str, at: tuple[str, ...] = ()
) -> Any:
    """Return a copy of ``old`` with the value at ``keys`` replaced by that of ``text``."""
    if not keys:
        return _value(annotation, text, ".".join(at))
    key, rest = keys[0], keys[1:]
    section, kinds = _section(annotation), _kinds(annotation)
    if section is not None:
        if key not in section.model_fields:
            raise InputError(_not_known(root, section, at, key, rest), topic="unknown-name")
        record = dict(old) if isinstance(old, Mapping) else {}
        field = section.model_fields[key]
        inner = record.get(key, field.get_default(call_default_factory=True))
        return {**record, key: change(root, inner, field.annotation, rest, text, (*at, key))}
    if _item(annotation) is not None or (Any in kinds and isinstance(old, list)):
        items = list(old) if isinstance(old, list | tuple) else []
        if not key.isdecimal() or int(key) > len(items):
            name, valid = ".".join(at), f"0 to {len(items)}" if items else "0"
            raise InputError(f"{name}.{key} is not known: {name} has {len(items)} entries, choose {valid}")
        i = int(key)
        inner = items[i] if i < len(items) else None
        new = change(root, inner, _item(annotation) or Any, rest, text, (*at, key))
        return [*items[:i], new, *items[i + 1 :]]
    if dict in kinds or Any in kinds:
        record = dict(old) if isinstance(old, Mapping) else {}
        return {**record, key: change(root, record.get(key), Any, rest, text, (*at, key))}
    raise InputError(f"{'.'.join((*at, *keys))} is not known: {'.'.join(at)} is a single value")


def _value(annotation: Any, text: str, where: str) -> Any:
    if _kinds(annotation) != {str}:
        return parse(text, where)
    # A path may consist of digits or contain YAML syntax.
    try:
        value = parse(text, where)
    except InputError:
        return text
    return value if isinstance(value, str) or value is None else text


def unknown_keys(
    root: type[BaseModel], model: type[BaseModel], record: Mapping[Any, Any], at: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield one line for each key that the configuration does not have."""
    for key, value in record.items():
        field = model.model_fields.get(key)
        if field is None:
            yield _not_known(root, model, at, str(key))
            continue
        inside, item = _section(field.annotation), _section(_item(field.annotation))
        if inside is not None and isinstance(value, Mapping):
            yield from unknown_keys(root, inside, value, (*at, key))
        elif item is not None and isinstance(value, list):
            for i, part in enumerate(value):
                if isinstance(part, Mapping):
                    yield from unknown_keys(root, item, part, (*at, key, str(i)))


def _not_known(
    root: type[BaseModel], model: type[BaseModel], at: tuple[str, ...], key: str, rest: Sequence[str] = ()
) -> str:
    typed = ".".join((*at, key, *rest))
    elsewhere = [".".join(path) for path in _paths(root) if path[-1] == (key, *rest)[-1]]
    near = [".".join((*at, n, *rest)) for n in get_close_matches(key, model.model_fields, n=1)]
    # The same name in another section is a better guess than a similar name.
    for guess in (near + elsewhere) if rest else (elsewhere + near):
        return f"{typed} is not known: did you mean {guess}?"
    return f"{typed} is not known: choose from {', '.join('.'.join((*at, n)) for n in model.model_fields)}"


def _paths(model: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of the configuration; index 0 stands for all entries of a list."""
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
    """Return the type of a list's entries; None for other types."""
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that a value may have, without None."""
    if annotation is Any or get_origin(annotation) in (dict, tuple, Literal):
        return {get_origin(annotation) or Any}
    return {get_origin(a) or a for a in get_args(annotation) or (annotation,)} - {NoneType}
