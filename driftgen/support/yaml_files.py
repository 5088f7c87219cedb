"""YAML files of recipes and runs: plain data only, with the number syntax of YAML 1.2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from driftgen.errors import InputError
from driftgen.support.untrusted_files import read_bytes, reading

__all__ = ["MAX_FILE", "dump", "parse", "plain", "read_mapping", "read_text"]

# The rules of YAML 1.2. PyYAML follows YAML 1.1: 2e-4 is a string, yes a boolean, 12:30 the number 750.
FLOAT = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
# Tag, pattern, and the first characters of its values.
RULES = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), [*"-+0123456789"]),
    ("float", FLOAT, [*"-+0123456789."]),
    ("merge", re.compile(r"<<$"), ["<"]),
)
# libyaml reads ten times as fast as Python, but without a limit on nesting: 30,000 levels overflow the stack.
FAST_CHARACTERS = 8192
MAX_FILE = 2**20  # bytes: PyYAML reads about 300 kB per second, and recipes have 2 kB
# Values of a file with its aliases written out: a few hundred bytes of nested aliases stand for billions.
MAX_VALUES = 100_000


def read_text(path: Path) -> str:
    """Read a UTF-8 file."""
    with reading(path, "YAML", "restore it"):
        try:
            return read_bytes(path, MAX_FILE).decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text: save it as UTF-8") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    record = parse(read_text(path), str(path), name_line=True)
    if not isinstance(record, dict):
        raise InputError(f"{path} holds no configuration: write key: value lines, or copy a packaged recipe")
    return record


def parse(text: str, where: str, name_line: bool = False) -> Any:
    """Parse YAML text into plain data; tags that name Python objects are rejected."""
    try:
        if len(text) <= FAST_CHARACTERS:
            with suppress(Exception):  # which the other loader words
                return _load(_FastLoader, text)
        return _load(_Loader, text)
    except yaml.reader.ReaderError as error:
        line, reason = text.count("\n", 0, error.position), "a character that YAML does not allow"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, reason = (mark.line if mark else 0), " ".join(str(error.problem or error.context).split())
    except RecursionError:
        line, reason = 0, "values are nested too deeply"
    except Exception as error:  # a value that does not match its tag, by type of the tag
        line, reason = 0, " ".join(str(error).split())
    raise InputError(f"{where}{f', line {line + 1}' if name_line else ''}: {reason}")


def _load(loader_class: Any, text: str) -> Any:
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return plain(loader.construct_document(node))
    finally:
        loader.dispose()


def _count(node: Any, known: dict[int, int]) -> int:
    """Return the number of values of a node with its aliases written out; raise if there are too many."""
    if id(node) in known:
        if not known[id(node)]:
            raise yaml.constructor.ConstructorError(None, None, "a value contains itself", node.start_mark)
        return known[id(node)]
    known[id(node)] = 0  # until its values are counted
    size = 1
    if isinstance(node, yaml.MappingNode):
        size += sum(_count(key, known) + _count(value, known) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_count(value, known) for value in node.value)
    if size > MAX_VALUES:
        raise _too_many(node.start_mark)
    known[id(node)] = size
    return size


def _too_many(mark: Any) -> Exception:
    problem = f"more than {MAX_VALUES:,} values, aliases written out"
    return yaml.constructor.ConstructorError(None, None, problem, mark)  # type: ignore[no-any-return]


def dump(record: Mapping[str, Any]) -> str:
    """Return plain data as YAML that :func:`parse` reads back unchanged."""
    text: str = yaml.dump(
        record, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )
    return text


def plain(value: Any) -> Any:
    """Return the value with tuples as lists, as YAML represents them."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


class _Rules(yaml.constructor.SafeConstructor):  # type: ignore[misc]
    """Loads plain values with YAML 1.2 numbers and rejects duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {  # noqa: RUF012 (an attribute of PyYAML's)
        character: [
            (f"tag:yaml.org,2002:{tag}", pattern) for tag, pattern, first in RULES if character in first
        ]
        for character in {character for *_, first in RULES for character in first}
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is a duplicate key", key.start_mark
                    )
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Loader(_Rules, yaml.SafeLoader):  # type: ignore[misc]
    """Written in Python. Stops at the first value too many: all those of 1 MB would take twenty seconds."""

    composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.composed += 1
        if self.composed > MAX_VALUES:
            raise _too_many(self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _FastLoader(_Rules, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Uses libyaml where PyYAML was built with it."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes strings that the loader would read as numbers; writes lists of scalars on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: list[Any]) -> Any:
        flat = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


for _tag, _pattern, _first in RULES:
    for _class in (_Loader, _FastLoader):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))
_Dumper.add_representer(list, _Dumper.represent_list)
