"""Configuration of a policy for LeRobot: the network, the sizes of a chunk, and options of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, NormalizationMode
from lerobot.optim.optimizers import AdamWConfig
from lerobot.optim.schedulers import DiffuserSchedulerConfig

from driftgen.errors import InputError

__all__ = ["TYPE", "DriftgenConfig"]

TYPE = "driftgen"  # --policy.type of LeRobot's commands


def _normalization() -> dict[str, NormalizationMode]:
    ranges = dict.fromkeys(("STATE", "ENV", "ACTION"), NormalizationMode.MIN_MAX)
    return {"VISUAL": NormalizationMode.IDENTITY, **ranges}


@PreTrainedConfig.register_subclass(TYPE)
@dataclass
class DriftgenConfig(PreTrainedConfig):
    """Options of a :class:`~driftgen.policy.lerobot.DriftgenPolicy`.

    ``input_features`` and ``output_features`` of the base class give the shapes. Fields of the network have
    the names of :class:`~driftgen.generators.policy_network.PolicyNetwork`.

    Attributes:
        n_obs_steps: steps of the observation history.
        horizon: actions of a chunk.
        n_action_steps: actions of a chunk that are executed.
        normalization_mapping: normalization by type of feature.
        method: drifting; regression and diffusion act, but are trained with ``driftgen policy train``.
        temperatures: of the drifting loss.
        generated: chunks per observation in training.
    """

    n_obs_steps: int = 2
    horizon: int = 16
    n_action_steps: int = 8
    normalization_mapping: dict[str, NormalizationMode] = field(default_factory=_normalization)
    method: str = "drifting"
    generator: str = "unet1d"
    preset: str | None = "small"
    options: dict[str, Any] = field(default_factory=dict)
    crop: list[int] | None = None
    image_features_size: int = 64  # image_features is a property of the base class
    image_widths: list[int] = field(default_factory=lambda: [32, 64, 128])
    keypoints: int = 32
    temperatures: list[float] = field(default_factory=lambda: [0.05, 0.2, 0.5])
    generated: int = 16
    optimizer_lr: float = 2e-4
    optimizer_betas: tuple[float, float] = (0.95, 0.999)
    optimizer_weight_decay: float = 1e-6
    scheduler_name: str = "cosine"
    scheduler_warmup_steps: int = 500

    @property
    def observation_delta_indices(self) -> list[int]:
        """Steps of the history, relative to the present."""
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        """Steps of a chunk, which begins with the first observation."""
        first = 1 - self.n_obs_steps
        return list(range(first, first + self.horizon))

    @property
    def reward_delta_indices(self) -> None:
        """None: no rewards are read."""
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        """Return the optimizer of the recipes."""
        return AdamWConfig(
            lr=self.optimizer_lr, betas=self.optimizer_betas, weight_decay=self.optimizer_weight_decay
        )

    def get_scheduler_preset(self) -> DiffuserSchedulerConfig:
        """Return the schedule of the recipes."""
        return DiffuserSchedulerConfig(name=self.scheduler_name, num_warmup_steps=self.scheduler_warmup_steps)

    def validate_features(self) -> None:
        """Raise if there is no observation or no action."""
        if not self.input_features:
            raise InputError("input_features is empty: name at least one observation")
        if self.action_feature is None:
            raise InputError("output_features has no action: name it action, of type ACTION")

    def observation_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of one step by key; LeRobot's images ``[3, H, W]`` become ``[H, W, 3]``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for key, feature in (self.input_features or {}).items():
            shape = tuple(feature.shape)
            shapes[key] = (*shape[1:], shape[0]) if feature.type is FeatureType.VISUAL else shape
        return shapes
