"""Output files of ``driftgen neighbors``: the figure and the record of the search."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.data.images import RealData
from driftgen.errors import InputError
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.neighbor_search import (
    QUANTILE,
    NeighborSearch,
    check_search,
    search_neighbors,
    silent,
)
from driftgen.evaluation.real_images import (
    DIGITS,
    DIGITS_HELDOUT,
    load_bytes,
    open_in_shape,
    run_data,
)
from driftgen.evaluation.session import Track, image_shape
from driftgen.pipeline import DriftPipeline
from driftgen.report.neighbor_figure import NeighborRow, draw_neighbors
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.checksum import weights_checksum
from driftgen.support.distributed import Distributed
from driftgen.support.provenance import provenance
from driftgen.support.whole_numbers import check_count

__all__ = ["compare_with_training", "summary_rows", "threshold_text", "write_neighbors"]

MOST_ROWS, MOST_NEIGHBORS = 200, 50  # of a figure that can still be viewed


def compare_with_training(
    model: str,
    out: Path,
    command: str,
    *,
    data: str | None = None,
    heldout: str | None = None,
    resize: bool = False,
    encoder: str = "pixels",
    samples: int = 1000,
    guidance: float | None = None,
    seed: int = 0,
    show: int = 10,
    nearest: int = 5,
    tokenizer: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
    progress: Track = silent,
) -> tuple[NeighborSearch, list[Path]]:
    """Search the nearest training images of a model's samples, as ``driftgen neighbors`` does.

    Args:
        model: as in :meth:`driftgen.DriftPipeline.from_pretrained`.
        out: folder for the files of :func:`write_neighbors`.
        command: recorded in the result.
        data: training images, as in :func:`~driftgen.evaluation.real_images.open_in_shape`; those of
            the training run if None.
        heldout: real images that the model was not trained on. If None: the held-out digits for digits,
            otherwise training images, each compared with all others.
        resize: resize arrays to the model's images.
        encoder: as in :func:`~driftgen.evaluation.encoders.load_encoder`.
        samples: number of samples.
        guidance: α; the model's default if None.
        seed: of the samples.
        show: samples per block of the figure.
        nearest: training images per sample.
        tokenizer: replaces the tokenizer of a latent model.
        batch_size: images per batch.
        device: the best available one if None.
        progress: shows progress bars.

    Returns:
        The search and the paths of the files.
    """
    for option, value, most in (("show", show, MOST_ROWS), ("nearest", nearest, MOST_NEIGHBORS)):
        check_count(option, value, most=most)
    place = Distributed.start(device).device
    pipe = DriftPipeline.from_pretrained(model, device=place, tokenizer=tokenizer, batch_size=batch_size)
    alpha = pipe.check(guidance=guidance, seed=seed, output="numpy")
    source = data or run_data(model)
    if source is None:
        raise InputError(f"{model} does not name its training images: give them with --data")
    name = source if isinstance(source, str) else source.path or source.kind
    heldout = DIGITS_HELDOUT if heldout is None and name == DIGITS else heldout
    network, shape = load_encoder(encoder, place), image_shape(pipe)
    with ExitStack() as opened:
        training = open_in_shape(source, shape, resize=resize)
        opened.callback(training.close)
        other = None if heldout is None else open_in_shape(heldout, shape, resize=resize)
        if other is not None:
            opened.callback(other.close)
        check_search(training, network, samples=samples, nearest=nearest, heldout=other)
        make_folder(out)  # fails now rather than after the search
        search = search_neighbors(
            pipe,
            training,
            network,
            samples=samples,
            nearest=nearest,
            guidance=alpha,
            seed=seed,
            heldout=other,
            progress=progress,
        )
        about = provenance(command) | {
            "device": torch.cuda.get_device_name(place) if place.type == "cuda" else str(place),
            "model": model,
            "weights": weights_checksum(pipe.generator),
            "guidance": alpha,
            "seed": seed,
            "samples": samples,
            "nearest": nearest,
            "encoder": network.name,
            "encoder_identity": dict(network.identity),
            "features": search.num_features,
            "image_shape": list(shape),
            "data": name,
            "heldout": heldout,
        }
        return search, write_neighbors(search, training, pipe.class_names, out, show, about)


def write_neighbors(
    search: NeighborSearch,
    data: RealData,
    class_names: Sequence[str] | None,
    out: Path,
    show: int,
    about: dict[str, Any],
) -> list[Path]:
    """Write ``neighbors.png`` and ``neighbors.json`` to ``out``; return their paths.

    Args:
        search: the result to show.
        data: the training images that were searched.
        class_names: names of the model's classes, None if it has no names.
        out: the folder.
        show: samples per block of the figure: the first ones, and those closest to a training image.
        about: settings of the search, for the record. The title names ``model`` and ``encoder``.
    """
    make_folder(out)
    first, closest = list(range(min(show, len(search.samples)))), search.closest(show)
    title = f"{Path(about['model']).name or about['model']}: nearest training images"
    picture, record = out / "neighbors.png", out / "neighbors.json"
    names = class_names or (data.class_names if _same_classes(search, data) else None)
    blocks = {
        f"first {len(first)} samples": _rows(search, data, names, first),
        f"{len(closest)} samples closest to training images": _rows(search, data, names, closest),
    }
    copies = search.copies
    heldout = "training images against the others" if search.leave_one_out else "held-out images"
    note = (
        f"Cosine similarity of {about['encoder']} below each image. Near-copies "
        f"(above {copies.threshold:.3f}, in orange): {copies.share:.1%} of {len(search.samples):,} samples, "
        f"{copies.heldout_share:.1%} of {len(search.heldout):,} {heldout}."
    )
    draw_neighbors(blocks, picture, title, note, copies.threshold)
    text = json.dumps(about | _record(search, data, first, closest), indent=1, allow_nan=False)
    with atomic_write(record) as scratch:
        scratch.write_text(text + "\n", encoding="utf-8")
    return [picture, record]


def summary_rows(search: NeighborSearch) -> list[tuple[str, str, str]]:
    """Return the rows of a table: a quantity, its value for samples and for held-out images."""
    nearest, copies = search.similarities[:, 0], search.copies
    return [
        ("images", f"{len(nearest):,}", f"{len(search.heldout):,}"),
        ("mean similarity", f"{nearest.mean():.4f}", f"{search.heldout.mean():.4f}"),
        ("highest similarity", f"{nearest.max():.4f}", f"{search.heldout.max():.4f}"),
        ("near-copies", f"{copies.share:.1%}", f"{copies.heldout_share:.1%}"),
    ]


def threshold_text(search: NeighborSearch) -> str:
    """Return two sentences that define near-copies and held-out images."""
    origin = (
        "Held-out images are training images, each compared with all others: no --heldout was given."
        if search.leave_one_out
        else "Held-out images are not in the training data."
    )
    return (
        f"A near-copy is more similar to a training image than {1 - QUANTILE:.0%} of the held-out images are "
        f"(cosine above {search.copies.threshold:.4f}). {origin}"
    )


def _record(
    search: NeighborSearch, data: RealData, first: Sequence[int], closest: Sequence[int]
) -> dict[str, Any]:
    return {
        "training_images": len(data.labels),
        "unreadable_images": list(getattr(data, "unreadable", [])),
        "heldout_images": len(search.heldout),
        "leave_one_out": search.leave_one_out,
        "quantile": QUANTILE,
        "threshold": search.copies.threshold,
        "share": search.copies.share,
        "heldout_share": search.copies.heldout_share,
        "similarity": _statistics(search.similarities[:, 0]),
        "heldout_similarity": _statistics(search.heldout),
        "seconds": round(search.seconds, 2),
        "first": [_entry(search, data, i) for i in first],
        "closest": [_entry(search, data, i) for i in closest],
    }


def _entry(search: NeighborSearch, data: RealData, sample: int) -> dict[str, Any]:
    indices = search.indices[sample]
    return {
        "sample": sample,
        "label": search.labels[sample],
        "training_indices": indices.tolist(),
        "training_labels": data.labels[indices].tolist(),
        "similarities": search.similarities[sample].tolist(),
    }


def _statistics(similarities: Tensor) -> dict[str, float]:
    levels = similarities.new_tensor([0.0, 0.05, 0.5, 0.95, 1.0])
    names = ("lowest", "quantile_05", "median", "quantile_95", "highest")
    values = zip(names, similarities.quantile(levels).tolist(), strict=True)
    return {"mean": float(similarities.mean()), **dict(values)}


def _rows(
    search: NeighborSearch, data: RealData, names: Sequence[str] | None, samples: Sequence[int]
) -> list[NeighborRow]:
    several = len(data.class_names) > 1
    rows = []
    for i in samples:
        indices = search.indices[i]
        label = search.labels[i]
        rows.append(
            NeighborRow(
                sample=_picture(search.samples[i]),
                name="" if names is None else names[label],
                neighbors=[_picture(image) for image in load_bytes(data, indices)],
                similarities=search.similarities[i].tolist(),
                neighbor_names=[data.class_names[c] if several else "" for c in data.labels[indices]],
            )
        )
    return rows


def _same_classes(search: NeighborSearch, data: RealData) -> bool:
    return len(data.class_names) > max(1, *search.labels)


def _picture(image: Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = image.to(torch.uint8).permute(1, 2, 0).numpy()
    return array[..., 0] if array.shape[2] == 1 else array
