"""Reference statistics of real images: computed once, stored with everything that determines them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import driftgen
from driftgen.errors import InputError
from driftgen.evaluation.accumulate import KEPT, accumulate
from driftgen.evaluation.encoders import TF32, Encoder
from driftgen.evaluation.frechet import Moments
from driftgen.evaluation.image_sources import ImageSource
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.checksum import tensors_checksum
from driftgen.support.distributed import Distributed
from driftgen.support.rng import derive_generator
from driftgen.support.untrusted_files import open_safetensors, parse_json

__all__ = ["Reference", "compute_reference", "load_reference"]

FORMAT = "driftgen reference statistics 1"


@dataclass(frozen=True)
class Reference:
    """Statistics of real images under one encoder.

    Attributes:
        moments: count, Σ f, Σ f fᵀ of all images.
        features: ``[k, D]`` of a random part, for KID, precision, recall, density and coverage.
        encoder: identity of the encoder.
        about: data, count, shape and checksum of the pixels.
    """

    moments: Moments
    features: Tensor
    encoder: Mapping[str, Any]
    about: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of the images."""
        c, h, w = self.about["shape"]
        return int(c), int(h), int(w)

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file whose header holds the identity."""
        place = Path(path)
        if place.suffix != ".safetensors":
            raise InputError(f"{place}: reference statistics are written as .safetensors")
        make_folder(place.parent)
        tensors = {
            "count": torch.tensor([self.moments.count]),
            "total": self.moments.total,
            "outer": self.moments.outer,
            "features": self.features,
        }
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        encoder, about = json.dumps(dict(self.encoder)), json.dumps(dict(self.about))
        header = {
            "format": FORMAT,
            "encoder": encoder,
            "about": about,
            "driftgen": driftgen.__version__,
            "checksum": tensors_checksum(sorted(tensors.items()), encoder, about),
        }
        with atomic_write(place) as scratch:
            save_file(tensors, scratch, header)
        return place

    def check(self, encoder: Encoder, *, force: bool = False) -> None:
        """Refuse statistics of another encoder, resize, dtype or weights, unless forced."""
        differences = [
            f"{key} is {self.encoder.get(key)!r} there and {encoder.identity.get(key)!r} here"
            for key in {**self.encoder, **encoder.identity}
            if self.encoder.get(key) != encoder.identity.get(key)
            # TF32 moves an FID by less than 0.001.
            and {self.encoder.get(key), encoder.identity.get(key)} != {"float32", TF32}
        ]
        if differences and not force:
            raise InputError(
                f"the reference statistics are of another evaluator: {'; '.join(differences)}; "
                "compute them again with driftgen eval stats, or use --force",
                topic="other-evaluator",
            )
        if self.features.shape[1] != len(self.moments.total):
            raise InputError("the reference statistics are damaged: compute them again")


def compute_reference(
    images: ImageSource,
    encoder: Encoder,
    processes: Distributed,
    *,
    partial: Path | None = None,
    on_block: Callable[[int, float], None] = lambda done, seconds: None,
) -> Reference:
    """Compute the statistics of real images; see :func:`~driftgen.evaluation.accumulate.accumulate`."""
    if images.count < 2:
        raise InputError(f"{images.about.get('data')} holds {images.count} images: at least 2 are needed")
    # A random part in random order, because data are often sorted by class.
    stored = torch.randperm(images.count, generator=derive_generator(images.count))[:KEPT]
    key = json.dumps([dict(encoder.identity), images.about], sort_keys=True)
    sums = accumulate(images, encoder, processes, stored=stored, partial=partial, key=key, on_block=on_block)
    assert sums.features is not None
    about = {**images.about, "checksum": sums.checksum}
    return Reference(sums.moments, sums.features, dict(encoder.identity), about)


def load_reference(path: str | Path, device: str | torch.device = "cpu") -> Reference:
    """Read statistics that :meth:`Reference.save` wrote."""
    place = Path(path)
    if not place.is_file():
        raise InputError(f"{place}: no such file; compute reference statistics with driftgen eval stats")
    advice = "write it again, driftgen eval stats"
    with open_safetensors(place, "reference statistics", advice, str(device)) as file:
        header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise InputError(f"{place} holds no reference statistics: write them with driftgen eval stats")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        count, total, outer, features = (tensors[n] for n in ("count", "total", "outer", "features"))
        width = features.shape[-1]
        if (total.shape, outer.shape, features.ndim) != ((width,), (width, width), 2) or int(count) < 2:
            raise ValueError("the shapes of its tensors do not fit together")
        if not all(bool(tensor.isfinite().all()) for tensor in (total, outer, features)):
            raise ValueError("not finite")
        texts = header["encoder"], header["about"]
        # Earlier versions wrote no checksum.
        if header.get("checksum") not in (None, tensors_checksum(sorted(tensors.items()), *texts)):
            raise ValueError("its checksum differs")
        encoder, about = map(parse_json, texts)
        if not isinstance(encoder, dict) or not isinstance(about, dict):
            raise ValueError("no description of encoder and data")
        return Reference(Moments(int(count), total, outer), features, encoder, about)
