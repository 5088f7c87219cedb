"""Muon for the matrices of a network, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
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
        self._matrices = {id(p) for members in shapes.values() for p in members}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise InputError(
                "Muon takes one group of parameters, with one lr and weight_decay: pass a list of parameters"
            )
        super().add_param_group(param_group)

    def is_matrix(self, parameter: Tensor) -> bool:
        """Return True if Muon updates the parameter, False if AdamW does."""
        return id(parameter) in self._matrices

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        As for the fused AdamW, an attribute ``found_inf`` of 1 leaves weights and state as they are.
        ``closure`` computes the gradients and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        skip: Tensor | None = getattr(self, "found_inf", None)
        keep = None if skip is None else (skip == 0).float().reshape(())
        updated = [(batch, batch.with_gradients()) for batch in self.batches]
        updated = [(batch, rows) for batch, rows in updated if rows]
        ahead = [batch.advance(rows, self.state, self.momentum, keep) for batch, rows in updated]
        weights = [batch.members[row] for batch, rows in updated for row in rows]
        parameters = [_matrix(p, p) for p in weights]
        if parameters:
            changes = [change for batch in orthogonalize(ahead) for change in batch.unbind()]
            torch._foreach_mul_(changes, [-SIZE * rate * math.sqrt(max(p.shape)) for p in parameters])
            if keep is not None:
                torch._foreach_mul_(changes, keep)
            shrink = rate * decay
            torch._foreach_mul_(parameters, 1 - shrink if keep is None else 1 - shrink * keep)
            torch._foreach_add_(parameters, changes)
        held = [(p, p.grad) for p in weights]
        for parameter, _ in held:
            parameter.grad = None  # AdamW passes over it
        super().step()
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

    def with_gradients(self) -> list[int]:
        """Return the positions of the members that have a gradient."""
        return [row for row, p in enumerate(self.members) if p.grad is not None]

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
        self,
        rows: list[int],
        state: Mapping[Tensor, dict[str, Tensor]],
        momentum: float,
        keep: Tensor | None,
    ) -> Tensor:
        """Update the momentum of the members at ``rows``; return their (1 - μ) G + μ M.

        Where ``keep`` is 0, the momentum stays.
        """
        if self.moments is None:
            self.link(state)
        assert self.moments is not None
        chosen = [self.members[row] for row in rows]
        gradients = torch.stack([_matrix(p.grad, p) for p in chosen if p.grad is not None]).float()
        whole = len(rows) == len(self.members)
        moments = self.moments if whole else torch.stack([self.moments[row] for row in rows])
        if keep is None:
            moments.lerp_(gradients, 1 - momentum)
        else:
            # A gradient that is not finite must not reach the momentum: zero times infinity is not zero.
            gradients = torch.where(keep > 0, gradients, 0.0)
            moments.lerp_(gradients, (1 - momentum) * keep)
        if not whole:
            for row, new in zip(rows, moments, strict=True):
                self.moments[row].copy_(new)
        return gradients.lerp(moments, momentum)


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
    G ← p(G) G p(G), from Q = 1. All G of equal size are one batch, and the result is Q X. On a GPU, the two
    products with X are in TF32, the rounds in full float32: they enlarge the error of small eigenvalues by up
    to 12 each. ``torch.optim.Muon`` computes all of it in bfloat16.
    """
    wide = [x.float() if x.shape[-2] <= x.shape[-1] else x.float().mT for x in batches]
    sizes: dict[int, list[int]] = {}
    for index, x in enumerate(wide):
        sizes.setdefault(x.shape[-2], []).append(index)
    factors: dict[int, Tensor] = {}
    with tf32(True):
        for members in sizes.values():
            products = torch.cat([wide[i] @ wide[i].mT for i in members])
            with tf32(False):
                found = _factors(products)
            factors |= zip(members, found.split([len(wide[i]) for i in members]), strict=True)
        results = [factors[i] @ x for i, x in enumerate(wide)]
    return [y if x.shape[-2] <= x.shape[-1] else y.mT for x, y in zip(batches, results, strict=True)]


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
