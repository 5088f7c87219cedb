"""The files of a run that its report is made of, and the facts in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.report.curves import LARGEST
from driftgen.report.run_rows import read_rows
from driftgen.support.troubleshooting import TOPIC, paragraphs, topics
from driftgen.support.untrusted_files import parse_json, read_bytes
from driftgen.support.yaml_files import MAX_FILE, parse
from driftgen.training.run_folder import CONFIG, METRICS, SAMPLES

__all__ = ["RunFiles", "Warned", "format_value", "open_run", "read_run", "seconds_text"]

LARGEST_RESULT = 2**28  # bytes of an evaluation
EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Warned:
    """A warning of a run.

    Attributes:
        step: of its first row.
        kind: in a few words.
        problem: what is wrong.
        advice: what to do about it.
        more: the paragraphs of its section of the troubleshooting page, if the warning names one.
    """

    step: int
    kind: str
    problem: str
    advice: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFiles:
    """Contents of the files of a run. Missing and damaged files count as empty.

    Attributes:
        folder: of the run.
        header: first line of ``metrics.jsonl``.
        rows: the others, in the order of steps, see :func:`driftgen.report.run_rows.read_rows`.
        config_text: ``config.yaml``.
        config: its values.
        evaluation: ``evaluation.json``.
        sheets: step of each sheet in ``samples/``, and its path.
        notes: files and lines that were left out, one sentence each.
    """

    folder: Path
    header: dict[str, Any]
    rows: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    evaluation: dict[str, Any]
    sheets: dict[int, Path]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def pretrains(self) -> bool:
        """True for a masked autoencoder, False for a generator."""
        return "pretrain" in (self.header.get("task"), self.config.get("task"))

    @property
    def is_policy(self) -> bool:
        """True for a policy: its samples are chunks of actions."""
        return "policy" in (self.header.get("task"), self.config.get("task"))

    @property
    def step(self) -> int:
        """The last step with metrics; 0 if there is none."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def steps(self) -> int | None:
        """The last step of the configuration."""
        optim = self.config.get("optim")
        steps = optim.get("steps") if isinstance(optim, Mapping) else None
        return steps if isinstance(steps, int) else None

    def values(self, key: str) -> list[float]:
        """Return the finite numbers of a column of the metrics."""
        return [value for row in self.rows if (value := _finite(row.get(key))) is not None]

    def facts(self) -> dict[str, str]:
        """Return what the metrics say about the whole run, by name."""
        facts: dict[str, str] = {}
        if not self.rows:
            return facts
        steps = self.steps
        done = steps is None or self.step >= steps
        facts["steps"] = f"{self.step:,}" if done else f"{self.step:,} of {steps:,}"
        if isinstance(weights := self.header.get("weights"), str):
            facts["weights of the samples and of the saved model"] = weights
        if seconds := self.values("seconds"):
            facts["time"] = seconds_text(seconds[-1])
        if rates := sorted(self.values("samples_per_second")):
            facts["samples per second, median"] = f"{rates[len(rates) // 2]:,.0f}"
        if memory := self.values("memory_gib"):
            facts["peak memory"] = f"{max(memory):.2f} GiB"
        last = self.rows[-1]
        weights = "averaged" if "batch_spread" in last else "current"
        for key, text in (
            ("spread", f"spread of generated samples, {weights} weights (data: 1)"),
            ("diversity", f"within-class diversity, {weights} weights (data: 1)"),
            ("energy_score", "energy score of held-out chunks, averaged weights"),
            ("chunk_error", "error of held-out chunks, averaged weights"),
            ("chunk_spread", "distance between chunks of one observation, averaged weights"),
            ("reconstruction", "reconstruction error, averaged weights"),
            ("accuracy", "classifier accuracy, averaged weights"),
            ("skipped", "skipped steps"),
        ):
            if last.get(key) is not None:
                facts[text] = format_value(last[key])
        return facts | self._best_evaluation()

    def tiles(self) -> dict[str, str]:
        """Return the few facts that a reader looks for first."""
        facts, last = self.facts(), self.rows[-1] if self.rows else {}
        tiles: dict[str, str] = {key: facts[key] for key in ("steps", "time") if key in facts}
        for key in ("diversity", "spread", "energy_score", "chunk_error", "reconstruction", "accuracy"):
            if _finite(last.get(key)) is not None:
                of_data = " (data: 1)" if key in ("diversity", "spread") else ""
                tiles[key.replace("_", " ") + of_data] = f"{last[key]:.3g}"
        for name, value in self._best_evaluation().items():
            tiles[name] = value.partition(",")[0]
        return tiles

    def warnings(self) -> list[Warned]:
        """Return the warnings of the run, each text once."""
        first: dict[str, int] = {}
        for row in self.rows:
            texts = row.get("warnings")
            for text in texts if isinstance(texts, list) else []:
                first.setdefault(str(text), row["step"])
        return [_split_warning(step, text) for text, step in first.items()]

    def unreadable(self) -> tuple[int, list[str]]:
        """Return the number of images that could not be read and the names of some of them."""
        found = next((row["unreadable"] for row in reversed(self.rows) if row.get("unreadable")), None)
        names = found.get("names") if isinstance(found, Mapping) else None
        count = found.get("count") if isinstance(found, Mapping) else None
        listed = [str(name) for name in names] if isinstance(names, list) else []
        return max(count, len(listed)) if isinstance(count, int) else len(listed), listed

    def environment(self) -> dict[str, str]:
        """Return versions and hardware of the run, by name."""
        about = self.header.get("environment")
        return {str(k): str(v) for k, v in about.items()} if isinstance(about, Mapping) else {}

    def choices(self) -> list[str]:
        """Return one line for each automatic choice of the run: its size, networks and augmentation."""
        chosen = self.config.get("chosen")
        found = {str(k): str(v) for k, v in chosen.items()} if isinstance(chosen, Mapping) else {}
        size, reason = found.get("size"), found.get("reason of the size")
        shown = {
            "size": f"size {size} ({reason})",
            "generator": f"generator {found.get('generator')}",
            "encoder": f"encoder {found.get('encoder')}",
            "warning about the encoder": f"warning: {found.get('warning about the encoder')}",
            "augmentation": found.get("augmentation", ""),
        }
        return [line for name, line in shown.items() if name in found]

    def options(self) -> dict[str, str]:
        """Return the configuration as dotted keys and values, without the description of the recipe."""
        flat = dict(_flatten(self.config))
        return {k: v for k, v in flat.items() if k.split(".")[0] not in ("about", "expect", "chosen")}

    def _best_evaluation(self) -> dict[str, str]:
        """Return the lowest distance of the run, with its step and average."""
        found = []
        for row in self.rows:
            result: Any = row.get("evaluation")
            try:
                for decay, scores in result["ema"].items():
                    found.append((float(scores[result["metric"]]), row["step"], decay, result))
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
        if not found:
            return {}
        value, step, decay, result = min(found, key=lambda entry: entry[0])
        name = f"lowest {result['metric']} of {format_value(result.get('samples'))} samples"
        return {name: f"{format_value(value)}, EMA {decay} at step {step:,}"}


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run, as far as they are there and readable."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of a run, such as runs/digits")
    header, rows, skipped = read_rows(folder / METRICS)
    text = _text(folder / CONFIG, MAX_FILE)
    try:
        config = parse(text, str(folder / CONFIG))
    except InputError:
        config = None
    sheets = {}
    for path in (folder / SAMPLES).glob("step-*.png"):
        if match := re.fullmatch(r"step-(\d+)", path.stem):
            sheets[int(match[1])] = path
    evaluation = _json(folder / EVALUATION)
    notes = []
    if skipped:
        lines = "1 line is" if skipped == 1 else f"{skipped:,} lines are"
        notes.append(f"{lines} left out of {METRICS}: cut, or with values of another type.")
    for name, damaged in ((CONFIG, not isinstance(config, dict)), (EVALUATION, evaluation is None)):
        if damaged and os.path.lexists(folder / name):
            notes.append(f"{name} is left out: it cannot be read.")
    return RunFiles(
        folder,
        header,
        rows,
        text,
        config if isinstance(config, dict) else {},
        evaluation or {},
        dict(sorted(sheets.items())),
        tuple(notes),
    )


