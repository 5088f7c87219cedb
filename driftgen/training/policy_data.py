"""The demonstrations of a policy's training: opened, normalized once, and drawn on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftgen.drift.field import pairwise_distance
from driftgen.errors import InputError
from driftgen.generators.observation_encoder import is_image
from driftgen.policy.episode_files import open_episodes
from driftgen.policy.episodes import Episodes, Windows
from driftgen.policy.processor import ACTION, Processor, measure_statistics
from driftgen.policy.two_ways import demonstrate
from driftgen.support.rng import derive_generator
from driftgen.training.build import NO_PARTS, Parts
from driftgen.training.policy_config import Demonstrations, PolicyConfig

__all__ = ["ChunkDraws", "nearest_windows", "open_demonstrations", "with_episodes"]

ORDER = 10  # RNG stream id
PAIRS = 2**24  # distances computed at a time


def open_demonstrations(config: Demonstrations, given: Episodes | None = None) -> Episodes:
    """Open the demonstrations of a configuration; ``given`` are those of ``data.kind=memory``."""
    if config.kind == "memory":
        if given is None:
            raise InputError("data.kind=memory: pass the episodes from Python, driftgen.train(..., data=...)")
        return given
    if config.kind == "two-ways":
        return demonstrate()
    if config.path is None:
        raise InputError("data.path is not set: give the demonstrations, --set data.path=...")
    return open_episodes(config.path, config.observe, subset=config.subset)


def with_episodes(config: PolicyConfig, data: Any) -> tuple[PolicyConfig, Parts]:
    """Return the configuration for demonstrations that were passed from Python, and the parts of the run.

    Args:
        config: of the recipe, with its changes.
        data: episodes, or None for those of the recipe.
    """
    if data is None:
        return config, NO_PARTS
    if not isinstance(data, Episodes):
        raise InputError(
            f"data is a {type(data).__name__}: pass driftgen.policy.episodes.Episodes or the path of a file"
        )
    section = config.data.model_copy(update={"kind": "memory", "path": None})
    return config.model_copy(update={"data": section}), Parts(episodes=data)


class ChunkDraws:
    """Draws observation histories and demonstrated chunks, normalized, from tensors on the device.

    States and actions are normalized once. A step gathers rows by index: no work on the host but the choice
    of windows, in an order of its own for each epoch.

    Args:
        config: of the run.
        episodes: all demonstrations.
        device: of the network.

    Attributes:
        statistics: range of each dimension, over all episodes.
        training: windows of the training episodes.
        validation: windows of the held-out episodes; those for training if none are held out.
    """

    def __init__(self, config: PolicyConfig, episodes: Episodes, device: torch.device) -> None:
        self.config, self.device = config, device
        self.place = device if config.data.on_device else torch.device("cpu")
        self.statistics = measure_statistics(episodes)
        self.shapes = dict(episodes.shapes)
        self.processor = Processor(self.shapes, self.statistics, config.images.crop)
        train, held_out = episodes.split(config.data.validation, config.seed)
        if config.data.episodes is not None:
            train = train.select(np.arange(min(config.data.episodes, len(train))))
        self.episodes, self.held_out = train, held_out or train
        sizes = config.horizon, config.observed, config.executed
        self.training, self.validation = (Windows(e, *sizes) for e in (self.episodes, self.held_out))
        self._tensors = self._load(self.training)
        self._epoch: tuple[int, Tensor] | None = None
        self._random = torch.Generator(self.place)
        self._nearest: Tensor | None = None
        if config.batch.positives > 1:
            self._nearest = nearest_windows(self.state_histories(), config.batch.positives).to(self.place)

    def draw(self, step: int, part: slice, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return histories ``[C, K, ...]`` by key and positives ``[C, P, T, A]`` of a step's slice.

        Args:
            step: number of the step.
            part: slice of this process.
            seed: of random crops.
        """
        windows = self.indices(step)
        observations = self._observe(self._tensors, windows, seed)
        shown = windows[:, None] if self._nearest is None else self._nearest[windows]
        positives = self._tensors[ACTION][self._tensors["rows"][shown]]

        def move(tensor: Tensor) -> Tensor:
            return tensor[part].to(self.device, non_blocking=True)

        return {key: move(value) for key, value in observations.items()}, move(positives)

    def held_out_windows(self, count: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return histories and chunks ``[n, T, A]`` of windows spread evenly over the held-out episodes."""
        n = len(self.validation)
        chosen = np.unique(np.linspace(0, n - 1, min(count, n)).astype(np.int64))
        observations, actions = self.validation.load(chosen)
        prepared = self.processor.prepare(observations, self.device)
        return prepared, self.processor.normalize(ACTION, torch.from_numpy(actions).to(self.device))

    def indices(self, step: int) -> Tensor:
        """Return the windows of a step: every epoch in an order of its own."""
        n, size = len(self.training), self.config.batch.observations
        first, chosen = step * size, []
        while size > 0:
            epoch, start = divmod(first, n)
            part = self._order(epoch, n)[start : start + size]
            chosen.append(part)
            first, size = first + len(part), size - len(part)
        return torch.cat(chosen)

    def state_histories(self) -> Tensor:
        """Return the normalized states of every training window, ``[windows, K · S]``."""
        keys = [key for key in self.shapes if not is_image(key)]
        if len(keys) < len(self.shapes):
            raise InputError(
                "observations have images, but batch.positives and joint.groups compare states: set "
                "batch.positives=1 and joint.groups=0"
            )
        rows = self._tensors["rows"][:, : self.config.observed]
        return torch.cat([self._tensors[key][rows].flatten(1) for key in keys], dim=1)

    def _order(self, epoch: int, n: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            order = torch.randperm(n, generator=derive_generator(self.config.seed, ORDER, epoch))
            self._epoch = epoch, order.to(self.place)
        return self._epoch[1]

    def _load(self, windows: Windows) -> dict[str, Tensor]:
        """Return normalized actions and states, images, and the rows of each window."""
        episodes = windows.episodes
        tensors = {ACTION: self.processor.normalize(ACTION, torch.from_numpy(episodes.actions))}
        for key, values in episodes.observations.items():
            tensor = torch.from_numpy(np.ascontiguousarray(values))
            tensors[key] = tensor if is_image(key) else self.processor.normalize(key, tensor)
        tensors["rows"] = torch.from_numpy(windows.steps(np.arange(len(windows))))
        return {key: tensor.to(self.place) for key, tensor in tensors.items()}

    def _observe(self, tensors: Mapping[str, Tensor], windows: Tensor, seed: int) -> dict[str, Tensor]:
        rows = tensors["rows"][windows][:, : self.config.observed]
        self._random.manual_seed(seed)
        return {
            key: self._crop(tensors[key], rows) if is_image(key) else tensors[key][rows]
            for key in self.shapes
        }

    def _crop(self, images: Tensor, rows: Tensor) -> Tensor:
        """Gather images of histories, each history with a random crop of its own."""
        crop = self.config.images.crop
        if crop is None:
            return images[rows]
        corners = [
            torch.randint(size - side + 1, (len(rows), 1), generator=self._random, device=self.place)
            + torch.arange(side, device=self.place)
            for size, side in zip(images.shape[1:3], crop, strict=True)
        ]
        top, left = corners[0][:, None, :, None], corners[1][:, None, None, :]
        return images[rows[:, :, None, None], top, left]


def nearest_windows(histories: Tensor, count: int) -> Tensor:
    """Return the nearest windows of each window by the distance of histories, ``[windows, count]``.

    The first one is the window itself.
    """
    if count > len(histories):
        raise InputError(f"batch.positives={count}, but there are {len(histories)} windows: lower it")
    found = []
    for part in torch.arange(len(histories)).split(max(1, PAIRS // len(histories))):
        distance = pairwise_distance(histories[part], histories)
        distance[torch.arange(len(part)), part] = -1.0  # before any duplicate
        found.append(distance.topk(count, largest=False).indices)
    return torch.cat(found)
