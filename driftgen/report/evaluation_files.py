"""``driftgen eval``: run an evaluation with progress, print its table, write its JSON and figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from driftgen.errors import InputError
from driftgen.evaluation.encoders import Encoder
from driftgen.evaluation.image_sources import open_real
from driftgen.evaluation.real_images import run_data
from driftgen.evaluation.reference import compute_reference
from driftgen.evaluation.session import (
    DATA,
    choose_encoder,
    image_shape,
    is_images,
    open_reference,
    parse_guidance,
)
from driftgen.evaluation.sweep import RESULT, Evaluation, check_request, evaluate_images, evaluate_model
from driftgen.pipeline import DriftPipeline
from driftgen.support.distributed import Distributed
from driftgen.support.dtype_names import parse_dtype
from driftgen.support.folder_lock import hold_file, hold_folder
from driftgen.support.progress import track

__all__ = ["SAMPLES", "format_rows", "run_evaluation", "run_stats"]

SAMPLES = 50_000

HIDDEN = ("samples", "compared", "seconds")
NAMES = {"guidance": "alpha", "inception_score": "IS"}


def run_stats(
    source: str,
    target: Path,
    encoder_name: str | None,
    size: int | None,
    channels: int,
    device: str | None,
    *,
    fast: bool = False,
    force: bool = False,
) -> Path:
    """Compute and store reference statistics, and return their path."""
    if target.suffix != ".safetensors":
        raise InputError(f"{target}: the statistics need a name that ends with .safetensors")
    kind = gray_or_color(channels)
    processes = Distributed.start(device)
    with ExitStack() as stack:
        stack.callback(processes.close)
        encoder = choose_encoder(encoder_name, processes.device, force=force, fast=fast)
        stack.enter_context(hold_file(target, processes))
        images = open_real(source, size, kind)
        with track(f"{encoder.name} of {source}", images.count, "s", _console(processes)) as on_block:
            partial = target.with_suffix(".partial")
            reference = compute_reference(images, encoder, processes, partial=partial, on_block=on_block)
        images.close()
        if processes.is_main:
            reference.save(target)
            for file in target.parent.glob(f"{partial.name}-*"):
                file.unlink()
        processes.barrier()
    return target


def gray_or_color(channels: int) -> Literal[1, 3]:
    """Return the number of channels if images can have it."""
    if channels not in (1, 3):
        raise InputError(f"channels={channels}: 1 (gray) or 3 (color)")
    return 1 if channels == 1 else 3


def run_evaluation(
    source: str,
    data: str | None,
    encoder_name: str | None,
    out: Path | None,
    device: str | None,
    command: str,
    *,
    samples: int = SAMPLES,
    guidance: str | None = None,
    seed: int = 0,
    batch_size: int = 250,
    dtype: str = "as saved",
    size: int | None = None,
    channels: int = 3,
    fast: bool = False,
    force: bool = False,
    on_result: Callable[[DriftPipeline, dict[str, Any]], object] = lambda pipe, record: None,
) -> dict[str, Any]:
    """Evaluate a model or a set of images, print a table and return the record.

    ``source`` may begin with ``data:``, for images whose name a packaged model has too. ``data`` is by
    default that of the training run. ``size`` and ``channels`` are those of image files, which
    have no common size of their own. The main process calls ``on_result`` for a model.
    """
    alphas = parse_guidance(guidance)
    if is_images(source):
        given = {"--samples": samples != SAMPLES, "--guidance": bool(alphas), "--dtype": dtype != "as saved"}
        if any(given.values()):
            names = " and ".join(name for name, used in given.items() if used)
            raise InputError(f"{source} is images, not a model: leave out {names}")
    real = data or run_data(source)
    if real is None:
        raise InputError(
            "give --data: real images (folder, .npz, digits), or statistics of driftgen eval stats"
        )
    processes = Distributed.start(device)
    console = _console(processes)
    with ExitStack() as stack:
        stack.callback(processes.close)
        folder = out or Path("runs/eval") / (Path(source.removeprefix(DATA)).name or "model")
        stack.enter_context(hold_folder(folder, processes))
        encoder = choose_encoder(encoder_name, processes.device, force=force, fast=fast)
        pipe, images = None, None
        if is_images(source):
            images = open_real(source.removeprefix(DATA), size, gray_or_color(channels))
            shape, total = images.shape, images.count
        else:
            pipe = DriftPipeline.from_pretrained(
                source, device=processes.device, dtype=parse_dtype(dtype), batch_size=batch_size
            )
            check_request(pipe, samples, alphas, seed)
            shape, total = image_shape(pipe), samples

        def follow(title: str, count: int, metric: str) -> Any:
            return track(title, count // processes.world_size, metric, console)

        reference = open_reference(
            real, encoder, processes, shape=shape, out=folder, track=follow, force=force
        )
        rounds = max(1, len(alphas)) if pipe is not None else 1
        with track("evaluating", rounds * total // processes.world_size, "s", console) as on_step:
            progress = _Rounds(on_step, total // processes.world_size)
            evaluation = Evaluation(
                reference,
                encoder,
                processes,
                folder,
                command,
                force,
                progress,
                lambda text: console.print(f"warning: {text}", highlight=False),
            )
            if pipe is None:
                assert images is not None
                record = evaluate_images(images, evaluation)
                images.close()
            else:
                record = evaluate_model(
                    pipe, evaluation, samples=samples, guidance=alphas, seed=seed, model=source
                )
        if processes.is_main:
            _show(record, folder, encoder)
            if pipe is not None:
                on_result(pipe, record)
    return record


class _Rounds:
    """Joins the progress of one round per guidance into one bar."""

    def __init__(self, on_step: Any, total: int) -> None:
        self.on_step, self.total, self.finished, self.last = on_step, total, 0, 0
        self.spent = self.before = 0.0

    def __call__(self, done: int, seconds: float) -> None:
        if done <= self.last:  # the next round
            self.finished, self.before = self.finished + self.total, self.before + self.spent
        self.last, self.spent = done, seconds
        self.on_step(self.finished + done, self.before + seconds)


def format_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of a table of metrics."""
    keys = [k for k in dict.fromkeys(key for row in rows for key in row) if k not in HIDDEN]
    keys = [k for k in keys if not k.endswith("_std")]
    cells = []
    for row in rows:
        line = []
        for key in keys:
            value = row.get(key)
            line.append("" if value is None else _cell(key, float(value)))
        cells.append(line)
    return [NAMES.get(key, key) for key in keys], cells


def _cell(key: str, value: float) -> str:
    if key == "guidance":
        return f"{value:g}"
    if key.startswith(("KID", "KD-")):
        return f"{value:.5f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def _show(record: Mapping[str, Any], folder: Path, encoder: Encoder) -> None:
    rows = record["rows"]
    header, cells = format_rows(rows)
    count, real = rows[0]["samples"], record["reference"]["count"]
    table = Table(title=f"{count:,} images against {real:,} of {record['reference']['data']}, {encoder.name}")
    for name in header:
        table.add_column(name, justify="right")
    for line in cells:
        table.add_row(*line)
    Console(highlight=False).print(table)
    if len(rows) > 1:
        from driftgen.report.sweep_figure import draw_sweep

        draw_sweep(rows, encoder.distance, folder)
    print(folder / RESULT)


def _console(processes: Distributed) -> Console:
    return Console(stderr=True, quiet=not processes.is_main)
