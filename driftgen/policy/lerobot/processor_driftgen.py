"""Processors of a policy for LeRobot: normalization to [−1, 1] before the network, and back after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    UnnormalizerProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from torch import Tensor

from driftgen.policy.lerobot.configuration_driftgen import DriftgenConfig
from driftgen.policy.processor import MinMax

__all__ = ["lerobot_statistics", "make_driftgen_pre_post_processors"]

BEFORE, AFTER = "policy_preprocessor", "policy_postprocessor"  # LeRobot's names of the files


def make_driftgen_pre_post_processors(
    config: DriftgenConfig, dataset_stats: dict[str, dict[str, Tensor]] | None = None
) -> tuple[Any, Any]:
    """Return the pipelines around the network: of observations, and of actions.

    Args:
        config: features and how they are normalized.
        dataset_stats: ``min`` and ``max`` of each feature.
    """
    features = {**(config.input_features or {}), **(config.output_features or {})}
    shared = {"norm_map": config.normalization_mapping, "stats": dataset_stats}
    before = PolicyProcessorPipeline(
        steps=[
            RenameObservationsProcessorStep(rename_map={}),
            AddBatchDimensionProcessorStep(),
            DeviceProcessorStep(device=config.device),
            NormalizerProcessorStep(features=features, **shared),
        ],
        name=BEFORE,
    )
    after = PolicyProcessorPipeline(
        steps=[
            UnnormalizerProcessorStep(features=config.output_features, **shared),
            DeviceProcessorStep(device="cpu"),
        ],
        name=AFTER,
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return before, after


def lerobot_statistics(
    statistics: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, dict[str, Tensor]]:
    """Return statistics of a :class:`~driftgen.generators.policy_network.PolicyNetwork` as LeRobot has them.

    A constant dimension gets a range of 2 around its value: LeRobot then only shifts it, as
    :class:`~driftgen.policy.processor.MinMax` does.
    """
    result = {}
    for key, entry in statistics.items():
        range_ = MinMax(entry["low"], entry["high"])
        result[key] = {"min": range_.center - range_.half, "max": range_.center + range_.half}
    return {
        key: {name: value.to(torch.float32) for name, value in row.items()} for key, row in result.items()
    }
