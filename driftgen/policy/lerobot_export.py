"""Export of a policy for LeRobot, where that is installed."""

from __future__ import annotations

from pathlib import Path

from driftgen.errors import InputError
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.support.atomic_write import check_free

__all__ = ["export_for_lerobot"]


def export_for_lerobot(source: str, folder: Path) -> Path:
    """Save a policy as a folder that LeRobot's commands load, with its processors.

    Args:
        source: as in :meth:`DriftingPolicy.from_pretrained`.
        folder: to write; must not hold anything else.
    """
    check_free(folder)
    try:
        from driftgen.policy.lerobot.lerobot_conversion import save_for_lerobot
    except ImportError as error:
        raise InputError(
            f"lerobot cannot be imported ({error}): it requires an older torch and would replace this one: "
            "install it and this package into an environment of its own, see docs/policies.md",
            topic="missing-extra",
        ) from None
    return save_for_lerobot(DriftingPolicy.from_pretrained(source), folder)
