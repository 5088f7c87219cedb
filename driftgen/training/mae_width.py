"""Widths at which features of a masked autoencoder would not depend on the image."""

from __future__ import annotations

from collections.abc import Sequence

from driftgen.errors import InputError
from driftgen.features.resnet_layers import count_dead_stages
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.training.config import Masking

__all__ = ["check_mae_width"]


def check_mae_width(config: Masking) -> None:
    """Raise if a feature of the masked autoencoder would not depend on the image."""
    preset = ResNetMAE.preset_options(config.preset) if config.preset else {}
    width = {**preset, **config.options}.get("base_channels")
    blocks = {**preset, **config.options}.get("blocks", (3, 4, 6, 3))
    if not isinstance(width, int) or width < 1 or not isinstance(blocks, Sequence):
        return  # building the network reports it
    dead = count_dead_stages(width, len(blocks))
    if dead:
        names = [f"layer{i + 1}_{kind}" for i in range(dead) for kind in ("mean", "std")]
        near = [w for w in range(8, 256, 8) if w > width and not count_dead_stages(w, len(blocks))][:2]
        raise InputError(
            f"mae.options.base_channels={width}: {', '.join(names[:-1])} and {names[-1]} would be the same "
            "for every image, since up to 32 channels each channel is normalized on its own; the nearest "
            f"widths without such features are {near[0]} and {near[1]}: "
            f"--set mae.options.base_channels={near[0]}"
        )
