"""A folder of samples: single images, a contact sheet, and a record of how they were sampled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from driftgen.errors import InputError
from driftgen.pipeline import DriftPipeline
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.folder_lock import hold_folder
from driftgen.support.image_files import open_image
from driftgen.support.sheets import RECORD, SHEET, Sheet, write_sheet
from driftgen.support.untrusted_files import check_regular, read_json, reading

__all__ = ["parse_labels", "write_latents", "write_samples"]

LATENTS = "latents.safetensors"
MOST_LABELS = 1_000_000  # in a range
ON_SHEET = 100  # maximum number of images on the sheet
LONGEST_NAME = 40  # characters of a class name in a file name


def parse_labels(text: str | None) -> list[int | str] | None:
    """Parse ``"3,5"``, ``"0-9"`` or ``"cat,dog"`` into a list of labels; None means all classes."""
    if text is None:
        return None
    labels: list[int | str] = []
    for word in (w.strip() for w in text.split(",")):
        if span := re.fullmatch(r"(\d+)-(\d+)", word):
            first, last = int(span[1]), int(span[2])
            if not 0 <= last - first < MOST_LABELS:
                raise InputError(f"labels={word}: a range has at least 1 and at most {MOST_LABELS:,} classes")
            labels += range(first, last + 1)
        else:
            labels.append(int(word) if re.fullmatch(r"-?\d+", word) else word)
    return labels


def write_samples(
    pipe: DriftPipeline,
    out: Path,
    labels: list[int],
    *,
    guidance: float,
    seed: int,
    about: dict[str, Any],
    on_step: Callable[[int, float], None] = lambda step, figure: None,
) -> Path:
    """Write ``00000_class3_cat.png``, ..., ``grid.png`` and ``samples.json``; return the path of the sheet.

    Names of classes are part of the file names and stand below the images of the sheet. A folder that holds
    some of the same samples is completed. A folder of other samples is an error.
    ``on_step`` receives the number of images written and the network calls per image.
    """
    record = {**about, "guidance": guidance, "seed": seed, "labels": labels}
    with hold_folder(out):
        return _write_samples(pipe, out, labels, record, on_step)


def _write_samples(
    pipe: DriftPipeline,
    out: Path,
    labels: list[int],
    record: dict[str, Any],
    on_step: Callable[[int, float], None],
) -> Path:
    guidance, seed = record["guidance"], record["seed"]
    _claim(out / RECORD, record)
    digits = max(5, len(str(len(labels) - 1)))
    paths = [_image_path(out, f"{i:0{digits}d}", label, pipe.class_names) for i, label in enumerate(labels)]
    done = next((i for i, path in enumerate(paths) if not path.is_file()), len(paths))
    before = pipe.evaluated
    skipped = done
    for images in pipe.stream(labels, guidance=guidance, seed=seed, skip=skipped):
        for image in images:
            with atomic_write(paths[done]) as scratch:
                image.save(scratch)
            done += 1
        on_step(done, (pipe.evaluated - before) / (done - skipped))
    shown = []
    for path in paths[:ON_SHEET]:
        advice = "remove it, and run the same command"
        with reading(path, "an image", advice), open_image(check_regular(path)) as image:
            shown.append(image.copy())
    names = pipe.class_names if pipe.class_names and len(pipe.class_names) > 1 else None
    captions = [names[label] for label in labels[:ON_SHEET]] if names else ()
    columns = math.ceil(math.sqrt(len(shown)))
    return write_sheet(out / SHEET, Sheet(shown, columns, captions=captions))


def write_latents(pipe: DriftPipeline, out: Path, labels: list[int], *, guidance: float, seed: int) -> Path:
    """Write the generator's output, without decoding, to ``latents.safetensors``."""
    make_folder(out)
    if (out / LATENTS).exists():
        raise InputError(f"{out / LATENTS} exists: choose another folder with --out")
    latents = pipe(labels, guidance=guidance, seed=seed, output="latent")
    with atomic_write(out / LATENTS) as scratch:
        save_file({"latents": latents, "labels": latents.new_tensor(labels).long()}, scratch)
    return out / LATENTS


def _image_path(folder: Path, number: str, label: int, class_names: Sequence[str] | None) -> Path:
    """Return the path of an image: its number, its class and the name of the class.

    A name that is the number of the class, as those of digits are, is left out.
    """
    plain = folder / f"{number}_class{label}.png"  # also the name in folders of earlier versions
    name = class_names[label] if class_names else ""
    safe = re.sub(r"[^\w.+-]+", "-", name).strip("-._")[:LONGEST_NAME].rstrip("-._")
    if not safe or name == str(label) or plain.is_file():
        return plain
    return folder / f"{number}_class{label}_{safe}.png"


def _claim(path: Path, record: dict[str, Any]) -> None:
    if path.is_file():
        try:
            existing = read_json(path, "the record of samples", finite=False)
        except InputError:
            existing = {}
        differing = [key for key in record if existing.get(key) != record[key]]
        if differing:
            raise InputError(
                f"{path.parent} holds other samples (another {', '.join(differing)}): choose another folder "
                "with --out"
            )
        return
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