def open_run(folder: Path) -> RunFiles:
    """Read the files of a run that has something to report; raise if there is no run or no metrics."""
    run = read_run(folder)
    for name in (CONFIG, METRICS):
        if not (folder / name).is_file():
            raise InputError(f"{folder} holds no run: {name} is missing; give a folder such as runs/digits")
    if not run.config:
        raise InputError(f"{folder / CONFIG} cannot be read: restore it, or start the run again")
    if not run.rows and run.notes:
        raise InputError(f"{folder}: {run.notes[0].rstrip('.')}; no row is left")
    if not run.rows:
        output = run.config.get("output")
        every = output.get("metrics_every") if isinstance(output, Mapping) else None
        when = f"step {every}" if isinstance(every, int) else "its first steps"
        raise InputError(f"{folder} has no metrics yet: wait for {when}, then run the same command")
    return run


def format_value(value: Any) -> str:
    """Format a number with four digits, anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def seconds_text(seconds: float) -> str:
    """Format a duration, such as "3 min 20 s"."""
    minutes, s = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {s} s" if minutes else f"{s} s"


def _split_warning(step: int, text: str) -> Warned:
    """Split a warning of :class:`driftgen.training.health.Health`: "kind: problem; what to do (topic)"."""
    named = TOPIC.search(text)
    text = text if named is None else text[: named.start()]
    more = () if named is None or named[1] not in topics() else paragraphs(named[1])
    kind, colon, rest = text.partition(": ")
    if not colon:
        return Warned(step, "Warning", _sentence(text), "")
    problem, _, advice = rest.partition("; ")
    return Warned(step, kind[:1].upper() + kind[1:], _sentence(problem), _sentence(advice), more)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, _option_text(value)


def _option_text(value: Any) -> str:
    """Return a value of a configuration in the words of its YAML file."""
    if value is None:
        return "none"
    return json.dumps(value, default=str) if isinstance(value, bool | list | dict) else str(value)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else None  # false for NaN


def _text(path: Path, limit: int) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8", errors="replace")
    except (OSError, InputError):
        return ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        record = parse_json(_text(path, LARGEST_RESULT), finite=False)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
