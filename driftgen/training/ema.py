"""Exponential moving averages of a model's weights, several at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from driftgen.errors import InputError

__all__ = ["EMA", "unwrapped"]


class EMA:
    """θ̄ ← d θ̄ + (1 - d) θ after each step, for each decay d, from the initial weights and without warm-up.

    Parameters are averaged in their own number type; buffers are those of the model. The copies are in
    evaluation mode and have no gradients.

    Args:
        model: bare, compiled, or in DistributedDataParallel.
        decays: the first one is that of :attr:`first`.
    """

    def __init__(self, model: nn.Module, decays: Sequence[float]) -> None:
        names = [str(float(decay)) for decay in decays]
        if not names or len(set(names)) < len(names) or not all(0 <= float(name) < 1 for name in names):
            raise InputError(f"ema={list(decays)}: give at least one decay, each once, from 0 to below 1")
        self._averaged: dict[str, AveragedModel] = {}
        for name in names:
            copy = AveragedModel(unwrapped(model), multi_avg_fn=get_ema_multi_avg_fn(float(name)))
            # At 0 the first update would copy the weights instead of averaging them with the initial ones.
            copy.n_averaged.fill_(1)
            self._averaged[name] = copy.requires_grad_(False).eval()

    @property
    def models(self) -> dict[str, nn.Module]:
        """The averaged model of each decay, by the decay's text, say "0.999"."""
        return {name: copy.module for name, copy in self._averaged.items()}

    @property
    def first(self) -> nn.Module:
        """The averaged model of the first decay, to sample from."""
        return next(iter(self.models.values()))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """To be called after each step of the optimiser."""
        bare = unwrapped(model)
        for copy in self._averaged.values():
            copy.update_parameters(bare)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers, as ``0.999/name``. The tensors are the averages themselves, not copies."""
        return {
            f"{decay}/{plain}": tensor
            for decay, model in self.models.items()
            for plain, tensor in _plain(model).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what :meth:`state_dict` gave, of the same decays and the same model."""
        own = self.state_dict()
        for what, names in (("missing", own.keys() - state.keys()), ("unknown", state.keys() - own.keys())):
            if names:
                raise InputError(f"averages do not fit, {what}: {', '.join(sorted(names)[:3])}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                shapes = f"{list(state[name].shape)} instead of {list(tensor.shape)}"
                raise InputError(f"averages do not fit: {name} has shape {shapes}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers, in whatever order."""
    while True:
        inner = (
            model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        )
        if inner is None:
            return model
        model = inner


def _plain(model: nn.Module) -> dict[str, Tensor]:
    """The state by names that do not tell which parts are compiled."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
