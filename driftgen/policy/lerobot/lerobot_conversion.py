"""Conversion of a saved policy, with its processors, for LeRobot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lerobot.configs.types import FeatureType, PolicyFeature

from driftgen.generators.observation_encoder import is_image
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.policy.lerobot.configuration_driftgen import DriftgenConfig
from driftgen.policy.lerobot.modeling_driftgen import ACTION, DriftgenPolicy
from driftgen.policy.lerobot.processor_driftgen import (
    lerobot_statistics,
    make_driftgen_pre_post_processors,
)

__all__ = ["convert_policy", "save_for_lerobot"]

STATE = "observation.state"


def convert_policy(policy: DriftingPolicy) -> tuple[DriftgenPolicy, Any, Any]:
    """Return the LeRobot policy of a policy, and its processors of observations and of actions."""
    network = policy.network
    config = _config_of(network, str(policy.device))
    converted = DriftgenPolicy(config)
    converted.network.load_state_dict(network.state_dict())
    converted.sampler = policy.sampler
    converted.to(policy.device).eval()
    return converted, *make_driftgen_pre_post_processors(config, lerobot_statistics(network.statistics))


def save_for_lerobot(policy: DriftingPolicy, folder: str | Path) -> Path:
    """Save a policy as a folder that LeRobot loads with ``--policy.path``."""
    place = Path(folder)
    for part in convert_policy(policy):
        part.save_pretrained(place)
    return place


def _config_of(network: PolicyNetwork, device: str) -> DriftgenConfig:
    options = network.options()
    return DriftgenConfig(
        n_obs_steps=network.observed,
        horizon=network.horizon,
        n_action_steps=network.executed,
        input_features={key: _feature(key, shape) for key, shape in network.observations.items()},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (network.action_size,))},
        device=device,
        push_to_hub=False,
        method=network.method,
        generator=options["generator"],
        preset=options["preset"],
        options=options["options"],
        crop=options["crop"],
        image_features_size=options["image_features"],
        image_widths=options["image_widths"],
        keypoints=options["keypoints"],
    )


def _feature(key: str, shape: tuple[int, ...]) -> PolicyFeature:
    if is_image(key):
        return PolicyFeature(FeatureType.VISUAL, (shape[2], *shape[:2]))
    return PolicyFeature(FeatureType.STATE if key == STATE else FeatureType.ENV, shape)
