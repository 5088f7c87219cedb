"""How a call becomes three launches for each width."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftgen.fused.shapes import KERNELS, Numbers, Shape, numbers_of
from driftgen.launching import Launch
from driftgen.normalization import both
from driftgen.problems import Bucket
from driftgen.settings import Finished, Settings

__all__ = ["Call", "FusedEngine"]


@dataclass(frozen=True)
class Call:
    """What all launches of a call share."""

    settings: Settings
    shapes: list[Shape]
    weight: Tensor  # anything if not ``weighted``
    weighted: bool
    temperatures: Tensor
    exact: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, settings: Settings, shapes: list[Shape], weight: Tensor | None, like: Bucket) -> Call:
        temperatures = _temperatures(settings.temperatures, like.device)
        given = temperatures if weight is None else weight.contiguous()
        return cls(settings, shapes, given, weight is not None, temperatures, like.exact, like.device)

    def key(self, shape: Shape) -> tuple[Settings, Shape, bool, torch.device]:
        """What decides how a kernel is launched."""
        return self.settings, shape, self.weighted, self.device

    def numbers(self, shape: Shape) -> Numbers:
        return numbers_of(shape, self.exact, self.device)


@functools.lru_cache(maxsize=512)
def _scale_launch(settings: Settings, shape: Shape, weighted: bool, device: torch.device) -> Launch:
    from driftgen.fused.kernels import scale_kernel

    options = shape.options("scale_kernel")
    return Launch(
        scale_kernel, shape.problems, device, *_sizes(settings, shape), WEIGHTED=weighted, **options
    )


@functools.lru_cache(maxsize=512)
def _products_launch(
    settings: Settings, shape: Shape, weighted: bool, device: torch.device, keep: bool
) -> Launch:
    from driftgen.fused.kernels import products_kernel

    numbers = [*_sizes(settings, shape), *_factors(settings)]
    constants = _constants(settings, weighted) | shape.options("products_kernel")
    return Launch(products_kernel, shape.problems, device, *numbers, KEEP=keep, **constants)


@functools.lru_cache(maxsize=512)
def _gradient_launch(
    settings: Settings, shape: Shape, weighted: bool, device: torch.device, by_group: int
) -> Launch:
    from driftgen.fused.kernels import gradient_kernel

    numbers = [by_group, *_sizes(settings, shape), *_factors(settings)]
    constants = _constants(settings, weighted) | shape.options("gradient_kernel")
    return Launch(gradient_kernel, shape.problems, device, *numbers, **constants)


def _sizes(settings: Settings, shape: Shape) -> list[float]:
    return [shape.all_vectors, *shape.samples, shape.width, settings.guards.least_distance]


def _factors(s: Settings) -> list[float]:
    own = 0.0 if math.isinf(s.guards.self_distance) else s.guards.self_distance
    return [own, s.guards.least_affinity, float(s.attraction), float(s.repulsion)]


def _constants(s: Settings, weighted: bool) -> dict[str, Any]:
    return {
        "R": len(s.temperatures),
        "KERNEL": KERNELS.index(s.kernel),
        "BOTH": s.normalization is both,
        "MASKED": math.isinf(s.guards.self_distance),
        "WEIGHTED": weighted,
        "WEIGH_KERNEL": s.weigh_kernel and weighted,
    }


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
        self.device = buckets[0].device
        self.features = sum(len(bucket.features) for bucket in buckets)
        self.temperatures = len(settings.temperatures)
        self.shapes = [Shape.of(bucket) for bucket in buckets]
        self.call = Call.of(settings, self.shapes, weight, buckets[0])
        pairs = zip(self.shapes, self.sets, strict=True)
        self.tables = [shape.table([*sets, []], self.device) for shape, sets in pairs]
        # Of each feature; see ``driftgen.fused.statistics``.
        self.numbers = torch.empty(self.features, 3 + 2 * self.temperatures, device=self.device)

    def scale_pass(self) -> list[Tensor]:
        """Σ w ‖x − y‖ of each problem, ``[problems]`` of each width."""
        found = []
        self.left: list[Tensor] = []
        for shape, *place in self._places():
            found.append(torch.empty(shape.problems, device=self.device))
            left = torch.empty(shape.problems * shape.left, device=self.device)
            _scale_launch(*self.call.key(shape))(*place, found[-1], left)
            self.left.append(left)
        return found

    def products_pass(self) -> list[Tensor]:
        """⟨V_τ, V_τ'⟩ for τ ≤ τ' of each problem, ``[problems, R, R]`` of each width."""
        found, r = [], self.temperatures
        self.kept: list[Tensor] = []
        for (shape, *place), left in zip(self._places(), self.left, strict=True):
            found.append(torch.empty(shape.problems, r, r, device=self.device))
            kept = torch.empty(shape.problems * shape.kept(r) if self.gradient else 1, device=self.device)
            launch = _products_launch(*self.call.key(shape), self.gradient)
            launch(*place, self.numbers, self.call.temperatures, left, found[-1], kept)
            self.kept.append(kept)
        return found

    def finished(self, per_group: Tensor) -> Finished:
        """The result of the last pass, which is yet to come."""
        if not self.gradient:
            return Finished(per_group)
        saved = [tensor for sets in self.sets for tensors in sets for tensor in tensors]
        return Finished(per_group, _FusedGradient(self.call, self.numbers), saved + self.left + self.kept)

    def sum_distances(self) -> Tensor:
        sums = self.scale_pass()
        pairs = zip(self.shapes, sums, strict=True)
        found = [each.view(shape.groups, -1, 1).sum(0, dtype=self.call.exact) for shape, each in pairs]
        return self._by_feature(found)[:, 0]

    def sum_products(self, kernel_unit: Tensor, unit: Tensor) -> Tensor:
        self.numbers[:, 1], self.unit = kernel_unit, unit
        r = self.temperatures
        self.products: list[Tensor] = []
        for shape, products in zip(self.shapes, self.products_pass(), strict=True):
            products = products.triu() + products.triu(1).mT
            self.products.append(products.view(shape.groups, -1, r * r))
        sums = self._by_feature([p.sum(0, dtype=self.call.exact) for p in self.products])
        return sums.view(-1, r, r) / unit.square()[:, None, None]

    def finish(self, inverse_norm: Tensor, share: Tensor, factor: Tensor, size: Tensor) -> Finished:
        norms = (inverse_norm[:, :, None] * inverse_norm[:, None, :]).flatten(1)
        norms *= (share / self.unit.square())[:, None]
        per_group = torch.zeros(self.products[0].shape[0], dtype=self.call.exact, device=share.device)
        for shape, products in zip(self.shapes, self.products, strict=True):
            of_vector = norms[self.call.numbers(shape).feature]
            per_group += torch.einsum("gvr,vr->g", products.to(self.call.exact), of_vector)
        self.numbers[:, 2] = factor / self.unit
        self.numbers[:, 3 + self.temperatures :] = inverse_norm
        return self.finished(per_group)

    def _places(self) -> Iterator[tuple[Shape, Tensor, Tensor, Tensor, Tensor]]:
        """Each shape, and the tensors that all kernels of the passes read."""
        for shape, sets, table in zip(self.shapes, self.sets, self.tables, strict=True):
            yield shape, sets[0][0], table, self.call.numbers(shape).owner, self.call.weight

    def _by_feature(self, found: list[Tensor]) -> Tensor:
        """``[vectors, n]`` of each bucket, summed over the vectors of each feature: ``[features, n]``.

        A product, as ``index_add`` on a GPU adds in any order.
        """
        out = found[0].new_zeros(self.features, found[0].shape[1])
        for shape, values in zip(self.shapes, found, strict=True):
            numbers = self.call.numbers(shape)
            out[numbers.positions] = numbers.member @ values
        return out


@dataclass
class _FusedGradient:
    """The last pass, when the gradient is asked for: nothing of it has to be kept until then."""

    call: Call
    numbers: Tensor

    def read(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        rest, gradients = list(saved), []
        upstream = upstream.float()
        shapes = self.call.shapes
        lefts, kepts = rest[-2 * len(shapes) : -len(shapes)], rest[-len(shapes) :]
        for shape, left, kept in zip(shapes, lefts, kepts, strict=True):
            sets = []
            for samples in shape.samples:
                count = len(shape.features) if samples else 0
                sets.append(rest[:count])
                del rest[:count]
            out = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in sets[0]]
            table = shape.table([*sets, out], upstream.device)
            launch = _gradient_launch(*self.call.key(shape), upstream.stride(0))
            place = sets[0][0], table, self.call.numbers(shape).owner, self.call.weight
            launch(*place, self.numbers, self.call.temperatures, left, kept, upstream)
            gradients += out
        return gradients


@functools.lru_cache(maxsize=64)
def _temperatures(temperatures: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(temperatures).to(device, non_blocking=True)


def _three(bucket: Bucket) -> list[list[Tensor]]:
    return [bucket.generated, bucket.negatives or [], bucket.positives]


def _ready(tensor: Tensor) -> Tensor:
    """The samples of each group side by side, from an address that wide loads can begin at.

    Groups may lie apart, as those of positives and negatives that were encoded together do.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        vectors, width = tensor.shape[2:]
        wanted = zip(tensor.shape[1:], tensor.stride()[1:], (vectors * width, width, 1), strict=True)
        dense = all(size == 1 or stride == want for size, stride, want in wanted)
        if not dense or tensor.stride(0) % width:
            tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
