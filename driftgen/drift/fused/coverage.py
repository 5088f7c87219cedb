"""Calls that the fused kernels support."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from driftgen.drift.batching import Bucket
from driftgen.drift.fused.shapes import KERNELS, BucketShape
from driftgen.drift.interfaces import Settings
from driftgen.drift.kernels import is_coarse
from driftgen.drift.normalization import both, over_y
from driftgen.ops.dispatch import has_kernels

__all__ = ["unsupported_reason"]

MAX_TEMPERATURES = 4
MAX_GENERATED, MAX_OTHERS = 1024, 4096  # as far as the kernels are tested
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Bounds of −log(A⁻A⁺): the kernels sum squares of drifts in float32, and float16 coefficients end at 6e-8.
MAX_EXPONENT = {torch.float32: 30.0, torch.bfloat16: 30.0, torch.float16: 8.0}


def unsupported_reason(settings: Settings, buckets: Sequence[Bucket]) -> str | None:
    """Return the reason why the kernels do not support a call, or None if they do.

    Supported are normalized features, all kernels of the library, both-axis and y normalization, up to four
    temperatures, up to 1,024 generated samples and 4,096 others in a group, and one 16- or 32-bit dtype for
    all samples of a width. Weights, factors, widths and the number of groups are free. Temperatures must not
    be too low for distances in float32: from 2e-4 for a Laplace kernel.

    Normalized drifts without the release's floor of affinities need a temperature at which they do not
    underflow. In units of the mean distance of T samples, the mean distance to P of them, the positives or
    the negatives, is at most T/P for some x, and k(T/P) must not be below e⁻³⁰ (e⁻⁸ for float16). The eager
    engine has no such bound.

    Not checked, because reading values would synchronize with the host: distances must lie between 1e-15 and
    1e15 (from 1e-5 without the floor). Without the floor, weights must not leave the positives, or the
    negatives, a much smaller share of the total weight than of the samples.
    """
    device = buckets[0].device
    if not has_kernels(device):
        return f"no kernels run on device {device}"
    for bucket in buckets:
        reason = _dtype_reason(bucket) or _shape_reason(settings, BucketShape.of(bucket))
        if reason is not None:
            return reason
    return None


def _dtype_reason(bucket: Bucket) -> str | None:
    dtypes = {tensor.dtype for tensors in bucket.sets for tensor in tensors}
    if len(dtypes) == 1 and dtypes <= DTYPES:
        return None
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if len(names) > 1:
        return f"features of width {bucket.width} mix the dtypes {' and '.join(names)}"
    return f"samples are {names[0]}, the kernels take float32, bfloat16 and float16"


@functools.lru_cache(maxsize=512)
def _shape_reason(settings: Settings, shape: BucketShape) -> str | None:
    generated, negatives, positives = shape.samples
    if not settings.normalize_features:
        return "normalize_features=False has no GPU kernel"
    if settings.kernel not in KERNELS:
        return f"kernel {_name(settings.kernel)!r} has no GPU kernel"
    if settings.normalization not in (both, over_y):
        return f"normalization {_name(settings.normalization)!r} has no GPU kernel"
    if is_coarse(settings.kernel, lowest := min(settings.temperatures)):
        return f"temperature {lowest:g} is too low for distances in float32"
    if (temperature := _underflowing_temperature(settings, shape)) is not None:
        return (
            f"drifts may underflow at temperature {temperature:g} with {positives} positives and "
            f"{generated - 1 + negatives} negatives for each of {generated} samples and no floor of "
            "affinities (the paper's convention, or another kernel or normalization than the release's)"
        )
    if len(settings.temperatures) > MAX_TEMPERATURES:
        return f"{len(settings.temperatures)} temperatures, the kernels take up to {MAX_TEMPERATURES}"
    if generated > MAX_GENERATED:
        return f"groups have {generated} generated samples, the kernels take up to {MAX_GENERATED}"
    if positives + negatives > MAX_OTHERS:
        others = f"{positives} positives and {negatives} negatives"
        return f"groups have {others}, the kernels take up to {MAX_OTHERS} of both"
    # Kernels index the samples of one group with 32-bit integers.
    if max(shape.samples) * max(shape.vectors) * shape.width >= 2**31:
        return "a feature has 2³¹ or more elements in a group"
    return None


def _underflowing_temperature(settings: Settings, shape: BucketShape) -> float | None:
    """Return the lowest temperature if normalized drifts may underflow there, else None."""
    if settings.guards.min_affinity > 0 or not settings.normalize_drift:
        return None
    lowest = min(settings.temperatures)
    generated, negatives, positives = shape.samples
    # A sample is no negative of itself. Without negatives, drifts are 0.
    smaller = min(positives, generated - 1 + negatives) or positives
    farthest = torch.tensor(sum(shape.samples) / smaller)
    return lowest if settings.kernel(farthest, lowest) < -MAX_EXPONENT[shape.dtype] else None


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
