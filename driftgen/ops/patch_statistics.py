"""The vectors and statistics of a feature map as one operation on a GPU, forward and backward: its kernels,
and which maps they cover. PyTorch does the same for all others (``driftgen.features.pyramid``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import has_kernels, power_of_two
from driftgen.ops.launch import Launch

__all__ = ["LEAST_VARIANCE", "fused_patch_statistics", "supports_patch_statistics"]

LEAST_VARIANCE = 1e-6  # keeps the gradient of a standard deviation finite where a map is constant
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_SIDE = 64
WHOLE = 0  # stands for the whole map where sides of patches are listed
PATCHES = (2, 4, 8)
ARGUMENT = {side: 2 * i for i, side in enumerate((*PATCHES, WHOLE))}
CELL = 4  # side of the squares that a thread reads, if nothing larger is asked for
# Numbers of a tile: four for each of 128 threads, 16 bytes of float32. With more, the 16-bit maps and the
# float32 deviations would lie differently over the threads, and cross between them through shared memory.
TILE, ROWS, LEAST_CHANNELS = 512, 8, 32

Pairs = list[tuple[Tensor, Tensor]]


def supports_patch_statistics(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether the kernels do this map: dense channels-last, a 16- or 32-bit type, up to 64 locations a side,
    over the whole map and patches of 2x2, 4x4 and 8x8 that tile it, each once.
    """
    return (
        feature_map.dtype in TYPES
        and _has_kernels(feature_map.device)
        and feature_map.is_contiguous(memory_format=torch.channels_last)
        and feature_map.numel() > 0
        and _sides(feature_map, sizes) is not None
    )


def fused_patch_statistics(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Pairs]:
    """The vectors x of a map ``[B, C, H, W]`` as ``[B, H·W, C]``, a view, and for each size the mean
    m = Σ x / n and the standard deviation s = √(Σ (x − m)² / n + 1e-6) over patches, ``[B, V, C]`` each.

    Means have the type of the map, deviations are float32. One kernel reads the map, and one writes its
    gradient: that of its vectors plus Σ (∂m + ∂s (x − m) / s) / n over sizes.
    Requires :func:`supports_patch_statistics`.
    """
    sides = _sides(feature_map, sizes)
    if sides is None:
        raise ValueError(f"patches of {list(sizes)} are not covered for maps {list(feature_map.shape)}")
    if torch.compiler.is_compiling():
        # A compiler sees through views, and fuses the sum of the two gradients with what comes next.
        vectors, found = feature_map.flatten(2).mT, _operation(feature_map, sides)[1:]
    elif feature_map.requires_grad and torch.is_grad_enabled():
        vectors, *found = _MapStatistics.apply(feature_map, sides)  # type: ignore[no-untyped-call]
    else:
        vectors, found = _vectors(feature_map), _forward(feature_map, sides, keep=False)[1:]
    return vectors, list(zip(found[::2], found[1::2], strict=True))


def _has_kernels(device: torch.device) -> bool:
    return has_kernels(device)


# The compiler is to ask, not to look inside. ``torch.compiler.assume_constant_result`` says so too, but loads
# the whole compiler, and Triton with it, as soon as this module is imported.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sides(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> list[int] | None:
    """The side of the patches of each size; None where the kernels do not cover them."""
    channels, height, width = feature_map.shape[1:]
    if not sizes or max(height, width) > LARGEST_SIDE or channels * height * width >= 2**31:
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


class _MapStatistics(torch.autograd.Function):
    """Vectors, then mean and deviation for each side."""

    @staticmethod
    def forward(ctx: Any, feature_map: Tensor, sides: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        kept, *found = _forward(feature_map, sides)
        ctx.save_for_backward(feature_map, kept)
        ctx.sides = sides
        return _vectors(feature_map), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_vectors: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor, None]:
        feature_map, kept = ctx.saved_tensors
        if of_vectors is not None and all(g is None for g in gradients):
            h, w = feature_map.shape[2:]
            return of_vectors.unflatten(1, (h, w)).permute(0, 3, 1, 2), None
        return _backward(feature_map, kept, of_vectors, gradients, ctx.sides), None


