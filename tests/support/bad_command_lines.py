"""Command lines with one odd value each: for every option of every command, from typer's own description.

Each command has a line that works and ends soon. A case changes one thing in it: the value of an option, an
argument, or a key of the recipe. ``python -m tests.support.bad_command_lines --seconds 60`` tries as many as
fit and prints the counts.
"""

import atexit
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer.main
from pydantic import BaseModel

from driftgen.cli import app
from driftgen.model_io import save_model
from driftgen.studio.onnxruntime_web import FILES
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.policy_config import PolicyConfig
from tests.support.artifacts import PIXEL
from tests.support.autoencoders import kl_network
from tests.support.fault_search import Counts, Fault, chosen, main, reproduction
from tests.support.fork_server import CAPTURE, run_code, start_driftgen
from tests.support.pipelines import small

PROMPT = 30  # seconds within which a loaded machine refuses an odd value; an idle one needs less than 10
SECONDS = 150  # of a loaded machine; the largest networks and compilation need 60 on an idle one

# Notes may precede an answer: what is read or downloaded, or a warning of a step.
ERROR, NOTES = "driftgen: error: ", ("warning", "note: ", "reading ")
HUGE = str(10**30)
NUMBERS = ["-1", "0", HUGE, "-" + HUGE, "1.5", "nan", "inf", "-inf", "1e300", "-1e300", "1e-300", "x", ""]
LONG = "a" * 5000
PATHS = ["", "missing", "folder", "text", "pipe", "/dev/null", "/dev/zero", "~nouser/x", LONG, "\n", "é"]
TEXTS = ["", " ", "x", "-", "\n", "0-99999999999", "{", "[1", "../..", "\udcff", "meta", LONG, *NUMBERS]
VALUES = [
    "null", "-1", "0", "1", HUGE, "1.5", ".nan", ".inf", "1e300", "-1e300", "1e-300", "true", "x", "''", "[]",
    "[1,1]", "{}", "{x: 1}", "[[1]]", "~nouser/x", "[.nan,.nan]", "a: b: c", "{", "&a [*a]",
]  # fmt: skip

BATCH = " ".join(
    f"--set batch.{key}" for key in ("classes=2", "generated=2", "positives=2", "unconditional=1")
)
ELSEWHERE = "192.0.2.1"  # no machine has this address: a server fails only once all its options are read
# Arguments of each command that works, in a folder of :func:`make_files`. Those of REFUSED get as far as the
# last check: what follows takes long, never ends, or needs a package that cannot be installed beside ours.
LINES = {
    name: None if line is None else line.split()
    for name, line in {
        "toy": "bimodal --steps 1 --samples 8 --positives 8 --out out",
        "demo": None,  # trains for seconds or minutes; its options are those of toy
        "doctor": "",
        "train": f"digits --set optim.steps=1 {BATCH} --device cpu --dry-run",
        "pretrain": "mae-digits --set optim.steps=1 --set batch_size=4 --device cpu --dry-run",
        "encode": "images.npz latents --tokenizer vae --size 8 --batch-size 2 --workers 0 --device cpu",
        "recipes": "",
        "sample": "digits --number 2 --out samples --device cpu",
        "export": "digits out.pt2 --format pt2",
        "page": "digits --out page --runtime runtime",
        "serve": f"digits --port 0 --device cpu --host {ELSEWHERE}",
        "report": "run",
        "explain": "collapse",
        "eval": "digits --data digits --encoder pixels --samples 70 --out eval --device cpu",
        "neighbors": "digits --data digits --samples 10 --out neighbors --device cpu",
        "ablate": "antisymmetry --list",
        "studio": f"--port 0 --device cpu --host {ELSEWHERE}",
        "convert official": "artifact converted",
        "convert to-official": "dit converted",
        "convert shards": "digits converted",
        "convert state": "run converted",
        "policy train": "two-ways --set optim.steps=1 --device cpu --dry-run",
        "policy eval": "pusht --episodes 1 --max-steps 2 --videos 0 --stills 0 --processes 1 --out out "
        "--device cpu",
        "policy rollout": "pusht --max-steps 2 --device cpu",
        "policy collect": "lift --episodes 1 --out out.hdf5",
        "policy spread": "policy-run --chunks 2 --out out --device cpu",
        "policy latency": "two-ways --batch 1 --repeats 1 --device cpu",
        "policy lerobot": "pusht --out out",
        "bench loss": "--groups 1 --generated 4 --positives 4 --negatives 0 --width 4 "
        "--repeats 1 --device cpu",
        "bench step": "--classes 1 --generated 2 --positives 2 --unconditional 1 --depth 1 --base 8 "
        "--repeats 1 --device cpu",
        "bench pretrain": "--recipe mae-digits --set batch_size=4 --repeats 1 --device cpu",
        "bench sampling": "--preset 32px --batch 1 --mode eager --repeats 1 --device cpu",
        "bench scaling": "--what nothing",
        "bench serve": "digits --seconds 1 --clients 1 --device cpu --json folder",
    }.items()
}
REFUSED = (
    "serve",
    "studio",
    "policy collect",
    "policy latency",
    "policy lerobot",
    "bench scaling",
    "bench serve",
)


