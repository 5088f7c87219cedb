"""Search the training images that are most similar to a model's samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from driftgen.data.images import RealData
from driftgen.errors import InputError
from driftgen.evaluation.encoders import Encoder
from driftgen.evaluation.neighbors import CosineNeighbors, NearCopies, near_copies
from driftgen.evaluation.real_images import load_bytes
from driftgen.evaluation.session import Track
from driftgen.pipeline import DriftPipeline
from driftgen.support.rng import derive_generator

__all__ = [
    "QUANTILE",
    "NeighborSearch",
    "check_search",
    "search_neighbors",
    "silent",
]

QUANTILE = 0.05
LEAST_HELDOUT = round(1 / QUANTILE)  # fewer images have no such quantile
HELDOUT_IMAGES = 1000  # used at most, unless there are more samples


@contextmanager
def silent(title: str, total: int, metric: str) -> Iterator[Callable[[int, float], None]]:
    """Show no progress."""
    yield lambda step, value: None


@dataclass(frozen=True)
class NeighborSearch:
    """Samples of a model and their nearest training images.

    Attributes:
        samples: uint8 ``[n, C, H, W]``.
        labels: class of each sample.
        similarities: ``[n, k]``, cosine similarities to the nearest training images, highest first.
        indices: ``[n, k]``, indices of these training images.
        heldout: ``[m]``, similarity of each held-out image to its nearest training image.
        leave_one_out: True if the held-out images are training images, each compared with all others.
        copies: share of near-copies.
        num_features: D, dimensions of a feature vector.
        seconds: duration of the search.
    """

    samples: Tensor
    labels: list[int]
    similarities: Tensor
    indices: Tensor
    heldout: Tensor
    leave_one_out: bool
    copies: NearCopies
    num_features: int
    seconds: float

    def closest(self, n: int) -> list[int]:
        """Return the n samples that are most similar to a training image, most similar first."""
        return self.similarities[:, 0].argsort(descending=True, stable=True)[:n].tolist()


def search_neighbors(
    pipe: DriftPipeline,
    data: RealData,
    encoder: Encoder,
    *,
    samples: int = 1000,
    nearest: int = 5,
    guidance: float | None = None,
    seed: int = 0,
    heldout: RealData | None = None,
    progress: Track = silent,
) -> NeighborSearch:
    """Sample a model and find the training images with the highest cosine similarity of features.

    The threshold for near-copies is a quantile of the similarities of held-out images, see
    :func:`~driftgen.evaluation.neighbors.near_copies`. Features of the training images are computed batch by
    batch and not stored. Batches have ``pipe.batch_size`` images.

    Args:
        pipe: the model; its classes are sampled in turn.
        data: training images, in the shape of the model's images.
        encoder: maps images to features.
        samples: number of samples.
        nearest: training images per sample.
        guidance: α; the model's default if None.
        seed: of the samples, and of the choice of held-out images if there are more than needed.
        heldout: real images that the model was not trained on. If None, training images take their place,
            each compared with all other training images.
        progress: shows a progress bar, see :func:`driftgen.support.progress.track`.
    """
    started = time.perf_counter()
    check_search(data, encoder, samples=samples, nearest=nearest, heldout=heldout)
    alpha = pipe.check(guidance=guidance, seed=seed, output="numpy")
    count, others = len(data.labels), data if heldout is None else heldout
    labels = pipe.labels(None, samples)
    with progress("samples", samples, "network calls per image") as on_step:
        images, features = _sample(pipe, labels, encoder, alpha, seed, on_step)
    chosen = _choose(len(others.labels), max(samples, HELDOUT_IMAGES), seed)
    with progress("held-out images", len(chosen), "features") as on_step:
        for done, batch in _batches(others, encoder, chosen, pipe.batch_size):
            features.append(batch)
            on_step(done, batch.shape[1])
    none = torch.full((samples,), -1)
    exclude = torch.cat([none, chosen if heldout is None else torch.full_like(chosen, -1)])
    search = CosineNeighbors(torch.cat(features), nearest, exclude)
    with progress("training images", count, "mean similarity") as on_step:
        for done, batch in _batches(data, encoder, torch.arange(count), pipe.batch_size):
            search.update(batch)
            on_step(done, float(search.similarities[:samples, 0].mean()))
    similarities, indices = search.similarities.cpu(), search.indices.cpu()
    best = similarities[:, 0]
    return NeighborSearch(
        samples=images,
        labels=labels,
        similarities=similarities[:samples],
        indices=indices[:samples],
        heldout=best[samples:],
        leave_one_out=heldout is None,
        copies=near_copies(best[:samples], best[samples:], QUANTILE),
        num_features=search.queries.shape[1],
        seconds=time.perf_counter() - started,
    )


def check_search(
    data: RealData, encoder: Encoder, *, samples: int, nearest: int, heldout: RealData | None
) -> None:
    """Raise if there are too few images, or if the encoder does not take them."""
    if nearest < 1 or samples < 1:
        raise InputError(f"samples={samples} and nearest={nearest} must be at least 1")
    count = len(data.labels)
    if count <= nearest:
        raise InputError(f"data hold {count} image(s): nearest={nearest} needs at least {nearest + 1}")
    kind, others = ("data", count) if heldout is None else ("held-out data", len(heldout.labels))
    if others < LEAST_HELDOUT:
        raise InputError(
            f"{kind} hold {others} image(s): the threshold for near-copies is their {1 - QUANTILE:.0%} "
            f"quantile, which needs at least {LEAST_HELDOUT}"
        )
    encoder(load_bytes(data, torch.arange(1)))


def _sample(
    pipe: DriftPipeline,
    labels: list[int],
    encoder: Encoder,
    alpha: float,
    seed: int,
    on_step: Callable[[int, float], None],
) -> tuple[Tensor, list[Tensor]]:
    images, features = [], []
    done, before = 0, pipe.evaluated
    for pixels in pipe.stream(labels, guidance=alpha, seed=seed, output="numpy"):
        batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        images.append(batch)
        features.append(encoder(batch))
        done += len(batch)
        on_step(done, (pipe.evaluated - before) / done)
    return torch.cat(images), features


def _choose(count: int, most: int, seed: int) -> Tensor:
    """Return the sorted indices of at most ``most`` of ``count`` images, chosen at random."""
    return torch.randperm(count, generator=derive_generator(seed, count))[:most].sort().values


def _batches(data: RealData, encoder: Encoder, indices: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    done = 0
    for batch in indices.split(size):
        done += len(batch)
        yield done, encoder(load_bytes(data, batch))
