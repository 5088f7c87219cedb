"""Vectors and patch statistics of a feature map, with one Triton kernel per direction.

``driftgen.features.pyramid`` computes the same in PyTorch for maps that the kernels do not take, see
:func:`supports_patch_statistics`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import DTYPES, has_kernels_constant, power_of_two
from driftgen.ops.launch import Launch

__all__ = ["LEAST_VARIANCE", "fused_patch_statistics", "supports_patch_statistics"]

LEAST_VARIANCE = 1e-6  # keeps the gradient of the standard deviation of a constant map finite
MAX_SIDE = 64
WHOLE = 0  # the whole map, in a list of patch sides
PATCHES = (2, 4, 8)
ARGUMENT = {side: 2 * i for i, side in enumerate((*PATCHES, WHOLE))}
CELL = 4  # side of the square that a thread reads, unless a patch is larger
# Elements of a tile: four per thread of 128, 16 bytes of float32. With more, 16-bit maps and float32
# deviations would have different layouts, and data would cross between threads through shared memory.
TILE, ROWS, LEAST_CHANNELS = 512, 8, 32

Pairs = list[tuple[Tensor, Tensor]]


def supports_patch_statistics(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> bool:
    """Return True if the kernels take this map and these patch sizes.

    The map must be dense in channels-last memory format, of a 16- or 32-bit dtype, with at most 64 locations
    a side. Patches are the whole map, 2x2, 4x4 and 8x8, must tile the map, and may occur once each.
    """
    return (
        feature_map.dtype in DTYPES
        and has_kernels_constant(feature_map.device)
        and feature_map.is_contiguous(memory_format=torch.channels_last)
        and feature_map.numel() > 0
        and _sides(feature_map, sizes) is not None
    )


def fused_patch_statistics(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Pairs]:
    """Return the vectors x of a map ``[B, C, H, W]`` as a view ``[B, H·W, C]`` and, for each size, the mean
    m = Σ x / n and the standard deviation s = √(Σ (x − m)² / n + 1e-6) over patches, ``[B, V, C]`` each.

    Means have the dtype of the map, deviations are float32. The gradient of the map is that of its vectors
    plus Σ (∂m + ∂s (x − m) / s) / n over sizes. Requires :func:`supports_patch_statistics`.
    """
    sides = _sides(feature_map, sizes)
    if sides is None:
        raise ValueError(f"the kernels do not take patches {list(sizes)} of a map {list(feature_map.shape)}")
    if torch.compiler.is_compiling():
        # A compiler traces the view, and fuses the sum of the two gradients with the next operation.
        vectors, statistics = feature_map.flatten(2).mT, _operation(feature_map, sides)[1:]
    elif feature_map.requires_grad and torch.is_grad_enabled():
        vectors, *statistics = _PatchStatistics.apply(feature_map, sides)  # type: ignore[no-untyped-call]
    else:
        vectors, statistics = _vectors(feature_map), _forward(feature_map, sides, for_backward=False)[1:]
    return vectors, list(zip(statistics[::2], statistics[1::2], strict=True))


def _sides(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the side of the patches of each size; None if the kernels do not take them."""
    channels, height, width = feature_map.shape[1:]
    if not sizes or max(height, width) > MAX_SIDE or channels * height * width >= 2**31:
        return None
    sides: list[int] = []
    for size in sizes:
        if size == (height, width) and WHOLE not in sides:
            sides.append(WHOLE)
            continue
        side = size[0]
        if size[1] != side or side not in PATCHES or height % side or width % side or side in sides:
            return None
        sides.append(side)
    return sides


class _PatchStatistics(torch.autograd.Function):
    """Return the vectors, then mean and deviation for each side."""

    @staticmethod
    def forward(ctx: Any, feature_map: Tensor, sides: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        whole, *statistics = _forward(feature_map, sides)
        ctx.save_for_backward(feature_map, whole)
        ctx.sides = sides
        return _vectors(feature_map), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_vectors: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor, None]:
        feature_map, whole = ctx.saved_tensors
        if grad_vectors is not None and all(g is None for g in gradients):
            h, w = feature_map.shape[2:]
            return grad_vectors.unflatten(1, (h, w)).permute(0, 3, 1, 2), None
        return _backward(feature_map, whole, grad_vectors, gradients, ctx.sides), None


def _vectors(feature_map: Tensor) -> Tensor:
    b, c, h, w = feature_map.shape
    return feature_map.as_strided((b, h * w, c), (h * w * c, c, 1))  # one operation instead of two


