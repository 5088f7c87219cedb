"""Batches of problems: all features of one width side by side, cut into chunks.

A problem is one (group, vector) pair of one feature. A feature set maps names to ``[G, n, V, D]`` tensors.
Features of one width D are concatenated along V, so that the number of kernel launches does not depend on the
number of features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.dense_tensors import check_dense

__all__ = ["Bucket", "Chunk", "as_features", "buckets_by_width", "constant"]

Samples = Tensor | Mapping[str, Tensor]


@functools.lru_cache(maxsize=256)
def constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, copied there once: a captured CUDA graph must not copy them.

    The tensor is shared between calls and must not be changed.
    """
    with torch.inference_mode(False):  # also for later calls with gradients
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


@dataclass(frozen=True)
class Chunk:
    """Groups ``g0:g1`` and vectors ``v0:v1`` of a bucket."""

    g0: int
    g1: int
    v0: int
    v1: int

    @property
    def problems(self) -> int:
        return (self.g1 - self.g0) * (self.v1 - self.v0)


@dataclass(frozen=True)
class Bucket:
    """All features of one width. ``features`` are their positions in the call. Vectors are numbered across
    all of them.
    """

    features: list[int]
    generated: list[Tensor]
    positives: list[Tensor]
    negatives: list[Tensor] | None

    @property
    def device(self) -> torch.device:
        return self.generated[0].device

    @property
    def sets(self) -> list[list[Tensor]]:
        """y = generated, negatives (if any), positives."""
        return [self.generated, *([self.negatives] if self.negatives is not None else []), self.positives]

    @property
    def total_samples(self) -> int:
        """T, the number of samples y."""
        return sum(tensors[0].shape[1] for tensors in self.sets)

    @property
    def groups(self) -> int:
        return self.generated[0].shape[0]

    @property
    def width(self) -> int:
        return self.generated[0].shape[-1]

    @property
    def vectors(self) -> list[int]:
        return [t.shape[2] for t in self.generated]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``[G, N, all vectors, D]``, the shape of the concatenated generated features."""
        return (self.groups, self.generated[0].shape[1], sum(self.vectors), self.width)

    def feature_of_vector(self, device: torch.device) -> Tensor:
        """Position in the call of each vector's feature, ``[all vectors]``."""
        index = (f for f, v in zip(self.features, self.vectors, strict=True) for _ in range(v))
        return constant(tuple(index), torch.int64, device)

    def chunks(self, limit: int) -> Iterator[Chunk]:
        """Yield chunks of at most ``limit`` problems (at least one)."""
        vectors = sum(self.vectors)
        g_step = max(1, min(self.groups, limit))
        v_step = max(1, min(vectors, limit // g_step))
        for g in range(0, self.groups, g_step):
            for v in range(0, vectors, v_step):
                yield Chunk(g, min(g + g_step, self.groups), v, min(v + v_step, vectors))

    def samples(self, chunk: Chunk) -> Tensor:
        """y = [generated, negatives, positives] of the chunk, ``[g, v, T, D]``."""
        return torch.cat([_slice(s, chunk).transpose(1, 2) for s in self.sets], dim=2)


def _slice(tensors: Sequence[Tensor], chunk: Chunk) -> Tensor:
    """Concatenate the chunk's part of all features, ``[g, n, v, D]``, without slicing whole tensors."""
    parts, start = [], 0
    for tensor in tensors:
        a, b = max(chunk.v0 - start, 0), min(chunk.v1 - start, tensor.shape[2])
        start += tensor.shape[2]
        if a < b:
            whole = (a, b) == (0, tensor.shape[2]) and (chunk.g0, chunk.g1) == (0, tensor.shape[0])
            parts.append(tensor if whole else tensor[chunk.g0 : chunk.g1, :, a:b])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def buckets_by_width(
    generated: dict[str, Tensor], positives: dict[str, Tensor], negatives: dict[str, Tensor] | None
) -> list[Bucket]:
    """Return one bucket for each width, narrowest first. All processes must pass the features in the same
    order.
    """
    by_width: dict[int, Bucket] = {}
    for position, name in enumerate(generated):
        width = generated[name].shape[-1]
        bucket = by_width.setdefault(width, Bucket([], [], [], None if negatives is None else []))
        bucket.features.append(position)
        bucket.generated.append(generated[name])
        bucket.positives.append(positives[name])
        if negatives is not None and bucket.negatives is not None:
            bucket.negatives.append(negatives[name])
    return [by_width[width] for width in sorted(by_width)]


def as_features(
    generated: Samples, positives: Samples, negatives: Samples | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor] | None]:
    """Return the sample sets as feature sets of ``[G, n, V, D]`` tensors with sorted names.

    Raises ``InputError`` unless features, shapes and devices agree.
    """
    given = {"generated": generated, "positives": positives}
    if negatives is not None:
        given["negatives"] = negatives
    sets = {name: _as_feature_set(name, samples) for name, samples in given.items()}
    reference = sets["generated"]
    first = next(iter(reference.values()))
    groups, device = len(first), first.device
    for argument, features in sets.items():
        if isinstance(given[argument], Tensor) != isinstance(generated, Tensor):
            raise InputError(
                f"{argument} must have the same type as generated: both tensors, or both dicts of tensors"
            )
        if features.keys() != reference.keys():
            names = ", ".join(sorted(features.keys() ^ reference.keys())[:5])
            raise InputError(f"{argument} and generated do not have the same features: {names}")
        samples = next(iter(features.values())).shape[1]
        for name, tensor in features.items():
            expected = (groups, samples, *reference[name].shape[2:])
            if tensor.shape != expected or tensor.device != device:
                where = f"{argument}[{name!r}]" if name else argument
                raise _mismatch(where, tensor, expected, device)
    check_dense("generated", first)
    return reference, sets["positives"], sets.get("negatives")


def _mismatch(where: str, tensor: Tensor, expected: Sequence[int], device: torch.device) -> InputError:
    if tensor.device != device:
        return InputError(f"{where} is on {tensor.device}, but generated is on {device}")
    dimensions = zip(
        ("groups", "samples", "vectors per sample", "elements per vector (the width)"),
        tensor.shape, expected, strict=True,
    )  # fmt: skip
    what, got, want = next(each for each in dimensions if each[1] != each[2])
    return InputError(f"{where} has {got} {what}, expected {want} as in the other sets")


def _as_feature_set(argument: str, samples: Samples) -> dict[str, Tensor]:
    for tensor in (samples,) if isinstance(samples, Tensor) else _tensors(samples):
        check_dense(argument, tensor, meta=True)
    if isinstance(samples, Tensor):
        if samples.ndim not in (2, 3):
            raise InputError(
                f"{argument} must be a tensor [N, D] or [G, N, D], or a dict of tensors [G, N, V, D]; "
                f"got shape {list(samples.shape)}"
            )
        samples = {"": (samples if samples.ndim == 3 else samples.unsqueeze(0)).unsqueeze(2)}
    elif not isinstance(samples, Mapping) or not samples:
        raise InputError(
            f"{argument} must be a tensor or a non-empty dict of tensors, got {type(samples).__name__}"
        )
    for name, tensor in samples.items():
        valid = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.is_floating_point()
        if not valid or tensor.ndim != 4 or tensor.numel() == 0:
            raise _invalid_feature(f"{argument}[{name!r}]" if name else argument, name, tensor)
    return dict(sorted(samples.items())) if len(samples) > 1 else dict(samples)


def _tensors(samples: Any) -> list[Tensor]:
    return [t for t in samples.values() if isinstance(t, Tensor)] if isinstance(samples, Mapping) else []


def _invalid_feature(where: str, name: Any, tensor: Any) -> InputError:
    if not isinstance(name, str):
        return InputError(f"{where}: feature names must be strings")
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return InputError(f"{where} must be a floating-point tensor")
    if tensor.ndim != 4:
        return InputError(f"{where} must have shape [G, N, V, D], got {list(tensor.shape)}")
    return InputError(f"{where} is empty, shape {list(tensor.shape)}: every set needs at least one sample")
