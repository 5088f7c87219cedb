"""Registers the policy type ``driftgen`` with LeRobot, which imports this package by its name."""

from driftgen.policy.lerobot import DriftgenConfig, DriftgenPolicy, make_driftgen_pre_post_processors

__all__ = ["DriftgenConfig", "DriftgenPolicy", "make_driftgen_pre_post_processors"]
