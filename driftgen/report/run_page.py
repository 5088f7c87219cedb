"""``report.html`` of a run, built from the files in its folder."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from driftgen.errors import InputError
from driftgen.report.curves import draw_curves
from driftgen.report.page import write_page
from driftgen.training.metrics_file import read_metrics

__all__ = ["read_metrics", "write_report"]

STAGES = 6  # number of steps with samples
THUMBNAIL = 560  # maximum width of an intermediate image in pixels
MAX_WIDTH = 1600  # maximum width of the final image in pixels
STYLE = """<style>
.run table { table-layout: fixed; } .run td { overflow-wrap: anywhere; }
.run td:last-child { white-space: normal; width: 45%; }
.run .grid { display: grid; gap: 1rem;
             grid-template-columns: repeat(auto-fit, minmax(min(45%, 300px), 1fr)); }
.run .curves { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.run .grid figure { margin: 0; } .run figcaption { color: var(--soft); font-size: .9rem; margin-top: .3rem; }
.run .sheet { width: 100%; image-rendering: pixelated; } .run .large { max-width: 760px; }
.run pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f8fa; padding: .8rem;
           border-radius: 6px; font-size: .85rem; }
.run summary { cursor: pointer; } .run .warning { border-left: 4px solid var(--orange); padding-left: .8rem; }
</style>"""


def write_report(folder: Path, extra_html: str = "") -> Path:
    """Write ``report.html`` into the folder of a run and return its path.

    Sections without data (samples, evaluation, metrics) are left out. ``extra_html`` is inserted before the
    configuration.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of a run, such as runs/digits")
    header, rows = read_metrics(folder / "metrics.jsonl")
    evaluation = _parse_json(_text(folder / "evaluation.json"))
    stages = _stages(folder / "samples")
    parts = [
        _summary(header, rows),
        _warnings(rows),
        _unreadable(rows),
        _final(stages),
        _evaluation(evaluation),
        _evolution(stages),
        _curves(header, rows),
        extra_html,
        _configuration(_text(folder / "config.yaml")),
    ]
    body = f'{STYLE}<div class="run">' + "\n".join(p for p in parts if p) + "</div>"
    name = folder.resolve().name
    footer = f"Written by driftgen from the files in <code>{escape(name)}</code>. The page is self-contained."
    return write_page(folder / "report.html", f"Run {name}", body, [], footer)


