"""Which calls the GPU kernels cover, and how a call becomes three launches for each width."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftgen.devices import has_kernels, on, power_of_two
from driftgen.kernels import gaussian, inverse_multiquadric, laplace
from driftgen.normalization import both, over_y
from driftgen.problems import Bucket
from driftgen.settings import Finished, Settings

__all__ = ["FusedEngine", "Shape", "block_of", "covers"]

KERNELS = (laplace, gaussian, inverse_multiquadric)  # in the order of their numbers
MOST_TEMPERATURES = 4
# The distances and coefficients of a problem stay in registers and shared memory.
MOST_GENERATED, MOST_OTHERS, MOST_PAIRS = 64, 128, 64 * 224
NARROW = 32  # up to this width differences cost less than tensor cores, which want 16 numbers at a time
# Numbers of a sample in a tile, warps, tiles under way, most registers; found by benchmarks/kernels.py.
BUILD: dict[str, dict[str, int | None]] = {
    "scale_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    "products_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    "gradient_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
}
DIRECT_TILE = 32  # numbers of a sample in a tile of float32: more would not fit beside A
FEW = 8  # up to so many generated samples rounding does not average out


def covers(settings: Settings, buckets: list[Bucket]) -> bool:
    """Whether the kernels do this call: one 16- or 32-bit type for all samples of a width, normalised
    features, any kernel of the library, both-axis or y normalisation, up to four temperatures, up to 64
    generated samples in a group and 128 + 32 others. Weights, conventions, factors, widths and the number of
    groups are free. Distances are to lie between 1e-15 and 1e15, which a look at the samples would have to
    wait for.
    """
    first = buckets[0].generated[0]
    if not has_kernels(first.device):
        return False
    sizes = [block_of(tensors[0].shape[1]) for tensors in buckets[0].sets]
    return (
        settings.normalize_features
        and settings.kernel in KERNELS
        and settings.normalization in (both, over_y)
        and len(settings.temperatures) <= MOST_TEMPERATURES
        and sizes[0] <= MOST_GENERATED
        and max(sizes) <= MOST_OTHERS
        and sizes[0] * sum(sizes) <= MOST_PAIRS
        and all(_within_32_bits(bucket) for bucket in buckets)
        and all(_one_type(bucket) for bucket in buckets)
    )


def _within_32_bits(bucket: Bucket) -> bool:
    """Whether 32-bit numbers can count within one group of each feature."""
    return all(tensor[0].numel() < 2**31 for tensors in bucket.sets for tensor in tensors)


def _one_type(bucket: Bucket) -> bool:
    found = {tensor.dtype for tensors in bucket.sets for tensor in tensors}
    return len(found) == 1 and found <= {torch.float32, torch.bfloat16, torch.float16}


def block_of(samples: int) -> int:
    """Rows of the tile that holds so many samples."""
    return max(16, power_of_two(samples))


@dataclass(frozen=True)
class Shape:
    """Of a bucket, all but the tensors."""

    features: tuple[int, ...]  # positions in the call
    vectors: tuple[int, ...]  # of each feature
    width: int
    groups: int
    samples: tuple[int, int, int]  # generated, negatives, positives
    dtype: torch.dtype

    @classmethod
    def of(cls, bucket: Bucket) -> Shape:
        negatives = 0 if bucket.negatives is None else bucket.negatives[0].shape[1]
        samples = bucket.generated[0].shape[1], negatives, bucket.positives[0].shape[1]
        dtype = bucket.generated[0].dtype
        return cls(tuple(bucket.features), tuple(bucket.vectors), bucket.width, bucket.groups, samples, dtype)

    @property
    def problems(self) -> int:
        return self.groups * sum(self.vectors)

    def table(self, sets: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
        """For each feature: where its generated samples, negatives, positives and gradients lie, counted in
        numbers from the very first sample, how many vectors it has and the number of the first, how many
        vectors a group of each set is apart from the next, and its position in the call.
        """
        origin, size = sets[0][0].data_ptr(), self.dtype.itemsize
        rows, first = [], 0
        for i, (vectors, position) in enumerate(zip(self.vectors, self.features, strict=True)):
            away = [(tensors[i].data_ptr() - origin) // size if tensors else 0 for tensors in sets]
            apart = [tensors[i].stride(0) // self.width if tensors else 0 for tensors in sets[:3]]
            rows.append((*away, vectors, first, *apart, position))
            first += vectors
        return _on_device(tuple(rows), device)

    def kept(self, temperatures: int) -> int:
        """Numbers that the products leave for the gradient of a problem; see ``driftgen.fused.kernels``."""
        bn, bm, bp = self.blocks
        return bn * (2 + 4 * temperatures) + (bm + bp) * (1 + temperatures)

    @property
    def left(self) -> int:
        """Numbers that the first pass leaves for the others; see ``driftgen.fused.distances``."""
        return 1 if self.direct else sum(self.blocks) + 4

    @functools.cached_property
    def blocks(self) -> tuple[int, int, int]:
        """Rows of the tiles that hold the three sets."""
        n, m, p = (block_of(max(n, 1)) for n in self.samples)
        return n, m, p

    @property
    def direct(self) -> bool:
        """Whether distances come from differences, not from products on tensor cores."""
        return self.dtype == torch.float32 or self.width <= NARROW or self.samples[0] <= FEW

    @functools.lru_cache(maxsize=512)  # noqa: B019 - shapes are small, and few
    def options(self, kernel: str) -> dict[str, Any]:
        """How a kernel is built for it."""
        import triton.language as tl

        types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        bn, bm, bp = self.blocks
        build = BUILD[kernel]
        many = bn * (bn + bm + bp) > 64 * 160
        if many or self.direct:
            build = build | {"num_warps": 16 if many and self.direct else 8, "num_stages": 2, "maxnreg": None}
        return build | {
            "WORK": tl.float32 if self.direct else types[self.dtype],
            "DIRECT": self.direct,
            "RAGGED": self.samples != self.blocks,
            "BN": bn,
            "BM": bm,
            "BP": bp,
            "BK": min(build["BK"] or 64, block_of(self.width), DIRECT_TILE if self.direct else 2**31),
        }


@dataclass(frozen=True)
class _Numbers:
    """Of a bucket, on its device: the feature that each vector belongs to, counted within the bucket
    (``owner``) and within the call (``feature``); the positions in the call of its features; and a 1 for each
    feature and vector of it.
    """

    owner: Tensor
    feature: Tensor
    positions: Tensor
    member: Tensor


@functools.lru_cache(maxsize=64)
def _numbers(shape: Shape, exact: torch.dtype, device: torch.device) -> _Numbers:
    """Kept from call to call: on a GPU, making them takes longer than a small loss."""
    positions, each = torch.tensor(shape.features), torch.tensor(shape.vectors)
    owner = torch.arange(len(each)).repeat_interleave(each)
    member = owner == torch.arange(len(each))[:, None]
    found = (t.to(device, non_blocking=True) for t in (owner, positions[owner], positions, member.to(exact)))
    return _Numbers(*found)


class _Launcher:
    """What all launches of a call share."""

    def __init__(self, settings: Settings, shapes: list[Shape], weight: Tensor | None, like: Bucket) -> None:
        self.settings, self.shapes, self.device, self.exact = settings, shapes, like.device, like.exact
        self.temperatures = _temperatures(settings.temperatures, self.device)
        self.weighted = weight is not None
        self.weight = self.temperatures if weight is None else weight.contiguous()

    def numbers(self, shape: Shape) -> _Numbers:
        return _numbers(shape, self.exact, self.device)

    def launch(
        self,
        kernel: Any,
        shape: Shape,
        origin: Tensor,
        table: Tensor,
        *arguments: Tensor,
        full: bool = True,
        before: Sequence[int] = (),
        **further: Any,
    ) -> None:
        s, owner = self.settings, self.numbers(shape).owner
        constants: dict[str, Any] = {"WEIGHTED": self.weighted, **shape.options(kernel.__name__)}
        numbers = [*before, sum(shape.vectors), *shape.samples, shape.width, s.guards.least_distance]
        if full:
            masked = math.isinf(s.guards.self_distance)
            numbers += [0.0 if masked else s.guards.self_distance, s.guards.least_affinity]
            numbers += [float(s.attraction), float(s.repulsion)]
            constants |= {
                "R": len(s.temperatures),
                "KERNEL": KERNELS.index(s.kernel),
                "BOTH": s.normalization is both,
                "MASKED": masked,
                "WEIGH_KERNEL": s.weigh_kernel and self.weighted,
            }
            constants |= further
        with on(self.device):
            kernel[(shape.problems,)](origin, table, owner, self.weight, *arguments, *numbers, **constants)


class FusedEngine:
    """The passes as launches of ``driftgen.fused.kernels``, one for each width and pass.

    Beyond inputs and gradients it holds R² + 1 numbers for each problem, the norms of its samples, and from
    the products to the gradient what both need of the rows and columns of A. The gradient is computed when it
    is asked for.
    """

    def __init__(
        self, settings: Settings, buckets: list[Bucket], weight: Tensor | None, gradient: bool
    ) -> None:
        self.gradient = gradient
        self.sets = [[[_ready(t) for t in tensors] for tensors in _three(bucket)] for bucket in buckets]
        self.exact, self.device = buckets[0].exact, buckets[0].device
        self.features = sum(len(bucket.features) for bucket in buckets)
        self.temperatures = len(settings.temperatures)
        self.shapes = [Shape.of(bucket) for bucket in buckets]
        self.launcher = _Launcher(settings, self.shapes, weight, buckets[0])
        pairs = zip(self.shapes, self.sets, strict=True)
        self.tables = [shape.table([*sets, []], self.device) for shape, sets in pairs]
        # Of each feature; see ``driftgen.fused.statistics``.
        self.numbers = torch.empty(self.features, 3 + 2 * self.temperatures, device=self.device)

    def scale_pass(self) -> list[Tensor]:
        """Σ w ‖x − y‖ of each problem, ``[problems]`` of each width."""
        from driftgen.fused.kernels import scale_kernel

        found = []
        self.left: list[Tensor] = []
        for shape, *place in self._places():
            found.append(torch.empty(shape.problems, device=self.device))
            left = torch.empty(shape.problems * shape.left, device=self.device)
            self.launcher.launch(scale_kernel, shape, *place, found[-1], left, full=False)
            self.left.append(left)
        return found

    def products_pass(self) -> list[Tensor]:
        """⟨V_τ, V_τ'⟩ for τ ≤ τ' of each problem, ``[problems, R, R]`` of each width."""
        from driftgen.fused.kernels import products_kernel

        found, r = [], self.temperatures
        self.kept: list[Tensor] = []
        for (shape, *place), left in zip(self._places(), self.left, strict=True):
            found.append(torch.empty(shape.problems, r, r, device=self.device))
            kept = torch.empty(shape.problems * shape.kept(r) if self.gradient else 1, device=self.device)
            arguments = self.numbers, self.launcher.temperatures, left, found[-1], kept
            self.launcher.launch(products_kernel, shape, *place, *arguments, KEEP=self.gradient)
            self.kept.append(kept)
        return found

    def finished(self, per_group: Tensor) -> Finished:
        """The result of the last pass, which is yet to come."""
        if not self.gradient:
            return Finished(per_group)
        saved = [tensor for sets in self.sets for tensors in sets for tensor in tensors]
        return Finished(per_group, _FusedGradient(self.launcher, self.numbers), saved + self.left + self.kept)

    def sum_distances(self) -> Tensor:
        sums = self.scale_pass()
        pairs = zip(self.shapes, sums, strict=True)
        found = [each.view(shape.groups, -1, 1).sum(0, dtype=self.exact) for shape, each in pairs]
        return self._by_feature(found)[:, 0]

    def sum_products(self, kernel_unit: Tensor, unit: Tensor) -> Tensor:
        self.numbers[:, 1], self.unit = kernel_unit, unit
        r = self.temperatures
        self.products: list[Tensor] = []
        for shape, products in zip(self.shapes, self.products_pass(), strict=True):
            products = products.triu() + products.triu(1).mT
            self.products.append(products.view(shape.groups, -1, r * r))
        sums = self._by_feature([p.sum(0, dtype=self.exact) for p in self.products])
        return sums.view(-1, r, r) / unit.square()[:, None, None]

    def finish(self, inverse_norm: Tensor, share: Tensor, factor: Tensor, size: Tensor) -> Finished:
        norms = (inverse_norm[:, :, None] * inverse_norm[:, None, :]).flatten(1)
        norms *= (share / self.unit.square())[:, None]
        per_group = torch.zeros(self.products[0].shape[0], dtype=self.exact, device=share.device)
        for shape, products in zip(self.shapes, self.products, strict=True):
            of_vector = norms[self.launcher.numbers(shape).feature]
            per_group += torch.einsum("gvr,vr->g", products.to(self.exact), of_vector)
        self.numbers[:, 2] = factor / self.unit
        self.numbers[:, 3 + self.temperatures :] = inverse_norm
        return self.finished(per_group)

    def _places(self) -> Iterator[tuple[Shape, Tensor, Tensor]]:
        for shape, sets, table in zip(self.shapes, self.sets, self.tables, strict=True):
            yield shape, sets[0][0], table

    def _by_feature(self, found: list[Tensor]) -> Tensor:
        """``[vectors, n]`` of each bucket, summed over the vectors of each feature: ``[features, n]``.

        A product, as ``index_add`` on a GPU adds in any order.
        """
        out = found[0].new_zeros(self.features, found[0].shape[1])
        for shape, values in zip(self.shapes, found, strict=True):
            numbers = self.launcher.numbers(shape)
            out[numbers.positions] = numbers.member @ values
        return out


@dataclass
class _FusedGradient:
    """The last pass, when the gradient is asked for: nothing of it has to be kept until then."""

    launcher: _Launcher
    numbers: Tensor

    def read(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        from driftgen.fused.kernels import gradient_kernel

        rest, gradients = list(saved), []
        upstream = upstream.float()
        shapes = self.launcher.shapes
        lefts, kepts = rest[-2 * len(shapes) : -len(shapes)], rest[-len(shapes) :]
        for shape, left, kept in zip(shapes, lefts, kepts, strict=True):
            sets = []
            for samples in shape.samples:
                count = len(shape.features) if samples else 0
                sets.append(rest[:count])
                del rest[:count]
            out = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in sets[0]]
            table = shape.table([*sets, out], upstream.device)
            arguments = self.numbers, self.launcher.temperatures, left, kept, upstream
            self.launcher.launch(
                gradient_kernel, shape, sets[0][0], table, *arguments, before=[upstream.stride(0)]
            )
            gradients += out
        return gradients


@functools.lru_cache(maxsize=256)
def _on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Kept, since memory is often given out in the same places again."""
    return torch.tensor(rows).to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def _temperatures(temperatures: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(temperatures).to(device, non_blocking=True)


def _three(bucket: Bucket) -> list[list[Tensor]]:
    return [bucket.generated, bucket.negatives or [], bucket.positives]


def _ready(tensor: Tensor) -> Tensor:
    """The samples of each group side by side, from an address that wide loads can begin at.

    Groups may lie apart, as those of positives and negatives that were encoded together do.
    """
    tensor = tensor.detach()
    vectors, width = tensor.shape[2:]
    wanted = zip(tensor.shape[1:], tensor.stride()[1:], (vectors * width, width, 1), strict=True)
    dense = all(size == 1 or stride == want for size, stride, want in wanted)
    if not dense or tensor.stride(0) % width:
        tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
