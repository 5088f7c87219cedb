"""Exponential moving averages of a model's weights, several decays at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from driftgen.errors import InputError

__all__ = ["EMA", "INITIAL_SHARE_LIMIT", "decay_at", "unwrapped"]

INITIAL_SHARE_LIMIT = 0.05  # weight of the initial parameters above which an average is not trusted


def decay_at(decay: float, update: int, *, warmup: bool) -> float:
    """Return the decay of the update that follows ``update`` others.

    Constant without warm-up. With warm-up d_t = min(d, (1 + t) / (10 + t)): the average covers about the
    last ninth of the run until its window reaches that of d. EDM2's power function of exponent γ = 8, d_t =
    (1 - 1 / t)^9 ≈ 1 - 9 / t, has nearly the same profile (σ_rel = 0.09). It is not used on its own because
    its window grows without limit, so that ``ema: [0.999]`` would no longer mean the paper's decay; with the
    minimum, the average becomes exactly the paper's once d is reached, after 9 d / (1 - d) updates.
    """
    return min(decay, (1 + update) / (10 + update)) if warmup else decay


class EMA:
    """θ̄ ← d θ̄ + (1 - d) θ after each step, for each decay d, starting from the initial weights.

    Without warm-up the initial weights keep the share d^t: 86% after 300 steps of d = 0.9995. With warm-up
    the share is 2% after two updates, see :func:`decay_at`.

    Averages keep the dtype of the parameters; buffers are copied from the model. The averaged models are in
    eval mode and have no gradients. Decays are host scalars: :meth:`update` never waits for the GPU, and
    must not be captured in a CUDA graph.

    Args:
        model: bare, compiled, or in DistributedDataParallel.
        decays: the first one is that of :attr:`first`.
        warmup: warm the decays up.

    Attributes:
        updates: number of updates so far.
        initial_share: exact weight of the initial parameters in each average, the product of its decays.
    """

    def __init__(self, model: nn.Module, decays: Sequence[float], *, warmup: bool = False) -> None:
        names = [str(float(decay)) for decay in decays]
        if not names or len(set(names)) < len(names) or not all(0 <= float(name) < 1 for name in names):
            raise InputError(f"ema={list(decays)}: give at least one decay, each once, from 0 to below 1")
        self.warmup, self.updates = warmup, 0
        self.initial_share = dict.fromkeys(names, 1.0)
        self._averaged: dict[str, AveragedModel] = {}
        for name in names:
            average = AveragedModel(unwrapped(model))
            self._averaged[name] = average.requires_grad_(False).eval()
        self._trained: _Tensors | None = None
        self._tensors: dict[str, _Tensors] = {}

    @property
    def models(self) -> dict[str, nn.Module]:
        """Averaged model of each decay, by the decay's text, such as "0.999"."""
        return {name: average.module for name, average in self._averaged.items()}

    @property
    def first(self) -> nn.Module:
        """Averaged model of the first decay: the one that is sampled from and reported."""
        return next(iter(self.models.values()))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average the weights; call after each optimizer step."""
        # Not AveragedModel.update_parameters: it takes the host milliseconds while the GPU waits.
        if self._trained is None or self._trained.model is not unwrapped(model):
            self._trained = _Tensors(unwrapped(model))
            self._tensors = {name: _Tensors(average) for name, average in self.models.items()}
        current, buffers = self._trained.parameters(), self._trained.buffers()
        for name, tensors in self._tensors.items():
            decay = decay_at(float(name), self.updates, warmup=self.warmup)
            average = get_ema_multi_avg_fn(decay)
            for dtype, averaged in tensors.parameters().items():
                average(averaged, current[dtype], None)
            for own, buffer in zip(tensors.buffers(), buffers, strict=True):
                own.copy_(buffer)
            self.initial_share[name] *= decay
        self.updates += 1

    def updates_until(self, name: str, limit: float = INITIAL_SHARE_LIMIT) -> int:
        """Return how many more updates bring the initial share of a decay to ``limit`` or below."""
        decay, share, update = float(name), self.initial_share[name], self.updates
        while share > limit and decay_at(decay, update, warmup=self.warmup) < decay:
            share *= decay_at(decay, update, warmup=self.warmup)
            update += 1
        if share > limit:
            update += math.ceil(math.log(limit / share) / math.log(decay)) if decay > 0 else 1
        return update - self.updates

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers as ``0.999/name``. The tensors are the averages themselves."""
        return {
            f"{decay}/{name}": tensor
            for decay, model in self.models.items()
            for name, tensor in _uncompiled_state(model).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors of :meth:`state_dict`, of the same decays and the same model."""
        own = self.state_dict()
        for problem, names in (
            ("missing", own.keys() - state.keys()),
            ("unknown", state.keys() - own.keys()),
        ):
            if names:
                raise InputError(f"averages do not fit, {problem}: {', '.join(sorted(names)[:3])}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                shapes = f"{list(state[name].shape)}, expected {list(tensor.shape)}"
                raise InputError(f"averages do not fit: {name} has shape {shapes}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def progress(self) -> dict[str, Any]:
        """Return the number of updates and the initial shares, for the JSON record of a checkpoint."""
        return {"updates": self.updates, "initial_share": dict(self.initial_share)}

    def load_progress(self, record: Mapping[str, Any] | None, updates: int) -> None:
        """Restore :meth:`progress`; ``updates`` counts for checkpoints of versions without a record.

        Those versions had no warm-up, so their initial share is d^updates.
        """
        self.updates = updates if record is None else int(record["updates"])
        shares = {} if record is None else record["initial_share"]
        self.initial_share = {n: shares.get(n, float(n) ** self.updates) for n in self.initial_share}


class _Tensors:
    """Parameters and buffers of a model, found without a walk over its modules.

    Holds the modules' own dicts, not the tensors: FSDP replaces parameters while it gathers them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = [self._slot(model, name, "_parameters") for name, _ in model.named_parameters()]
        self._buffers = [self._slot(model, name, "_buffers") for name, _ in model.named_buffers()]

    def parameters(self) -> dict[torch.dtype, list[Tensor]]:
        """Return the parameters by dtype."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for holder, name in self._parameters:
            groups.setdefault(holder[name].dtype, []).append(holder[name])
        return groups

    def buffers(self) -> list[Tensor]:
        """Return the buffers."""
        return [holder[name] for holder, name in self._buffers]

    @staticmethod
    def _slot(model: nn.Module, path: str, kind: str) -> tuple[dict[str, Tensor], str]:
        module, _, name = path.rpartition(".")
        return getattr(model.get_submodule(module), kind), name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and DistributedDataParallel, in any order."""
    while True:
        inner = (
            model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        )
        if inner is None:
            return model
        model = inner


def _uncompiled_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict under names that do not depend on which parts are compiled."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
