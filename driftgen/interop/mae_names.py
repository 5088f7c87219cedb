"""Options and tensor names of a released ResNet-MAE, and those of :class:`driftgen.features.ResNetMAE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftgen.features.resnet_mae import ResNetMAE

__all__ = ["official_mae_arguments", "official_mae_names", "official_mae_options"]


def official_mae_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``ResNetMAE`` for a released ``model_config``."""
    return {
        "in_channels": config["in_channels"],
        "base_channels": config["base_channels"],
        "blocks": tuple(config["layers"]),
        "patchify": config["input_patch_size"],
        "mask_patch": config["patch_size"],
        "num_classes": config["num_classes"],
    }


def official_mae_options(model: ResNetMAE) -> dict[str, Any]:
    """Return the release's ``model_config`` of a masked autoencoder."""
    return {
        "num_classes": model.num_classes,
        "in_channels": model.in_channels,
        "base_channels": model.base_channels,
        "patch_size": model.mask_patch,
        "dropout_prob": 0.0,
        "layers": list(model.blocks),
        "use_bf16": False,
        "input_patch_size": model.patchify,
    }


def official_mae_names(config: Mapping[str, Any], *, encoder_only: bool = False) -> dict[str, str]:
    """Map the Flax path of every tensor of a released MAE, joined by ``/``, to the key of our ``state_dict``.

    Convolution kernels are HWIO in the release and OIHW here, the classifier's kernel is transposed. All
    other tensors have the same layout.

    Args:
        config: the release's ``model_config``.
        encoder_only: omit the decoder and the classifier, as artifacts for features do.
    """
    names: dict[str, str] = {}

    def convolution(theirs: str, ours: str) -> None:
        names[f"{theirs}/kernel"] = f"{ours}.weight"

    def norm(theirs: str, ours: str) -> None:
        names[f"{theirs}/scale"], names[f"{theirs}/bias"] = f"{ours}.weight", f"{ours}.bias"

    convolution("encoder/conv1", "encoder.conv1")
    norm("encoder/gn1", "encoder.gn1")
    layers = config["layers"]
    for i, count in enumerate(layers):
        for k in range(count):
            theirs, ours = f"encoder/stages_{i}/layers_{k}", f"encoder.stages.{i}.{k}"
            for part in (1, 2):
                convolution(f"{theirs}/conv{part}", f"{ours}.conv{part}")
                norm(f"{theirs}/gn{part}", f"{ours}.gn{part}")
            if i > 0 and k == 0:
                convolution(f"{theirs}/proj_conv", f"{ours}.shortcut.0")
                norm(f"{theirs}/proj_gn", f"{ours}.shortcut.1")
        norm(f"encoder/layer{i + 1}_norm", f"encoder.norms.{i}")
    if encoder_only:
        return names
    convolution("decoder/bridge/conv", "decoder.bridge.conv")
    norm("decoder/bridge/gn", "decoder.bridge.gn")
    for position, level in enumerate(range(len(layers), 0, -1)):
        theirs, ours = f"decoder/up{level}{level - 1}", f"decoder.ups.{position}"
        norm(f"{theirs}/concat_norm_fn", f"{ours}.norm")
        for conv in ("proj", "refine"):
            convolution(f"{theirs}/{conv}/conv", f"{ours}.{conv}.conv")
            norm(f"{theirs}/{conv}/gn", f"{ours}.{conv}.gn")
    for theirs, ours in (("decoder/head", "decoder.head"), ("fc", "classifier")):
        names[f"{theirs}/kernel"], names[f"{theirs}/bias"] = f"{ours}.weight", f"{ours}.bias"
    return names