@dataclass(frozen=True)
class Case:
    """A command line, and what is odd in it."""

    words: tuple[str, ...]
    odd: str


def make_files(folder: Path, words: Sequence[str] = ()) -> None:
    """Make the files that the lines name; of the runs and models only those that are among ``words``."""
    for name in MODELS & set(words):
        shutil.copytree(_model(name), folder / name)
    (folder / "folder").mkdir()
    (folder / "text").write_text("text", encoding="utf-8")
    os.mkfifo(folder / "pipe")
    (folder / "runtime").mkdir()
    for name in FILES:
        (folder / "runtime" / name).write_text("a file of onnxruntime-web", encoding="utf-8")
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(folder / "images.npz", images=pixels, labels=np.arange(4))


MODELS = {"run", "policy-run", "dit", "artifact", "vae"}


@cache
def _model(name: str) -> Path:
    """Make a run or a model once, and return its folder."""
    if name == "artifact":
        return PIXEL
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    if name == "vae":
        kl_network().save_pretrained(place / name)
    elif name == "dit":
        save_model(small(), place / name)
    else:
        line = {
            "run": LINES["train"][:-1],  # without --dry-run
            "policy-run": LINES["policy train"][:-1],
        }[name]
        command = {"run": "train", "policy-run": "policy train"}[name]
        child = start_driftgen(*command.split(), *line, "--out", place / name, stdout=CAPTURE, stderr=CAPTURE)
        _, errors = child.communicate(timeout=SECONDS)
        assert child.returncode == 0, errors
    return place / name


def commands() -> dict[str, Any]:
    """Return every command by its words."""

    def walk(group, names):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*names, name))
            else:
                yield " ".join((*names, name)), command

    return dict(walk(typer.main.get_command(app), ()))


def cases(limit: int | None = None, seed: int = 0) -> list[Case]:
    """Return all cases, or ``limit`` of them drawn with a seed."""
    found = [*_of_options(), *_of_recipes(), *_without_arguments()]
    return found if limit is None else random.Random(seed).sample(found, min(limit, len(found)))


def _without_arguments():
    found = commands()
    for name in ("convert", "policy", "bench", *found):
        # Some commands work for minutes without arguments.
        if name not in found or any(parameter.required for parameter in found[name].params):
            yield Case(tuple(name.split()), "nothing else")
        yield Case((*name.split(), "--no-such-option"), "an unknown option")


def _of_options():
    for name, command in commands().items():
        line = LINES[name]
        if line is None:
            continue
        position = 0
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            place, position = position, position + (not is_option)
            if parameter.name == "help" or getattr(parameter, "is_flag", False):
                continue
            for value in _values(command, parameter):
                if is_option:
                    words = (*name.split(), *line, parameter.opts[0], value)
                else:
                    words = (*name.split(), *line[:place], value, *line[place + 1 :])
                yield Case(words, f"{parameter.name}={value[:40]!r}")


