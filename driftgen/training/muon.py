"""Muon for the matrices of a network, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.support.tf32 import tf32

__all__ = ["Muon", "orthogonalize"]

# Coefficients of the quintic iteration and its rounds, as in torch.optim.Muon.
COEFFICIENTS, ROUNDS = (3.4445, -4.7750, 2.0315), 5
SMALLEST = 16  # rows and columns of a matrix: pixels and labels enter and leave through narrower ones
LEAST_SQUARE = 1e-14  # of ‖X‖²
SIZE = 0.2  # root mean square of an update, in learning rates: about that of AdamW


class Muon(torch.optim.AdamW):
    """Muon: the momentum M of a weight matrix W is replaced by the nearest matrix of orthonormal rows.

    For a matrix of A x B with gradient G, learning rate γ, momentum μ and weight decay λ,

        M ← μ M + (1 - μ) G,   W ← (1 - γ λ) W - 0.2 γ √max(A, B) orthogonal((1 - μ) G + μ M).

    The factor gives an update the size that it has in AdamW, so that both take similar learning rates. The
    weights of a convolution are one matrix, with a row for each output channel.

    ``torch.optim.Muon`` takes matrices only, and goes through them one by one. Here matrices of equal shape
    are one batch, and the iterations run on all products of equal size at once.

    Args:
        parameters: of the network. Those with fewer than two axes, or fewer than 16 rows or columns, are
            updated by AdamW.
        embeddings: parameters that AdamW updates whatever their shape.
        momentum: μ.
        options: of AdamW; ``lr`` and ``weight_decay`` are shared.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        embeddings: Collection[Tensor] = (),
        momentum: float = 0.95,
        **options: Any,
    ) -> None:
        super().__init__(parameters, **options)
        self.momentum = momentum
        apart = {id(p) for p in embeddings}
        shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim >= 2 and id(parameter) not in apart:
                shape = parameter.shape[0], parameter[0].numel()
                if min(shape) >= SMALLEST:
                    shapes.setdefault(shape, []).append(parameter)
        self.batches = [_Batch(shape, members) for shape, members in shapes.items()]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        As for the fused AdamW, an attribute ``found_inf`` of 1 leaves weights and state as they are.
        """
        group = self.param_groups[0]
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        skip: Tensor | None = getattr(self, "found_inf", None)
        keep = None if skip is None else (skip == 0).float().reshape(())
        batches = [batch for batch in self.batches if batch.has_gradients()]
        ahead = [batch.advance(self.state, self.momentum, keep) for batch in batches]
        parameters = [_matrix(p, p) for batch in batches for p in batch.members]
        if parameters:
            changes = [change for batch in orthogonalize(ahead) for change in batch.unbind()]
            torch._foreach_mul_(changes, [-SIZE * rate * math.sqrt(max(p.shape)) for p in parameters])
            if keep is not None:
                torch._foreach_mul_(changes, keep)
            shrink = rate * decay
            torch._foreach_mul_(parameters, 1 - shrink if keep is None else 1 - shrink * keep)
            torch._foreach_add_(parameters, changes)
        held = [(p, p.grad) for batch in batches for p in batch.members]
        for parameter, _ in held:
            parameter.grad = None  # AdamW passes over it
        loss: float | None = super().step(closure)
        for parameter, gradient in held:
            parameter.grad = gradient
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state, and keep the momentum of equal shapes in one tensor again."""
        super().load_state_dict(dict(state_dict))
        for batch in self.batches:
            batch.link(self.state)