def _vectors(feature_map: Tensor) -> Tensor:
    b, c, h, w = feature_map.shape
    return feature_map.as_strided((b, h * w, c), (h * w * c, c, 1))  # one operation, not two


def _forward(feature_map: Tensor, sides: Sequence[int], *, keep: bool = True) -> list[Tensor]:
    """What the backward pass needs of the whole map ``[B, 2, C]``, then mean and deviation for each side."""
    kept, *found = _empty(feature_map, sides)
    launch = _launches(feature_map.shape, max(sides), feature_map.device)[0]
    launch(feature_map, *_by_side(found, sides), kept if keep and WHOLE in sides else None)
    return [kept, *found]


def _backward(
    feature_map: Tensor,
    kept: Tensor,
    of_vectors: Tensor | None,
    gradients: Sequence[Tensor | None],
    sides: Sequence[int],
) -> Tensor:
    """The gradient of the map."""
    out = torch.empty_like(feature_map)
    dense = [None if g is None else g.contiguous() for g in (of_vectors, *_by_side(gradients, sides))]
    _launches(feature_map.shape, max(sides), feature_map.device)[1](feature_map, kept, *dense, out)
    return out


def _by_side(pairs: Sequence[Tensor | None], sides: Sequence[int]) -> list[Tensor | None]:
    """In the order of the kernels' arguments; None for what is not asked for."""
    found: list[Tensor | None] = [None] * (2 * len(PATCHES) + 2)
    for i, side in enumerate(sides):
        at = ARGUMENT[side]
        found[at : at + 2] = pairs[2 * i : 2 * i + 2]
    return found


def _empty(feature_map: Tensor, sides: Sequence[int]) -> list[Tensor]:
    """Memory for what :func:`_forward` gives."""
    b, c, h, w = feature_map.shape
    found = [feature_map.new_empty((b if WHOLE in sides else 0, 2, c), dtype=torch.float32)]
    for side in sides:
        shape = (b, 1 if side == WHOLE else h // side * (w // side), c)
        found += [feature_map.new_empty(shape), feature_map.new_empty(shape, dtype=torch.float32)]
    return found


@functools.lru_cache(maxsize=512)
def _launches(shape: torch.Size, largest: int, device: torch.device) -> tuple[Launch, Launch]:
    """Of the two kernels, for maps of this shape and patches up to this side."""
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


# The same for compilers, which do not look into it.


@torch.library.custom_op("driftgen::fused_patch_statistics", mutates_args=())
def _operation(feature_map: Tensor, sides: Sequence[int]) -> list[Tensor]:
    return _forward(feature_map.contiguous(memory_format=torch.channels_last), sides)


@torch.library.custom_op("driftgen::map_gradient", mutates_args=())
def _gradient_operation(
    feature_map: Tensor, kept: Tensor, gradients: Sequence[Tensor | None], sides: Sequence[int]
) -> Tensor:
    feature_map = feature_map.contiguous(memory_format=torch.channels_last)
    return _backward(feature_map, kept, None, gradients, sides)


@_operation.register_fake
def _(feature_map: Tensor, sides: Sequence[int]) -> list[Tensor]:
    return _empty(feature_map, sides)


@_gradient_operation.register_fake
def _(feature_map: Tensor, kept: Tensor, gradients: Sequence[Tensor | None], sides: Sequence[int]) -> Tensor:
    return torch.empty_like(feature_map, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[0])
    ctx.sides = inputs[1]


def _use(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor, None]:
    return _gradient_operation(*ctx.saved_tensors, gradients[1:], ctx.sides), None


_operation.register_autograd(_use, setup_context=_keep)
