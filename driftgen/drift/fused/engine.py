"""How a call becomes three launches for each width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftgen.drift.batching import Bucket
from driftgen.drift.fused.plan import Part, Plan, make_plan
from driftgen.drift.fused.shapes import Shape
from driftgen.drift.interfaces import Finished, Settings

__all__ = ["FusedEngine"]


class FusedEngine:
    """The passes as launches of ``driftgen.drift.fused.passes_triton``, one for each width and pass.

    Beyond inputs and gradients it holds R² + 1 numbers for each problem, the norms of its samples, and from
    the products to the gradient what both need of the rows and columns of A. The gradient is computed when it
    is asked for.
    """

    def __init__(
        self, settings: Settings, buckets: list[Bucket], weight: Tensor | None, gradient: bool
    ) -> None:
        self.sets = [[[_ready(t) for t in tensors] for tensors in _three(bucket)] for bucket in buckets]
        shapes = tuple([Shape.of(bucket) for bucket in buckets])
        self.plan = plan = make_plan(settings, shapes, weight is not None, gradient, buckets[0].device)
        self.weight = (
            plan.temperatures if weight is None else weight.contiguous()
        )  # anything if there is none
        self.tables = [s.table(sets, (), plan.device) for s, sets in zip(shapes, self.sets, strict=True)]
        self.temperatures = len(settings.temperatures)
        # Of each feature; see ``driftgen.drift.fused.statistics_triton``.
        self.numbers = torch.empty(plan.features, 3 + 2 * self.temperatures, device=plan.device)

    def scale_pass(self) -> list[Tensor]:
        """Σ w ‖x − y‖ of each problem, ``[problems]`` of each width."""
        found = []
        self.left: list[Tensor] = []
        for part, *place in self._places():
            found.append(torch.empty(part.shape.problems, device=self.plan.device))
            self.left.append(torch.empty(part.left, device=self.plan.device))
            part.scale(*place, found[-1], self.left[-1])
        return found

    def products_pass(self) -> list[Tensor]:
        """⟨V_τ, V_τ'⟩ for τ ≤ τ' of each problem, ``[problems, R, R]`` of each width."""
        found, r = [], self.temperatures
        self.kept: list[Tensor] = []
        for (part, *place), left in zip(self._places(), self.left, strict=True):
            found.append(torch.empty(part.shape.problems, r, r, device=self.plan.device))
            self.kept.append(torch.empty(part.kept, device=self.plan.device))
            part.products(*place, self.numbers, self.plan.temperatures, left, found[-1], self.kept[-1])
        return found

    def finished(self, per_group: Tensor) -> Finished:
        """The result of the last pass, which is yet to come."""
        if not self.plan.gradient:
            return Finished(per_group)
        saved = [tensor for sets in self.sets for tensors in sets for tensor in tensors]
        gradient = _FusedGradient(self.plan, self.weight, self.numbers)
        return Finished(per_group, gradient, saved + self.left + self.kept)

    def sum_distances(self) -> Tensor:
        pairs = zip(self.plan.parts, self.scale_pass(), strict=True)
        found = [each.view(part.shape.groups, -1, 1).sum(0, dtype=self.plan.exact) for part, each in pairs]
        return self._by_feature(found)[:, 0]

    def sum_products(self, kernel_unit: Tensor, unit: Tensor) -> Tensor:
        self.numbers[:, 1], self.unit = kernel_unit, unit
        r = self.temperatures
        self.products: list[Tensor] = []
        for products in self.products_pass():
            products = products.triu() + products.triu(1).mT
            self.products.append(products.view(self.plan.groups, -1, r * r))
        sums = self._by_feature([p.sum(0, dtype=self.plan.exact) for p in self.products])
        return sums.view(-1, r, r) / unit.square()[:, None, None]

    def finish(self, inverse_norm: Tensor, share: Tensor, factor: Tensor, size: Tensor) -> Finished:
        norms = (inverse_norm[:, :, None] * inverse_norm[:, None, :]).flatten(1)
        norms *= (share / self.unit.square())[:, None]
        per_group = torch.zeros(self.plan.groups, dtype=self.plan.exact, device=share.device)
        for part, products in zip(self.plan.parts, self.products, strict=True):
            of_vector = norms[part.numbers.feature]
            per_group += torch.einsum("gvr,vr->g", products.to(self.plan.exact), of_vector)
        self.numbers[:, 2] = factor / self.unit
        self.numbers[:, 3 + self.temperatures :] = inverse_norm
        return self.finished(per_group)

    def _places(self) -> Iterator[tuple[Part, Tensor, Tensor, Tensor, Tensor]]:
        """Each width, and the tensors that all kernels of the passes read."""
        for part, sets, table in zip(self.plan.parts, self.sets, self.tables, strict=True):
            yield part, sets[0][0], table, part.numbers.owner, self.weight

    def _by_feature(self, found: list[Tensor]) -> Tensor:
        """``[vectors, n]`` of each bucket, summed over the vectors of each feature: ``[features, n]``.

        A product, as ``index_add`` on a GPU adds in any order.
        """
        out = found[0].new_zeros(self.plan.features, found[0].shape[1])
        for part, values in zip(self.plan.parts, found, strict=True):
            out[part.numbers.positions] = part.numbers.member @ values
        return out


@dataclass
class _FusedGradient:
    """The last pass, when the gradient is asked for: nothing of it has to be kept until then."""

    plan: Plan
    weight: Tensor
    numbers: Tensor

    def read(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        rest, gradients = list(saved), []
        upstream = upstream.float()
        each = upstream.ndim > 0
        parts = self.plan.parts
        lefts, kepts = rest[-2 * len(parts) : -len(parts)], rest[-len(parts) :]
        for part, left, kept in zip(parts, lefts, kepts, strict=True):
            sets = []
            for samples in part.shape.samples:
                count = len(part.shape.features) if samples else 0
                sets.append(rest[:count])
                del rest[:count]
            out = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in sets[0]]
            table = part.shape.table(sets, out, self.plan.device)
            place = sets[0][0], table, part.numbers.owner, self.weight
            part.gradients[each](*place, self.numbers, self.plan.temperatures, left, kept, upstream)
            gradients += out
        return gradients


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
