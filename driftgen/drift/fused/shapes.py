"""Shapes of buckets, and the build options of the kernels for them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from driftgen.drift.batching import Bucket
from driftgen.drift.kernels import gaussian, inverse_multiquadric, laplace
from driftgen.ops.dispatch import power_of_two

__all__ = ["BUILD", "KERNELS", "BucketShape", "block_size", "fits_one_program"]

KERNELS = (laplace, gaussian, inverse_multiquadric)  # in the order of their constants in affinities_triton
MAX_DIRECT_WIDTH = 32  # up to this width, differences are faster than tensor cores
MAX_DIRECT_GENERATED = 8  # up to this many generated samples, 16-bit rounding does not average out
# One program computes a whole problem if its distances and coefficients fit registers and shared memory.
MAX_GENERATED, MAX_OTHERS, MAX_PAIRS = 64, 128, 64 * 224
DIRECT_TILE = 32  # tile width in float32: more does not fit beside A
# Elements of a sample in a tile, warps, pipeline stages, maximum registers; found by benchmarks/tune.py.
BUILD: dict[str, dict[str, int | None]] = {
    "scale_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    "products_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    "gradient_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
}


def block_size(samples: int) -> int:
    """Rows of the tile that holds this many samples."""
    return max(16, power_of_two(samples))


def fits_one_program(shape: BucketShape) -> bool:
    """Return True if one program computes a whole problem, False if it is cut into tiles."""
    generated, *others = shape.samples
    blocks = [block_size(samples) for samples in shape.samples if samples]
    return generated <= MAX_GENERATED and max(others) <= MAX_OTHERS and blocks[0] * sum(blocks) <= MAX_PAIRS


@dataclass(frozen=True, eq=False)
class BucketShape:
    """Shape of a bucket. Equal shapes share one instance, compared by identity: a cheap cache key."""

    features: tuple[int, ...]  # positions in the call
    vectors: tuple[int, ...]  # of each feature
    width: int
    groups: int
    samples: tuple[int, int, int]  # generated, negatives, positives
    dtype: torch.dtype

    @classmethod
    def of(cls, bucket: Bucket) -> BucketShape:
        """Return the shape of a bucket."""
        negatives = 0 if bucket.negatives is None else bucket.negatives[0].shape[1]
        samples = bucket.generated[0].shape[1], negatives, bucket.positives[0].shape[1]
        dtype = bucket.generated[0].dtype
        features, vectors = tuple(bucket.features), tuple(bucket.vectors)
        return _bucket_shape(features, vectors, bucket.width, bucket.groups, samples, dtype)

    @functools.cached_property
    def all_vectors(self) -> int:
        return sum(self.vectors)

    @functools.cached_property
    def first_vectors(self) -> list[int]:
        """Index of each feature's first vector."""
        return [0, *itertools.accumulate(self.vectors)][:-1]

    @property
    def problems(self) -> int:
        return self.groups * self.all_vectors

    def softmax_terms_size(self, temperatures: int) -> int:
        """Elements that the second pass stores for the gradient of each problem; see ``passes_triton``."""
        bn, bm, bp = self.blocks
        return bn * (2 + 4 * temperatures) + (bm + bp) * (1 + temperatures)

    @functools.cached_property
    def sample_norms_size(self) -> int:
        """Elements that the first pass stores for each problem; see ``distances_triton``."""
        return 1 if self.direct else sum(self.blocks) + 4

    @functools.cached_property
    def blocks(self) -> tuple[int, int, int]:
        """Rows of the tiles that hold the three sets."""
        n, m, p = (block_size(max(samples, 1)) for samples in self.samples)
        return n, m, p

    @functools.cached_property
    def direct(self) -> bool:
        """True if distances are computed from differences, not from products on tensor cores."""
        return (
            self.dtype == torch.float32
            or self.width <= MAX_DIRECT_WIDTH
            or self.samples[0] <= MAX_DIRECT_GENERATED
        )

    @functools.cached_property
    def work_type(self) -> Any:
        """Triton's dtype of the operands of products."""
        import triton.language as tl

        dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        return tl.float32 if self.direct else dtypes[self.dtype]

    def build_options(self, kernel: str) -> dict[str, Any]:
        """Constants and compiler options of a kernel for this shape, if one program computes a problem."""
        bn, bm, bp = self.blocks
        build = BUILD[kernel]
        large = bn * (bn + bm + bp) > 64 * 160
        if large or self.direct:
            build = build | {
                "num_warps": 16 if large and self.direct else 8,
                "num_stages": 2,
                "maxnreg": None,
            }
        return build | {
            "WORK": self.work_type,
            "DIRECT": self.direct,
            "RAGGED": self.samples != self.blocks,
            "BN": bn,
            "BM": bm,
            "BP": bp,
            "BK": min(build["BK"] or 64, block_size(self.width), DIRECT_TILE if self.direct else 2**31),
        }


@functools.lru_cache(maxsize=512)
def _bucket_shape(
    features: tuple[int, ...],
    vectors: tuple[int, ...],
    width: int,
    groups: int,
    samples: tuple[int, int, int],
    dtype: torch.dtype,
) -> BucketShape:
    return BucketShape(features, vectors, width, groups, samples, dtype)