def _summary(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>No steps have been recorded yet.</p>"
    last = rows[-1]
    facts = {"steps": f"{last['step']:,}"}
    if isinstance(header.get("weights"), str):
        facts["weights of the samples and of the saved model"] = header["weights"]
    if "seconds" in last:
        facts["time"] = _duration(last["seconds"])
    rates = sorted(r["samples_per_second"] for r in rows if r.get("samples_per_second"))
    if rates:
        facts["samples per second, median"] = f"{rates[len(rates) // 2]:,.0f}"
    if any(r.get("memory_gib") for r in rows):
        facts["peak memory"] = f"{max(r.get('memory_gib') or 0 for r in rows):.2f} GiB"
    weights = "averaged" if "batch_spread" in last else "current"
    names = {
        "spread": f"spread of generated samples, {weights} weights (data: 1)",
        "diversity": f"within-class diversity, {weights} weights (data: 1)",
        "reconstruction": "reconstruction error, averaged weights",
        "accuracy": "classifier accuracy, averaged weights",
        "skipped": "skipped steps",
    }
    facts |= {text: _figure(last[key]) for key, text in names.items() if last.get(key) is not None}
    facts |= _best_evaluation(rows)
    model = "a masked autoencoder" if header.get("task") == "pretrain" else "a one-step generator"
    return f"<p>Training of {model}.</p>{_table(facts)}"


def _best_evaluation(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the lowest distance of the run, with its step and average."""
    found = [
        (float(scores[result["metric"]]), row["step"], decay, result)
        for row in rows
        if isinstance(result := row.get("evaluation"), dict)
        for decay, scores in result["ema"].items()
    ]
    if not found:
        return {}
    value, step, decay, result = min(found, key=lambda entry: entry[0])
    name = f"lowest {result['metric']} of {result['samples']:,} samples"
    return {name: f"{_figure(value)}, EMA {decay} at step {step:,}"}


def _warnings(rows: Sequence[Mapping[str, Any]]) -> str:
    first_steps: dict[str, int] = {}
    for row in rows:
        for text in row.get("warnings") or []:
            first_steps.setdefault(str(text), row["step"])
    lines = "".join(f'<p class="warning">step {step:,}: {escape(t)}</p>' for t, step in first_steps.items())
    return f"<section><h2>Warnings</h2>{lines}</section>" if lines else ""


def _unreadable(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the images that could not be read, from the last row that names them."""
    found = next((row["unreadable"] for row in reversed(rows) if row.get("unreadable")), None)
    if not isinstance(found, dict):
        return ""
    names, count = [str(name) for name in found.get("names", [])], found.get("count", 0)
    more = f"<p>and {count - len(names):,} more</p>" if count > len(names) else ""
    text = "<p>They were left out, or replaced by another image of their class.</p>"
    lines = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f"<section><h2>Unreadable images: {count:,}</h2>{text}<ul>{lines}</ul>{more}</section>"


def _final(stages: Mapping[int, Path]) -> str:
    for step in sorted(stages, reverse=True):
        if picture := _inline_image(stages[step], MAX_WIDTH, f"samples at step {step}", "sheet large"):
            return f"<section><h2>Samples at step {step:,}</h2>{picture}</section>"
    return ""


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    figures = evaluation.get("figures")
    facts = {str(k): _figure(v) for k, v in figures.items()} if isinstance(figures, dict) else {}
    text = ""
    calls, time = evaluation.get("network_calls_per_image"), evaluation.get("milliseconds_per_image")
    if calls is not None:
        count = "One network call" if calls == 1 else f"{_figure(calls)} network calls"
        duration = "" if time is None else f", {_figure(time)} milliseconds"
        text = f"<p><b>{count} per image{duration}.</b></p>"
    for key in ("evaluator", "hardware", "note"):
        value = evaluation.get(key)
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items())
        if isinstance(value, str):
            text += f"<p>{key}: {escape(value)}</p>"
    return f"<section><h2>Evaluation</h2>{text}{_table(facts)}</section>" if facts or text else ""


def _evolution(stages: Mapping[int, Path]) -> str:
    steps = sorted(stages)
    if len(steps) < 2:
        return ""
    count = min(STAGES, len(steps))
    chosen = sorted({steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)})
    pictures = []
    for step in chosen:
        if picture := _inline_image(stages[step], THUMBNAIL, f"samples at step {step}", "sheet"):
            pictures.append(f"<figure>{picture}<figcaption>step {step:,}</figcaption></figure>")
    text = "<p>Samples from the same noise with the averaged weights (EMA), in the course of training.</p>"
    grid = f'<div class="grid">{"".join(pictures)}</div>'
    return f"<section><h2>Samples during training</h2>{text}{grid}</section>"


def _curves(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    figures = []
    for title, note, png in draw_curves(header, rows):
        image = f'<img alt="{escape(title)}" src="{_inline(png, "png")}">'
        caption = f"<b>{escape(title)}</b>{'. ' + escape(note) if note else ''}"
        figures.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return (
        f'<section><h2>Curves</h2><div class="grid curves">{"".join(figures)}</div></section>'
        if figures
        else ""
    )


def _configuration(text: str) -> str:
    if not text:
        return ""
    hidden = f"<details><summary>All values of this run</summary><pre>{escape(text)}</pre></details>"
    return f"<section><h2>Configuration</h2>{hidden}</section>"


def _stages(folder: Path) -> dict[int, Path]:
    paths = {}
    for path in folder.glob("step-*.png"):
        if match := re.fullmatch(r"step-(\d+)", path.stem):
            paths[int(match[1])] = path
    return paths


def _inline_image(path: Path, max_width: int, alt: str, kind: str) -> str:
    """Return an ``img`` tag with the image embedded, or an empty string if it cannot be read."""
    try:
        with Image.open(path) as image:
            image.load()
            picture = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # PIL raises these for damaged files
        return ""
    if picture.width > max_width:
        picture = picture.resize((max_width, max(1, round(picture.height * max_width / picture.width))))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f'<img class="{kind}" alt="{escape(alt)}" src="{_inline(buffer.getvalue(), "png")}">'


def _inline(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def _table(facts: Mapping[str, str]) -> str:
    lines = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts.items())
    return f"<table>{lines}</table>" if lines else ""


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {s} s" if minutes else f"{s} s"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parse_json(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
