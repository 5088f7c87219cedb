"""Tensor names of a released ConvNeXt-V2, and those of :class:`driftgen.features.backbones.Backbone`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from driftgen.errors import InputError

__all__ = ["convnext_config_from", "official_convnext_names"]


class HasShape(Protocol):
    """A tensor, in memory or stored in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def convnext_config_from(parameters: Mapping[str, HasShape]) -> dict[str, Any]:
    """Return the arguments of :meth:`Backbone.from_convnext` for released parameters.

    The release has no metadata: depths, widths and number of classes follow from the tensors.
    """
    depths: list[int] = []
    dims: list[int] = []
    while (name := _widening(len(dims))) in parameters:
        blocks = re.compile(rf"stages_{len(dims)}/layers_(\d+)/")
        indices = {int(match[1]) for path in parameters if (match := blocks.match(path))}
        depths.append(max(indices, default=-1) + 1)
        dims.append(parameters[name].shape[-1])
    if not dims or min(depths) < 1:
        lacking = _widening(0) if not dims else f"stages_{depths.index(0)}/layers_0"
        raise InputError(f"the parameters are not those of a released ConvNeXt-V2: {lacking} is missing")
    head = parameters.get("head/kernel")
    classes = None if head is None else head.shape[-1]
    return {"depths": depths, "dims": dims, "num_classes": classes}


def official_convnext_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Map the Flax path of every tensor of a released ConvNeXt-V2, joined by ``/``, to the key of our
    ``state_dict``.

    Convolutions are HWIO in the release and OIHW here (depthwise ``[7, 7, 1, C]`` and ``[C, 1, 7, 7]``),
    dense layers are transposed. All other tensors have the same layout, also γ and β of the global response
    normalization, ``[1, 1, 1, C]``.

    Args:
        config: what :func:`convnext_config_from` returns.
    """
    names: dict[str, str] = {}

    def layer(theirs: str, ours: str, weight: str, bias: str = "bias") -> None:
        names[f"{theirs}/{weight}"], names[f"{theirs}/{bias}"] = f"{ours}.weight", f"{ours}.bias"

    for i, count in enumerate(config["depths"]):
        theirs, ours = f"downsample_layers_{i}", f"model.encoder.stages.{i}"
        if i == 0:  # the stem convolves first, later stages normalize first
            layer(f"{theirs}/layers_0", "model.embeddings.patch_embeddings", "kernel")
            layer(f"{theirs}/layers_1", "model.embeddings.layernorm", "weight")
        else:
            layer(f"{theirs}/layers_0", f"{ours}.downsampling_layer.0", "weight")
            layer(f"{theirs}/layers_1", f"{ours}.downsampling_layer.1", "kernel")
        for k in range(count):
            theirs, block = f"stages_{i}/layers_{k}", f"{ours}.layers.{k}"
            layer(f"{theirs}/dwconv", f"{block}.dwconv", "kernel")
            layer(f"{theirs}/norm", f"{block}.layernorm", "weight")
            layer(f"{theirs}/pwconv1", f"{block}.pwconv1", "kernel")
            layer(f"{theirs}/grn", f"{block}.grn", "gamma", "beta")
            layer(f"{theirs}/pwconv2", f"{block}.pwconv2", "kernel")
    layer("norm", "model.layernorm", "scale")
    if config["num_classes"] is not None:
        layer("head", "head", "kernel")
    return names


def _widening(stage: int) -> str:
    """Return the name of the convolution that begins a stage."""
    return f"downsample_layers_{stage}/layers_{0 if stage == 0 else 1}/kernel"
