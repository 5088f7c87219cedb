"""DriftingPolicy: observation history in, a chunk of actions out, in one network call."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError
from driftgen.generators.base import Generator
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.model_io import load_any, save_model
from driftgen.ops.cuda_graphs import GraphedFunction
from driftgen.policy.chunk_samplers import ChunkSampler, make_sampler
from driftgen.policy.processor import Processor, as_array
from driftgen.support.checked_arguments import checked
from driftgen.support.distributed import choose_device
from driftgen.support.whole_numbers import check_seed

__all__ = ["DriftingPolicy"]

Array = NDArray[Any]


class DriftingPolicy:
    """A policy that predicts chunks of actions and executes the first part of each (receding horizon).

    Example::

        policy = DriftingPolicy.from_pretrained("runs/pusht-state")
        policy.reset()
        action = policy.select_action({"observation.state": state})  # one step, in the environment's units

    The baselines of the same training, regression and diffusion, load and act in the same way.

    Args:
        network: trained network; put in eval mode.
        sampler: draws chunks; that of the network's method if None.
        device: of the network; unchanged if None.
        source: origin of the weights, for the model card.

    Attributes:
        horizon: actions of a chunk.
        observed: steps of the observation history.
        executed: actions of a chunk that :meth:`select_action` executes before it asks again.
        calls: network calls per chunk.
    """

    @checked
    def __init__(
        self,
        network: PolicyNetwork,
        *,
        sampler: ChunkSampler | None = None,
        device: str | torch.device | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.network = network.eval() if device is None else network.to(choose_device(device)).eval()
        self.sampler = sampler or make_sampler(network.method)
        self.processor = Processor(network.observations, network.statistics, network.crop)
        self.source = dict(source or {})
        self.horizon, self.observed, self.executed = network.horizon, network.observed, network.executed
        self._graphed: GraphedFunction | None = None
        self.reset()

    @classmethod
    @checked
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        weights: str | None = None,
        device: str | None = None,
        scheduler: str | None = None,
        calls: int | None = None,
        verify: bool = True,
    ) -> DriftingPolicy:
        """Load a policy.

        Args:
            source: a run, a folder of :meth:`save_pretrained`, ``owner/repository`` or ``hf://name``.
            weights: set of weights of a run, such as ``ema-0.999`` or ``live``; its first average if None.
            device: ``"cpu"`` or ``"cuda"``; the CPU if None.
            scheduler: ``"ddim"`` or ``"ddpm"``, for a policy of method diffusion.
            calls: network calls per chunk, likewise.
            verify: compare the weights with the checksums in ``config.json``.
        """
        model, _, facts = load_any(source, weights, verify=verify)
        if not isinstance(model, PolicyNetwork):
            kind, advice = "an encoder", "train a policy with driftgen policy train"
            if hasattr(getattr(model, "config", None), "action_size"):  # the generator inside of a policy
                kind = "a network without observations"
            elif isinstance(model, Generator):
                kind, advice = "a generator", f"driftgen sample {source}"
            raise InputError(f"{source} is {kind} ({type(model).__name__}), not a policy: {advice}")
        sampler = make_sampler(model.method, scheduler, calls)
        model.float()  # weights may be stored in 16 bits, actions need more
        return cls(model, sampler=sampler, device=choose_device(device or "cpu"), source=facts["source"])

    def save_pretrained(self, folder: str | Path, **options: Any) -> Path:
        """Save network and normalization as a folder; ``options`` are those of ``driftgen.save_model``."""
        return save_model(self.network, folder, source=self.source, **options)

    @property
    def calls(self) -> int:
        """Network calls per chunk."""
        return self.sampler.calls

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(self.network.parameters()).device

    def to(self, device: str | torch.device) -> DriftingPolicy:
        """Move the network to a device."""
        self.network.to(choose_device(device))
        if self._graphed is not None:
            self._graphed.forget()
        return self

    def capture(self, max_graphs: int = 4) -> DriftingPolicy:
        """Capture the network call of each batch size in a CUDA graph and replay it; return the policy.

        On an NVIDIA GPU, for methods of one network call. ``max_graphs`` graphs are kept, the most recent
        ones. Move such a policy by :meth:`to`, not its network.
        """
        if self.network.method != "diffusion":
            self._graphed = GraphedFunction(self._evaluate, max_graphs)
        return self

    def reset(self, seed: int | None = None) -> None:
        """Forget observations and actions, at the start of an episode.

        ``seed`` makes the noise of the episode reproducible.
        """
        self._history: deque[dict[str, Any]] = deque(maxlen=self.observed)
        self._actions: deque[Array] = deque()
        self._random = torch.Generator()
        check_seed("seed", seed)
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(int(seed))

    @checked
    def select_action(self, observation: Mapping[str, Any]) -> Array:
        """Return the next action ``[A]`` in the units of the environment.

        The network is called if no action of the last chunk is left to execute. At the start of an episode
        the first observation stands for the missing history.

        Args:
            observation: one step by key: ``observation.state`` ``[S]``, ``observation.image`` ``[H, W, 3]``.
        """
        keys = [key for key in self.network.observations if key in observation]
        step = {key: as_array(key, observation[key]) for key in keys}
        # Checked before it enters the history, which a refused observation must not change.
        self.processor.prepare({key: value[None, None] for key, value in step.items()}, torch.device("cpu"))
        for key, value in step.items():
            if not np.isfinite(value).all():
                raise InputError(f"{key} contains NaN or infinite values: repair the observation")
            if self._history and value.shape != (before := self._history[-1][key].shape):
                raise InputError(f"{key} has shape {list(value.shape)}, the step before had {list(before)}")
        while len(self._history) < self.observed - 1:
            self._history.append(step)
        self._history.append(step)
        if not self._actions:
            history = {key: np.stack([past[key] for past in self._history])[None] for key in keys}
            noise = self.network.sample_noise(1, self._random)
            (chunk,) = self.predict(history, noise)
            if not np.isfinite(chunk).all():
                raise InputError("the actions are not finite: the observation is far from the demonstrations")
            first = self.observed - 1  # the action of the latest observation
            self._actions.extend(chunk[first : first + self.executed])
        return self._actions.popleft()

    @torch.no_grad()
    @checked
    def predict(
        self, observations: Mapping[str, Any], noise: Tensor | None = None, seed: int | None = None
    ) -> Array:
        """Return chunks ``[B, horizon, A]`` in the units of the environment.

        The action of the latest observation is at index ``observed - 1``.

        Args:
            observations: histories ``[B, observed, ...]`` by key.
            noise: ``[B · N, horizon, A]`` for N chunks per history, adjacent; drawn if None.
            seed: of the noise, if it is drawn.
        """
        check_seed("seed", seed)
        prepared = self.processor.prepare(observations, self.device)
        sizes = {key: tuple(value.shape[:2]) for key, value in prepared.items()}
        rows = next(iter(sizes.values()))[0]
        for key, size in sizes.items():
            if size != (rows, self.observed):
                raise InputError(
                    f"{key} has {size[0]} histories of {size[1]} steps, expected {rows} of {self.observed}"
                )
        if noise is None:
            generator = None if seed is None else torch.Generator().manual_seed(int(seed))
            noise = self.network.sample_noise(rows, generator)
        noise = noise.to(self.device)
        if self._graphed is not None and noise.is_cuda:
            chunks = self._graphed(noise, *(prepared[key] for key in self.network.observations))
        else:
            chunks = self.sampler(self.network, noise, prepared)
        actions: Array = self.processor.restore_actions(chunks).cpu().numpy()
        return actions

    def _evaluate(self, noise: Tensor, *observations: Tensor) -> Tensor:
        prepared = dict(zip(self.network.observations, observations, strict=True))
        return self.sampler(self.network, noise, prepared)