def _values(command, parameter):
    kind = typing.get_type_hints(command.callback)[parameter.name]
    kinds = {kind, *typing.get_args(kind), *(a for k in typing.get_args(kind) for a in typing.get_args(k))}
    if kinds & {int, float}:
        return NUMBERS
    return PATHS if Path in kinds else TEXTS


def _of_recipes():
    for name, model in (("train", TrainConfig), ("pretrain", PretrainConfig), ("policy train", PolicyConfig)):
        for key in _keys(model):
            for value in VALUES:
                if key == "compile" and value == "1":  # right, and takes a minute
                    continue
                yield Case((*name.split(), *LINES[name], "--set", f"{key}={value}"), f"{name} {key}={value}")


def _keys(model, prefix=""):
    """Yield the keys of a configuration, with those of its sections."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")


class Answer(NamedTuple):
    """The answer to a command line.

    Attributes:
        problem: what is wrong with it, or None.
        refused: exit code 2. Odd values may also be right, and their command then does its work.
        seconds: until it ended.
    """

    problem: str | None
    refused: bool = False
    seconds: float = SECONDS


def try_line(words, folder):
    """Return the answer to a command line."""
    begin = time.perf_counter()
    ends = words[0] not in ("serve", "studio")
    (folder / "printed").touch()
    with (folder / "printed").open("w") as printed:
        child = start_driftgen(*words, cwd=folder, stdout=printed.fileno(), stderr=CAPTURE)
    try:
        if not ends:
            _interrupt_at_address(child, folder / "printed")
        _, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Answer(f"no answer within {SECONDS} s")
    finally:
        child.kill()
    refused, seconds = child.returncode == 2, time.perf_counter() - begin
    return Answer(find_problem(child.returncode, errors, seconds), refused, seconds)


def find_problem(code, errors, seconds):
    """Return what is wrong with an exit code and what was printed to stderr, or None."""
    lines = errors.splitlines()
    last = (lines or [""])[-1]
    if code not in (0, 2) or "Traceback" in errors:
        return f"exit code {code}: {last}"
    if code == 0:
        return None
    if not last.startswith(ERROR) or "error: ;" in last:
        return f"no message: {last}"
    if sum(not line.startswith(NOTES) for line in lines) > 1:
        return f"{len(lines)} lines, the first: {lines[0][:200]}"
    return f"refused after {seconds:.0f} s: {last}" if seconds > PROMPT else None


def _interrupt_at_address(child, printed):
    """Press Ctrl-C when a server prints its address: an odd value may be right, and it then runs for ever."""
    end = time.monotonic() + SECONDS
    while child.poll() is None and time.monotonic() < end:
        if "http://" in printed.read_text():
            child.send_signal(signal.SIGINT)
            return
        time.sleep(0.05)


def search(seed: int, only: str, seconds: float) -> Iterator[Counts]:
    """Try all command lines once, in an order drawn with the seed."""
    numbered = {f"case-{i}": case for i, case in enumerate(cases())}
    names = chosen(numbered, only)
    random.Random(seed).shuffle(names)
    run_code("pass")  # starts the server, which is no part of a case
    for name in names:
        case, counts = numbered[name], Counts(tried=1)
        folder = Path(tempfile.mkdtemp())
        make_files(folder, case.words)
        try:
            answer = try_line(case.words, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if answer.refused:
            counts.kinds["refused"] += 1
            counts.took(answer.seconds)
        if answer.problem is not None:
            text = f"{case.odd} in {' '.join(case.words)[:80]!r}: {answer.problem}"
            counts.faults.append(Fault(text, reproduction("tests.support.bad_command_lines", seed, name)))
        yield counts


if __name__ == "__main__":
    main(search)
