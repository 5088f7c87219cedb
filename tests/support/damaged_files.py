"""Damaged and odd files: every loader answers with a result or with one line that names the file, and prints
nothing.

``python -m tests.support.damaged_files --seconds 60`` tries as many as fit and prints the counts.
"""

import copy
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from driftgen.errors import InputError
from tests.support.fault_search import Counts, Fault, HangError, bounds, chosen, listening, main, reproduction
from tests.support.file_formats import FORMATS, SLOW_FORMATS, Format

BATCH = 10  # cases of a format before the next one
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e9, 10**9, -(10**9), 1e308, 10**30, 10**400, float("inf"), float("nan"), "", "x",
    "1", "../../x", "é\n", [], [1], [[]], {}, {"x": 1}, "a" * 5000, [None] * 3, "-1",
)  # fmt: skip


def damage(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return a kind of damage and the damaged bytes."""
    data, n = bytearray(content), len(content)
    # Headers are small, and most of what a parser does depends on them.
    place = rng.randrange(min(n, 400) if rng.random() < 0.5 else n) if n else 0
    kind = rng.choice(["flip", "flip", "byte", "cut", "insert", "zeros", "swap", "repeat", "empty", "ones"])
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(min(n, 400) if rng.random() < 0.5 else n) if n else 0
            data[at : at + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in data[at : at + 1])
    elif kind == "byte":
        data[place : place + 1] = bytes([rng.randrange(256)])
    elif kind == "cut":
        del data[place:]
    elif kind == "insert":
        data[place:place] = rng.randbytes(rng.choice([1, 2, 7, 64]))
    elif kind in ("zeros", "ones"):
        length = min(rng.choice([1, 4, 8, 64]), n - place)
        data[place : place + length] = bytes([0 if kind == "zeros" else 255]) * length
    elif kind == "swap":
        size = rng.choice([4, 8, 64])
        other = rng.randrange(n) if n else 0
        a, b = bytes(data[place : place + size]), bytes(data[other : other + size])
        if abs(place - other) >= size and len(a) == len(b) == size:
            data[place : place + size], data[other : other + size] = b, a
    elif kind == "repeat":
        data[place:place] = data[place : place + 64]
    else:
        data.clear()
    return f"{kind} at {place}", bytes(data)


def leaves(record: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a record, containers included."""
    if path:
        yield path
    items = (
        record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    )
    for key, value in items:
        yield from leaves(value, (*path, key))


def odd_record(record: Any, rng: random.Random) -> tuple[str, Any]:
    """Return a record with one odd value, and a description."""
    changed = copy.deepcopy(record)
    path = rng.choice(list(leaves(changed)) or [()])
    if not path:
        return "empty", rng.choice(ODD)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.1:
        del parent[path[-1]]
        return f"{path} removed", changed
    value = rng.choice(ODD)
    parent[path[-1]] = value
    return f"{path} = {str(value)[:20]!r}", changed


def odd_text(path: Path, rng: random.Random) -> tuple[str, bytes] | None:
    """Return the file with one odd value; None if it is neither JSON nor YAML nor has a JSON header."""
    content = path.read_bytes()
    if path.suffix == ".json" or path.name in (
        ".zarray",
        ".zgroup",
        ".zattrs",
    ):
        what, record = odd_record(json.loads(content), rng)
        return what, json.dumps(record).encode()
    if path.suffix == ".yaml":
        what, record = odd_record(yaml.safe_load(content), rng)
        return what, yaml.safe_dump(record, allow_unicode=True).encode()
    if path.suffix == ".jsonl":
        lines = content.splitlines()
        number = rng.randrange(len(lines))
        what, record = odd_record(json.loads(lines[number]), rng)
        lines[number] = json.dumps(record).encode()
        return f"line {number}, {what}", b"\n".join(lines) + b"\n"
    if path.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        what, record = odd_record(json.loads(content[8 : 8 + length]), rng)
        header = json.dumps(record).encode()
        return what, len(header).to_bytes(8, "little") + header + content[8 + length :]
    return None


def try_format(entry: Format, seed: int, count: int, folder: Path, odd: float = 0.5) -> Counts:
    """Damage the files of a format ``count`` times; ``odd`` is the share of odd values instead of damage."""
    counts = Counts()
    valid = folder / "valid"
    valid.mkdir()
    entry.make(valid)
    entry.load(valid)  # what is damaged below works
    files = sorted(
        p.relative_to(valid) for pattern in entry.files for p in valid.glob(pattern) if p.is_file()
    )
    assert files, f"{entry.name}: nothing to damage"
    for number in range(seed, seed + count):
        rng = random.Random(f"{entry.name} {number}")
        # In a new place: libraries cache what they read by name.
        place = folder / f"case-{number}"
        shutil.copytree(valid, place)
        file = place / rng.choice(files)
        changed = odd_text(file, rng) if rng.random() < odd else None
        counts.kinds["damages" if changed is None else "odd values"] += 1
        what, content = changed or damage(file.read_bytes(), rng)
        file.write_bytes(content)
        again = reproduction("tests.support.damaged_files", number, entry.name)
        label = f"{entry.name}, seed {number}, {file.name}: {what}"
        start = time.perf_counter()
        said: list[str] = []
        try:
            with listening() as said, bounds():
                entry.load(place)
            counts.kinds["loaded"] += 1
        except InputError as error:
            counts.kinds["refused"] += 1
            if problem := _wrong_message(str(error), place, file):
                counts.faults.append(Fault(f"{label}: {problem}: {str(error)[:300]!r}", again))
        except (Exception, HangError) as error:
            text = f"{label}: {type(error).__name__}: {str(error)[:200]}"
            counts.faults.append(Fault(text, again))
        if said:
            counts.faults.append(Fault(f"{label}: prints {' '.join(said)[:300]!r}", again))
        counts.tried += 1
        counts.took(time.perf_counter() - start)
        shutil.rmtree(place)
    return counts


def _wrong_message(message: str, place: Path, file: Path) -> str | None:
    if "\n" in message:
        return "more than one line"
    if str(place) not in message and file.name not in message:
        return "the file is not named"
    return None if len(message) < 1500 else f"{len(message)} characters"


def search(seed: int, only: str, seconds: float) -> Iterator[Counts]:
    """Damage files of all formats in turn, with seeds from ``seed`` on."""
    formats = {entry.name: entry for entry in (*FORMATS, *SLOW_FORMATS)}
    names = chosen(formats, only)
    while True:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                yield try_format(formats[name], seed, BATCH, Path(folder))
        seed += BATCH


if __name__ == "__main__":
    main(search)
