"""``driftgen eval``: metrics of a model over a range of guidance, with a record to repeat them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from driftgen.errors import InputError
from driftgen.evaluation.accumulate import accumulate
from driftgen.evaluation.encoders import Encoder
from driftgen.evaluation.image_sources import BLOCK, GeneratedImages, ImageSource, check_shapes
from driftgen.evaluation.metrics import compare, expected_bias, preload
from driftgen.evaluation.reference import Reference
from driftgen.generators.class_labels import MOST_IMAGES
from driftgen.pipeline import DriftPipeline
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.checksum import weights_checksum
from driftgen.support.distributed import Distributed
from driftgen.support.provenance import provenance
from driftgen.support.untrusted_files import read_json
from driftgen.support.whole_numbers import check_count

__all__ = [
    "RESULT",
    "Evaluation",
    "check_request",
    "evaluate_images",
    "evaluate_model",
]

RESULT = "evaluation.json"
COMPARED = "compared"  # the only value of a row that is no number
LARGEST = 2**63


@dataclass(frozen=True)
class Evaluation:
    """Reference, encoder and processes of an evaluation.

    Attributes:
        reference: statistics of the real images.
        encoder: of the generated images; must be that of the reference.
        processes: that share the work.
        out: folder of the result, and of the partial sums of an interrupted evaluation; None for none.
        command: for the record.
        force: accept a reference of another evaluator.
        on_block: called with images done by this process and seconds spent.
        note: called with a warning.
        quick: leave out KID, density and coverage.
    """

    reference: Reference
    encoder: Encoder
    processes: Distributed
    out: Path | None = None
    command: str = "driftgen.evaluation"
    force: bool = False
    on_block: Callable[[int, float], None] = lambda done, seconds: None
    note: Callable[[str], None] = lambda text: None
    quick: bool = False

    def score(self, images: ImageSource, key: str) -> dict[str, Any]:
        """Return the metrics of one set of images; an interrupted call with the same key is resumed."""
        check_shapes(images, self.reference.shape)
        if not self.quick:
            preload()
        started = time.monotonic()
        partial = None if self.out is None else self.out / f"partial-{_short(key)}"
        sums = accumulate(
            images, self.encoder, self.processes, partial=partial, key=key, on_block=self.on_block
        )
        row = compare(sums, self.reference, self.encoder, quick=self.quick)
        row["seconds"] = round(time.monotonic() - started, 2)
        if partial is not None:
            for file in partial.parent.glob(f"{partial.name}-{self.processes.rank}-of-*"):
                file.unlink()
        return row


def evaluate_model(
    pipe: DriftPipeline,
    evaluation: Evaluation,
    *,
    samples: int = 50_000,
    guidance: Sequence[float] = (),
    seed: int = 0,
    model: str = "",
) -> dict[str, Any]:
    """Evaluate a model at each guidance α and return the record, with one row per α in ``rows``.

    With ``evaluation.out`` the record is written to ``evaluation.json`` after every α, and α that are already
    there are not evaluated again.
    """
    check_request(pipe, samples, guidance, seed)
    alphas = list(dict.fromkeys(guidance)) or [pipe.guidance]
    facts = {"model": model, "weights": weights_checksum(pipe.generator), "seed": seed, "samples": samples}
    facts |= {"dtype": str(next(pipe.generator.parameters()).dtype).removeprefix("torch.")}
    record = _start(evaluation, facts, "guidance")
    done = {row["guidance"]: row for row in record["rows"]}
    _warn_of_few(samples, evaluation)
    rows = []
    for alpha in alphas:
        if alpha not in done:
            images = GeneratedImages(pipe, samples, alpha, seed)
            key = json.dumps([record["key"], alpha])
            done[alpha] = {"guidance": alpha} | evaluation.score(images, key)
            record["rows"] = [done[a] for a in sorted(done)]
            _write(record, evaluation)
        rows.append(done[alpha])
    return record | {"rows": rows}


def evaluate_images(images: ImageSource, evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate images that exist already, such as another program's samples."""
    record = _start(evaluation, {"images": dict(images.about)})
    _warn_of_few(images.count, evaluation)
    if not record["rows"]:
        record["rows"] = [evaluation.score(images, json.dumps(record["key"]))]
        _write(record, evaluation)
    return record


def check_request(pipe: DriftPipeline, samples: int, guidance: Sequence[float], seed: int) -> None:
    """Raise an InputError for wrong arguments, before anything is computed."""
    check_count("samples", samples, least=2, most=MOST_IMAGES)
    for alpha in guidance or [pipe.guidance]:
        pipe.check(guidance=alpha, seed=seed, output="numpy")


def _start(evaluation: Evaluation, facts: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the record so far: that of ``evaluation.out`` if it is of the same evaluation.

    ``required`` are values that every row has.
    """
    reference, encoder = evaluation.reference, evaluation.encoder
    reference.check(encoder, force=evaluation.force)
    identity = {
        **facts,
        "evaluator": dict(encoder.identity),
        "reference": dict(reference.about),
        "block": BLOCK,
    }
    key = _short(json.dumps(identity, sort_keys=True, default=str))
    record = {**provenance(evaluation.command), **_device(encoder.device), **identity, "key": key, "rows": []}
    if evaluation.out is None:
        return record
    make_folder(evaluation.out)
    record["rows"] = _stored_rows(evaluation.out / RESULT, key, required)
    return record


def _stored_rows(path: Path, key: str, required: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a file, none if there is none; raise if it is damaged or of another evaluation."""
    if not path.is_file():
        return []
    advice = "remove it or choose another --out"
    stored = read_json(path, "the result of an evaluation", advice, finite=False)
    if stored.get("key") != key:
        raise InputError(f"{path.parent} holds the result of another evaluation: choose another --out")
    rows = stored.get("rows")
    if not isinstance(rows, list):
        raise InputError(f"{path} is damaged, it has no rows: {advice}")
    for number, row in enumerate(rows, 1):
        known = isinstance(row, dict) and all(_is_number(v) for k, v in row.items() if k != COMPARED)
        if not known or not all(name in row for name in required):
            raise InputError(f"{path} is damaged, row {number} is no row of metrics: {advice}")
    return rows


def _is_number(value: Any) -> bool:
    """Return True for a float, also NaN and infinities, and for an integer that a float can hold."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    )


def _write(record: dict[str, Any], evaluation: Evaluation) -> None:
    if evaluation.out is None or not evaluation.processes.is_main:
        return
    with atomic_write(evaluation.out / RESULT) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _warn_of_few(samples: int, evaluation: Evaluation) -> None:
    """Warn if a covariance of so few samples is singular, with the bias that this causes."""
    dimensions = len(evaluation.reference.moments.total)
    if samples > dimensions:
        return
    bias = expected_bias(samples, evaluation.reference)
    known = "" if bias is None else f"; as many real images have {bias:.2f}"
    evaluation.note(
        f"{samples:,} samples are fewer than the {dimensions:,} feature dimensions: the "
        f"{evaluation.encoder.distance} is biased upward{known}; use --samples {10 * dimensions}"
    )


def _device(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