def _forward(feature_map: Tensor, sides: Sequence[int], *, for_backward: bool = True) -> list[Tensor]:
    """Return mean and 1 / (n · deviation) of the whole map ``[B, 2, C]``, which the backward pass reads, then
    mean and deviation for each side.
    """
    whole, *statistics = _empty(feature_map, sides)
    launch = _launches(feature_map.shape, max(sides), feature_map.device)[0]
    launch(feature_map, *_by_side(statistics, sides), whole if for_backward and WHOLE in sides else None)
    return [whole, *statistics]


def _backward(
    feature_map: Tensor,
    whole: Tensor,
    grad_vectors: Tensor | None,
    gradients: Sequence[Tensor | None],
    sides: Sequence[int],
) -> Tensor:
    """Return the gradient of the map."""
    out = torch.empty_like(feature_map)
    dense = [None if g is None else g.contiguous() for g in (grad_vectors, *_by_side(gradients, sides))]
    _launches(feature_map.shape, max(sides), feature_map.device)[1](feature_map, whole, *dense, out)
    return out


def _by_side(pairs: Sequence[Tensor | None], sides: Sequence[int]) -> list[Tensor | None]:
    """Sort tensors into the order of the kernels' arguments, with None for sides that are not listed."""
    arguments: list[Tensor | None] = [None] * (2 * len(PATCHES) + 2)
    for i, side in enumerate(sides):
        at = ARGUMENT[side]
        arguments[at : at + 2] = pairs[2 * i : 2 * i + 2]
    return arguments


def _empty(feature_map: Tensor, sides: Sequence[int]) -> list[Tensor]:
    """Allocate the outputs of :func:`_forward`."""
    b, c, h, w = feature_map.shape
    outputs = [feature_map.new_empty((b if WHOLE in sides else 0, 2, c), dtype=torch.float32)]
    for side in sides:
        shape = (b, 1 if side == WHOLE else h // side * (w // side), c)
        outputs += [feature_map.new_empty(shape), feature_map.new_empty(shape, dtype=torch.float32)]
    return outputs


@functools.lru_cache(maxsize=512)
def _launches(shape: torch.Size, largest: int, device: torch.device) -> tuple[Launch, Launch]:
    """Return the forward and backward launch for maps of this shape and patches up to this side."""
    from driftgen.ops.patch_statistics_triton import gradient_kernel, statistics_kernel

    samples, channels, height, width = shape
    cell = max(largest, *(p for p in (1, 2, CELL) if height % p == 0 and width % p == 0))
    cells = height // cell * (width // cell)
    block = min(TILE // min(power_of_two(cells), ROWS), power_of_two(channels))
    while block > LEAST_CHANNELS and channels % block:
        block //= 2
    rows = min(power_of_two(cells), TILE // block)
    sizes = {"H": height, "W": width, "C": channels, "CELL": cell, "BP": rows, "BC": block}
    options = {"LEAST": LEAST_VARIANCE, **sizes, "num_warps": max(1, rows * block // 128), "num_stages": 1}
    programs = samples * -(-channels // block)
    return (
        Launch(statistics_kernel, programs, device, **options),
        Launch(gradient_kernel, programs * -(-cells // rows), device, **options),
    )


# The same as custom operators, for torch.compile.


@torch.library.custom_op("driftgen::fused_patch_statistics", mutates_args=())
def _operation(feature_map: Tensor, sides: Sequence[int]) -> list[Tensor]:
    return _forward(feature_map.contiguous(memory_format=torch.channels_last), sides)


@torch.library.custom_op("driftgen::map_gradient", mutates_args=())
def _gradient_operation(
    feature_map: Tensor, whole: Tensor, gradients: Sequence[Tensor | None], sides: Sequence[int]
) -> Tensor:
    feature_map = feature_map.contiguous(memory_format=torch.channels_last)
    return _backward(feature_map, whole, None, gradients, sides)


@_operation.register_fake
def _(feature_map: Tensor, sides: Sequence[int]) -> list[Tensor]:
    return _empty(feature_map, sides)


@_gradient_operation.register_fake
def _(feature_map: Tensor, whole: Tensor, gradients: Sequence[Tensor | None], sides: Sequence[int]) -> Tensor:
    return torch.empty_like(feature_map, memory_format=torch.channels_last)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[0])
    ctx.sides = inputs[1]


def _operation_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor, None]:
    return _gradient_operation(*ctx.saved_tensors, gradients[1:], ctx.sides), None


_operation.register_autograd(_operation_backward, setup_context=_setup_context)