class _Batch:
    """Weights of equal shape, and their momentum in one tensor ``[n, rows, columns]``."""

    def __init__(self, shape: tuple[int, int], members: list[nn.Parameter]) -> None:
        self.shape, self.members = shape, members
        self.moments: Tensor | None = None

    def has_gradients(self) -> bool:
        return all(p.grad is not None for p in self.members)

    def link(self, state: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Take over the momentum in the state of the optimizer, or begin with zero."""
        held = [state[p].get("exp_avg") for p in self.members]
        found = [torch.zeros_like(p) if m is None else m for p, m in zip(self.members, held, strict=True)]
        self.moments = torch.stack([_matrix(m, p) for p, m in zip(self.members, found, strict=True)]).float()
        for parameter, moments in zip(self.members, self.moments, strict=True):
            # AdamW expects a number of steps in every state.
            steps = state[parameter].get("step", torch.zeros((), device=parameter.device))
            state[parameter].update(step=steps, exp_avg=_weight(moments, parameter))

    def advance(
        self, state: Mapping[Tensor, dict[str, Tensor]], momentum: float, keep: Tensor | None
    ) -> Tensor:
        """Update the momentum; return (1 - μ) G + μ M. Where ``keep`` is 0, the momentum stays."""
        if self.moments is None:
            self.link(state)
        assert self.moments is not None
        gradients = torch.stack([_matrix(p.grad, p) for p in self.members if p.grad is not None]).float()
        if keep is None:
            self.moments.lerp_(gradients, 1 - momentum)
        else:
            # A gradient that is not finite must not reach the momentum: zero times infinity is not zero.
            gradients = torch.where(keep > 0, gradients, 0.0)
            self.moments.lerp_(gradients, (1 - momentum) * keep)
        return gradients.lerp(self.moments, momentum)


def _matrix(tensor: Tensor, weight: nn.Parameter) -> Tensor:
    """Return a tensor of the shape of a weight as a matrix whose columns lie as in the weight's memory.

    The order of columns does not change the result, and this one makes a view of a weight in any layout.
    """
    ordered = tensor.movedim(1, -1) if _is_channels_last(weight) else tensor
    shape = weight.shape[0], weight[0].numel()
    return ordered.view(shape) if tensor is weight else ordered.reshape(shape)


def _weight(matrix: Tensor, weight: nn.Parameter) -> Tensor:
    """Return a matrix as a view of the shape and layout of a weight."""
    if not _is_channels_last(weight):
        return matrix.view(weight.shape)
    return matrix.view(weight.shape[0], *weight.shape[2:], weight.shape[1]).movedim(-1, 1)


def _is_channels_last(weight: nn.Parameter) -> bool:
    return weight.ndim > 2 and not weight.is_contiguous()


def orthogonalize(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return about U Vᵀ for every matrix X = U S Vᵀ of the batches ``[n, rows, columns]``, in float32.

    Five rounds of X ← p(X Xᵀ) X with p(G) = a + b G + c G², from X / ‖X‖, bring the singular values to about
    0.7 to 1.2. All p(G) commute with G = X Xᵀ, so the rounds need the small matrices alone: Q ← p(G) Q and
    G ← p(G) G p(G), from Q = 1. All G of equal size are one batch, and the result is Q X.
    """
    wide = [x.float() if x.shape[-2] <= x.shape[-1] else x.float().mT for x in batches]
    sizes: dict[int, list[int]] = {}
    for index, x in enumerate(wide):
        sizes.setdefault(x.shape[-2], []).append(index)
    factors: dict[int, Tensor] = {}
    with tf32(False):  # the rounds enlarge the error of small eigenvalues by up to 12 each
        for members in sizes.values():
            products = torch.cat([wide[i] @ wide[i].mT for i in members])
            factors |= zip(members, _factors(products).split([len(wide[i]) for i in members]), strict=True)
        found = [factors[i] @ x for i, x in enumerate(wide)]
    return [y if x.shape[-2] <= x.shape[-1] else y.mT for x, y in zip(batches, found, strict=True)]


def _factors(g: Tensor) -> Tensor:
    """Return Q for a batch of G = X Xᵀ before division by ‖X‖²."""
    a, b, c = COEFFICIENTS
    squares = g.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp(min=LEAST_SQUARE)
    g, q = g / squares, squares.rsqrt()
    for round_ in range(ROUNDS):
        p = torch.baddbmm(g, g, g, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        q = p @ q if round_ else p * q
        if round_ < ROUNDS - 1:
            g = p @ g @ p
    return q
