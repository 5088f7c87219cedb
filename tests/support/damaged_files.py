"""Damaged and odd files: every loader answers with a result or with one line that names the file.

``python -m tests.support.damaged_files --seconds 60`` tries as many as fit and prints the counts.
"""

import argparse
import copy
import json
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from driftgen.errors import InputError
from tests.support.file_formats import FORMATS, SLOW_FORMATS, Format

SECONDS = 10  # for one file
GIBIBYTES = 2  # of address space beyond that of the process
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e9, 10**9, -(10**9), 1e308, 10**30, float("inf"), float("nan"), "", "x", "1",
    "../../x", "é\n", [], [1], [[]], {}, {"x": 1}, "a" * 5000, [None] * 3, "-1",
)  # fmt: skip


@dataclass
class Counts:
    """Results of the files tried; each fault is one line."""

    tried: int = 0
    refused: int = 0
    loaded: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.tried + other.tried,
            self.refused + other.refused,
            self.loaded + other.loaded,
            max(self.slowest, other.slowest),
            self.faults + other.faults,
        )

    def line(self) -> str:
        """Return the counts as one line."""
        return (
            f"{self.tried} tried, {self.refused} refused, {self.loaded} loaded, {len(self.faults)} faults, "
            f"slowest {self.slowest:.1f} s"
        )


class _HangError(BaseException):
    """A loader that takes too long."""


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
        what, content = changed or damage(file.read_bytes(), rng)
        file.write_bytes(content)
        label = f"{entry.name}, seed {number}, {file.name}: {what}"
        start = time.perf_counter()
        try:
            with _bounds():
                entry.load(place)
            counts.loaded += 1
        except InputError as error:
            counts.refused += 1
            if problem := _wrong_message(str(error), place, file):
                counts.faults.append(f"{label}: {problem}: {str(error)[:300]!r}")
        except (Exception, _HangError) as error:
            counts.faults.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
        counts.tried += 1
        counts.slowest = max(counts.slowest, time.perf_counter() - start)
        shutil.rmtree(place)
    return counts


def _wrong_message(message: str, place: Path, file: Path) -> str | None:
    if "\n" in message:
        return "more than one line"
    if str(place) not in message and file.name not in message:
        return "the file is not named"
    return None if len(message) < 1500 else f"{len(message)} characters"


@contextmanager
def _bounds() -> Iterator[None]:
    """Limit time and memory of a block."""

    def hang(*_: Any) -> None:
        raise _HangError(f"longer than {SECONDS} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, hang)
    resource.setrlimit(resource.RLIMIT_AS, (size + GIBIBYTES * 2**30, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, previous)


def main() -> None:
    """Try files of all formats in turn until the time is over; print the counts and every fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    end, total, by_name = time.monotonic() + options.seconds, Counts(), dict[str, Counts]()
    formats = [f for f in (*FORMATS, *(() if options.quick else SLOW_FORMATS)) if options.only in f.name]
    seed = options.seed
    while time.monotonic() < end:
        for entry in formats:
            with tempfile.TemporaryDirectory() as folder:
                counts = try_format(entry, seed, options.batch, Path(folder))
            by_name[entry.name] = by_name.get(entry.name, Counts()) + counts
            total += counts
            if time.monotonic() > end:
                break
        seed += options.batch
    for name, counts in by_name.items():
        print(f"{name:28s} {counts.line()}")
    for fault in total.faults:
        print(fault)
    print(total.line())


if __name__ == "__main__":
    main()
