"""Launches of the kernels for large groups, in place of one launch for each pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftgen.drift.fused.shapes import BucketShape, block_size
from driftgen.drift.fused.strip_plan import Strips, TiledGradient, plan_strips, processors
from driftgen.drift.fused.tile_sizes import Tile, find_strip_tiles, find_tile
from driftgen.ops.launch import Launch

__all__ = ["TiledPasses", "TiledProducts", "TiledScale", "plan_tiles"]

CENTER_TILE = 64  # coordinates that one program of center_kernel adds up
COLUMNS = 128  # other samples of a program of column_terms_kernel
PROGRAMS = 6  # programs of tiled_scale_kernel for each processor, if rows are few


@dataclass(frozen=True, eq=False)
class TiledScale:
    """The first pass: data of the samples, and sums of distances of each problem."""

    parts: int  # of each problem that distances are summed over
    launches: tuple[Launch, ...]  # the last one sums distances

    def __call__(self, *tensors: Tensor) -> None:
        """Write the sums of distances and the data of the samples. Takes the tensors of ``scale_kernel``."""
        origin, table, owner, weight, sums, sample_data = tensors
        *before, scale = self.launches
        for launch in before:
            launch(origin, table, owner, sample_data)
        partial = torch.empty(len(sums), self.parts, dtype=torch.float32, device=sums.device)
        scale(origin, table, owner, weight, sample_data, partial)
        torch.sum(partial, dim=1, out=sums)


@dataclass(frozen=True, eq=False)
class TiledProducts:
    """The second pass: softmax terms, and products of the drifts of each problem."""

    parts: int  # of each problem that products are summed over
    softmax: Launch
    column_terms: Launch | None  # if the softmax has one sweep
    column_sums: int  # of each problem, float32 elements
    last: Launch | Strips  # computes products

    def __call__(self, *tensors: Tensor) -> None:
        """Write the products and the softmax terms. Takes the tensors of ``products_kernel``."""
        *inputs, products, softmax_terms = tensors
        problems, r, _ = products.shape
        self._softmax(inputs, softmax_terms, problems)
        partial = torch.empty(problems, self.parts, r, r, dtype=torch.float32, device=products.device)
        if isinstance(self.last, Strips):
            origin, table, owner, _, _, _, sample_data = inputs
            read = [origin, table, owner, sample_data]
            self.last([*inputs, softmax_terms], read, [partial, softmax_terms])
        else:
            self.last(*inputs, partial, softmax_terms)
        torch.sum(partial, dim=1, out=products)

    def _softmax(self, inputs: list[Tensor], softmax_terms: Tensor, problems: int) -> None:
        if self.column_terms is None:
            self.softmax(*inputs, softmax_terms, None)
            return
        origin, table, owner, _, units, temperatures, sample_data = inputs
        sums = torch.empty(problems * self.column_sums, dtype=torch.float32, device=softmax_terms.device)
        self.softmax(*inputs, softmax_terms, sums)
        self.column_terms(origin, table, owner, units, temperatures, sample_data, sums, softmax_terms)

    def prepare(self, *dtypes: torch.dtype) -> None:
        """Compile the kernels in parallel, for the dtypes of the tensors of a call."""
        *inputs, products, softmax_terms = dtypes
        self.softmax.prepare(*inputs, softmax_terms, None if self.column_terms is None else torch.float32)
        if self.column_terms is not None:
            origin, table, owner, _, units, temperatures, sample_data = inputs
            read = [origin, table, owner, units, temperatures, sample_data]
            self.column_terms.prepare(*read, torch.float32, softmax_terms)
        if isinstance(self.last, Strips):
            origin, table, owner, _, _, _, sample_data = inputs
            read = [origin, table, owner, sample_data]
            self.last.prepare([*inputs, softmax_terms], read, [products, softmax_terms])
        else:
            self.last.prepare(*dtypes)


@dataclass(frozen=True, eq=False)
class TiledPasses:
    """The passes of one width, and the sizes of what they store, in float32 elements."""

    sample_norms: int  # with flags and centers
    softmax_terms: int
    scale: TiledScale
    products: TiledProducts
    gradients: tuple[Launch | TiledGradient, Launch | TiledGradient]

    def prepare(self, dtype: torch.dtype, needs_gradient: bool) -> None:
        """Compile the kernels in parallel, for the dtypes that the engine passes."""
        samples, values = (dtype, torch.int64, torch.int64), torch.float32
        *before, scale = self.scale.launches
        for launch in before:
            launch.prepare(*samples, values)
        scale.prepare(*samples, *[values] * 3)
        self.products.prepare(*samples, values, torch.float64, *[values] * 4)
        if needs_gradient:
            self.gradients[0].prepare(*samples, values, torch.float64, *[values] * 5)


def plan_tiles(
    shape: BucketShape, constants: Mapping[str, Any], min_distance: float, factors: list[float],
    device: torch.device,
) -> TiledPasses:  # fmt: skip
    """Plan the launches of a shape.

    ``constants`` and ``factors`` (self-distance, floor, attraction, repulsion) are those of the kernels for
    small groups.
    """
    from driftgen.drift.fused import strip_gradient_triton as strip_gradient
    from driftgen.drift.fused import strips_triton as strip
    from driftgen.drift.fused import tiled_drift_triton as drift
    from driftgen.drift.fused import tiled_gradient_triton as gradient
    from driftgen.drift.fused import tiled_softmax_triton as softmax
    from driftgen.drift.fused import tiles_triton as samples

    generated, total, r = shape.samples[0], sum(shape.samples), constants["R"]
    sizes = [shape.all_vectors, *shape.samples, shape.width]
    work = shape.work_type

    def options(tile: Tile, *names: str) -> dict[str, Any]:
        """Constants of a kernel; those of ``constants`` by name."""
        ragged = any(count % tile.columns for count in shape.samples)
        return tile.options() | {name: constants[name] for name in names} | {
            "WORK": work, "DIRECT": shape.direct, "RAGGED": ragged, "ONE": shape.width <= tile.inner,
            "DK": CENTER_TILE, "BN": tile.rows, "BM": tile.columns, "BK": tile.inner,
        }  # fmt: skip

    def launch(kernel: Any, programs: int, *arguments: float, **options: Any) -> Launch:
        return Launch(kernel, shape.problems * programs, device, *arguments, **options)

    def strips(
        name: str, kernels: tuple[Any, Any], matrices: int, values: int,
        arguments: tuple[list[float], list[float]], first: list[float], **constants: Any,
    ) -> tuple[Strips, int]:  # fmt: skip
        """Launches of the strips of a pass, and the number of partial results of a problem.

        ``arguments`` of both kernels follow the sizes, and ``first`` precedes the sizes of the second one.
        """
        drifts = matrices if name == "products" else 1
        writes, reads = find_strip_tiles(name, shape, drifts)
        strip_sizes = plan_strips(shape, reads, matrices, values, name == "products", device)
        numbers, parts = [strip_sizes.strips, *sizes], _divide(shape.width, reads.outer)
        own = {"WORK": work, "DIRECT": shape.direct, "R": r, "DK": CENTER_TILE}
        own |= {"BN": reads.rows, "BM": reads.columns, "BK": reads.inner, "BD": reads.outer}
        own["BK_NEG"] = min(reads.inner, block_size(shape.samples[1]))  # negatives are often few
        pair = (
            Launch(
                kernels[0], strip_sizes.slots * strip_sizes.columns, device, *numbers, min_distance,
                *arguments[0], **options(writes, "WEIGHTED", *softmaxes), **constants,
            ),
            Launch(
                kernels[1], strip_sizes.slots * parts, device, *first, *numbers, *arguments[1],
                **own, **reads.options(), **constants,
            ),
        )  # fmt: skip
        return Strips.of(shape, strip_sizes, *pair), _divide(generated, reads.rows) * parts

    softmaxes = ("R", "KERNEL", "BOTH", "MASKED", "WEIGHTED_SOFTMAX")
    before = []
    if not shape.direct:
        center, norms = find_tile("center", shape), find_tile("norms", shape)
        before.append(
            launch(
                samples.center_kernel, _divide(shape.width, CENTER_TILE), *sizes,
                B=center.rows, DK=CENTER_TILE, **center.options(),
            )
        )  # fmt: skip
        before.append(
            launch(
                samples.norms_kernel, _tiles(norms.rows, *shape.samples), *sizes,
                WORK=work, DK=CENTER_TILE, BN=norms.rows, BK=norms.inner, **norms.options(),
            )
        )  # fmt: skip
    tile = find_tile("scale", shape)
    row_tiles = _divide(generated, tile.rows)
    wanted = _divide(PROGRAMS * processors(device), shape.problems * row_tiles)
    splits = min(wanted, _tiles(tile.columns, *shape.samples))
    scale = launch(
        softmax.tiled_scale_kernel, row_tiles * splits, splits, *sizes, min_distance,
        **options(tile, "WEIGHTED"),
    )  # fmt: skip
    tile = find_tile("softmax", shape)
    others, row_tiles_of_softmax = total - generated, _divide(generated, tile.rows)
    one_sweep = tile.one_sweep and constants["BOTH"]
    own = shape.samples if constants["BOTH"] and not one_sweep else (generated,)
    softmax_launch = launch(
        softmax.softmax_kernel, _tiles(tile.rows, *own), *sizes, min_distance, factors[0],
        ONE_SWEEP=one_sweep, **options(tile, *softmaxes),
    )  # fmt: skip
    column_terms = None
    if one_sweep:
        column_terms = launch(
            softmax.column_terms_kernel, _divide(others, COLUMNS), *sizes, row_tiles_of_softmax,
            DIRECT=shape.direct, R=r, KERNEL=constants["KERNEL"], DK=CENTER_TILE, B=COLUMNS,
        )  # fmt: skip
    tile = find_tile("products", shape)
    last: Launch | Strips
    if tile.strips:
        kernels = strip.affinity_strips_kernel, strip.strip_products_kernel
        values = (3 if shape.direct else 2) * r
        last, parts = strips("products", kernels, r, values, (factors[:2], factors[2:]), [])
    else:
        parts = _divide(generated, tile.rows)
        last = launch(
            drift.tiled_products_kernel, parts, *sizes, min_distance, *factors,
            BD=block_size(shape.width), **options(tile, "WEIGHTED", *softmaxes),
        )  # fmt: skip
    tile = find_tile("gradient", shape)
    gradients: list[Launch | TiledGradient] = []
    for by_group in (0, 1):
        if tile.strips:
            kernels = strip_gradient.gradient_strips_kernel, strip_gradient.strip_gradient_kernel
            matrices, values = (1, 3) if shape.direct else (2, 1)
            both, _ = strips(
                "gradient", kernels, matrices, values, (factors, []), [by_group], MATRICES=matrices
            )
            gradients.append(TiledGradient(both))
        else:
            gradients.append(
                launch(
                    gradient.tiled_gradient_kernel, _divide(generated, tile.rows), by_group, *sizes,
                    min_distance, *factors,
                    BD=block_size(shape.width), **options(tile, "WEIGHTED", *softmaxes),
                )
            )  # fmt: skip
    data = total + 1 + 4 * _divide(shape.width, CENTER_TILE) + shape.width
    return TiledPasses(
        1 if shape.direct else shape.problems * (_divide(data, 4) * 4),
        shape.problems * (total + 3 * generated) * r,
        TiledScale(row_tiles * splits, (*before, scale)),
        TiledProducts(parts, softmax_launch, column_terms, row_tiles_of_softmax * (1 + r) * others, last),
        (gradients[0], gradients[1]),
    )


def _divide(count: int, size: int) -> int:
    return -(-count // size)


def _tiles(size: int, *counts: int) -> int:
    return sum(_divide(count, size) for count in counts)
