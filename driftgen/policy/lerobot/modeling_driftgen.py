"""The network of a policy as LeRobot calls it: tensors in batches, normalized outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from driftgen.drift.loss import DriftingLoss
from driftgen.errors import InputError
from driftgen.generators.observation_encoder import is_image
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.policy.chunk_samplers import make_sampler
from driftgen.policy.lerobot.configuration_driftgen import TYPE, DriftgenConfig
from driftgen.policy.processor import center_crop, image_bytes

__all__ = ["DriftgenPolicy"]

ACTION = "action"


class DriftgenPolicy(PreTrainedPolicy):
    """A drifting policy for LeRobot: one network call per chunk, receding horizon.

    States and actions are normalized to [−1, 1] by the processors, see
    :func:`~driftgen.policy.lerobot.make_driftgen_pre_post_processors`.

    Args:
        config: shapes and options.
        options: what LeRobot passes to every policy, such as statistics; not needed here.
    """

    config_class = DriftgenConfig
    name = TYPE

    def __init__(self, config: DriftgenConfig, **options: Any) -> None:
        super().__init__(config)
        config.validate_features()
        self.shapes = config.observation_shapes()
        self.network = PolicyNetwork(
            self.shapes,
            config.action_feature.shape[0],
            horizon=config.horizon,
            observed=config.n_obs_steps,
            executed=config.n_action_steps,
            method=config.method,
            generator=config.generator,
            preset=config.preset,
            options=config.options,
            crop=config.crop,
            image_features=config.image_features_size,
            image_widths=config.image_widths,
            keypoints=config.keypoints,
        )
        self.sampler = make_sampler(config.method)
        self.loss = DriftingLoss(temperatures=config.temperatures)
        self.reset()

    def get_optim_params(self) -> Any:
        """Return the parameters that an optimizer updates."""
        return self.network.parameters()

    def reset(self) -> None:
        """Forget observations and actions, at the start of an episode."""
        self._history: dict[str, deque[Tensor]] = {
            key: deque(maxlen=self.config.n_obs_steps) for key in self.shapes
        }
        self._actions: deque[Tensor] = deque()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any] | None]:
        """Return the drifting loss of a batch and its drift.

        The loss is nearly constant by design; ``drift`` falls.

        Args:
            batch: histories ``[B, K, ...]`` by key and ``action`` ``[B, horizon, A]``, normalized.
        """
        if self.config.method != "drifting":
            raise InputError(
                f"method={self.config.method} is not trained here: use driftgen policy train --set method=..."
            )
        observations = self._prepare(batch, random_crop=self.training)
        actions = batch[ACTION].float()
        rows, each = len(actions), self.config.generated
        noise = torch.randn(rows * each, *actions.shape[1:], device=actions.device)
        chunks = self.network(noise, observations).float().unflatten(0, (rows, each))
        output = self.loss(chunks.flatten(2), actions[:, None].flatten(2))
        return output.loss, {"drift": float(output.drift.detach().mean())}

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Tensor], noise: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return the actions to execute, normalized, ``[B, n_action_steps, A]``.

        Args:
            batch: histories ``[B, K, ...]`` by key, or single steps ``[B, ...]``, which stand for a history.
            noise: ``[B, horizon, A]``; drawn if None.
            options: of other policies; ignored.
        """
        self.eval()
        observations = self._prepare(self._with_history(batch))
        if noise is None:
            noise = self.network.sample_noise(len(next(iter(observations.values()))))
        chunks = self.sampler(self.network, noise, observations)
        first = self.config.n_obs_steps - 1  # the action of the latest observation
        return chunks[:, first : first + self.config.n_action_steps]

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], noise: Tensor | None = None, **options: Any) -> Tensor:
        """Return the next action ``[B, A]``, normalized; the network is called when none is left.

        Args:
            batch: one step ``[B, ...]`` by key.
            noise: of the chunk, if one is drawn.
            options: of other policies; ignored.
        """
        self._check(batch)
        for key, past in self._history.items():
            past.extend([batch[key]] * (1 if past else self.config.n_obs_steps))
        if not self._actions:
            history = {key: torch.stack(list(past), dim=1) for key, past in self._history.items()}
            self._actions.extend(self.predict_action_chunk(history, noise=noise).unbind(1))
        return self._actions.popleft()

    def _with_history(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return histories; a single step is repeated."""
        self._check(batch)
        steps = self.config.n_obs_steps
        return {
            key: batch[key]
            if batch[key].ndim == len(shape) + 2
            else batch[key][:, None].expand(-1, steps, *batch[key].shape[1:])
            for key, shape in self.shapes.items()
        }

    def _prepare(self, batch: Mapping[str, Tensor], random_crop: bool = False) -> dict[str, Tensor]:
        """Return states as they are and images as cropped bytes, which the encoder reads."""
        self._check(batch)
        prepared = {}
        for key, shape in self.shapes.items():
            value = batch[key]
            if is_image(key):
                value = image_bytes(key, value, shape)
                value = self._crop(value) if random_crop else center_crop(value, self.config.crop)
            prepared[key] = value
        return prepared

    def _crop(self, images: Tensor) -> Tensor:
        """Crop a batch of images at one random place."""
        crop = self.config.crop
        if crop is None:
            return images
        top, left = (int(torch.randint(images.shape[i - 3] - crop[i] + 1, ())) for i in (0, 1))
        return images[..., top : top + crop[0], left : left + crop[1], :]

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        missing = [key for key in self.shapes if key not in batch]
        if missing:
            raise InputError(f"{missing[0]} is missing: the policy observes {', '.join(self.shapes)}")
