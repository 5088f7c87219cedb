"""From a configuration to the parts of a run: generator, encoders, tokenizer, data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from driftgen.data.images import RealData, open_images
from driftgen.data.latents import open_latents
from driftgen.errors import InputError
from driftgen.features.backbones import Backbone
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.features.stack import DecodeFirst, Encoder, FeatureStack
from driftgen.generators.dit import DiT
from driftgen.generators.image_mlp import ImageMLP
from driftgen.generators.unet import UNet2D
from driftgen.interop.convert import load_any
from driftgen.pipeline import find_model
from driftgen.tokenizers import Tokenizer, build_tokenizer
from driftgen.training import config as c
from driftgen.training.sharding import shard_features

__all__ = ["build_features", "build_generator", "build_mae", "open_data"]

GENERATORS: dict[str, Any] = {"dit": DiT, "unet": UNet2D, "mlp": ImageMLP}


def open_data(config: c.Data) -> RealData:
    """The real samples that a configuration names."""
    if config.kind == "latents":
        if config.path is None:
            raise InputError("data.path is not set: give the folder that driftgen encode wrote")
        return open_latents(config)
    return open_images(config)


def build_generator(
    config: c.Generator, shape: tuple[int, int, int], classes: int, *, checkpoint_blocks: bool = False
) -> nn.Module:
    """f, for samples of this shape and so many classes."""
    channels, height, width = shape
    if height != width:
        raise InputError(f"samples are {height}x{width}: generators make square ones, crop with data.size")
    kind = GENERATORS[config.kind]
    fixed = {"input_size": height, "in_channels": channels, "num_classes": classes}
    for name, value in fixed.items():
        if config.options.get(name, value) != value:
            raise InputError(f"generator.options.{name}={config.options[name]}, but the data has {value}")
    options: dict[str, Any] = {**config.options, **fixed}
    if checkpoint_blocks:
        options["checkpoint_blocks"] = True
    try:
        built = kind(**options) if config.preset is None else kind.preset(config.preset, **options)
    except (InputError, TypeError) as error:
        raise InputError(f"generator: {error}") from None
    network: nn.Module = built
    return network


def build_features(
    config: c.TrainConfig,
    shape: tuple[int, int, int],
    tokenizer: Tokenizer | None,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> FeatureStack:
    """φ: every encoder of the configuration, and the sample itself. Looked at with one sample.

    With a mesh, each process holds its share of the encoders.
    """
    entries: list[tuple[Encoder, dict[str, Any]]] = []
    for i, entry in enumerate(config.encoders):
        encoder: Any
        if entry.kind == "mae":
            folder = find_model(entry.path)
            encoder, _ = load_any(folder, entry.path)
            if not isinstance(encoder, ResNetMAE):
                raise InputError(f"encoders.{i}.path: {entry.path} holds a {type(encoder).__name__}, no MAE")
            encoder.decoder = encoder.classifier = None  # only its features are used
        elif entry.kind == "backbone":
            encoder = Backbone(entry.path)
        else:
            encoder = Backbone.resnet50(entry.path)
        if entry.decode_first:
            if tokenizer is None:
                raise InputError(f"encoders.{i}.decode_first is set, but tokenizer is not")
            encoder = DecodeFirst(encoder, tokenizer)
        entries.append((encoder, dict(entry.switches)))
    # What is to be shared may be too large for one device: the look is on the CPU.
    place = device if mesh is None else torch.device("cpu")
    stack = FeatureStack(entries, vanilla=config.vanilla).to(place)
    try:
        with torch.no_grad():
            stack.features(torch.zeros(1, *shape, device=place))
    except (InputError, TypeError) as error:
        raise InputError(f"encoders do not fit samples of shape {list(shape)}: {error}") from None
    if mesh is not None:
        shard_features(stack, mesh)
        stack.to(device)  # a tokenizer is not shared
    return stack


def build_mae(config: c.Masking, shape: tuple[int, int, int], classes: int | None) -> ResNetMAE:
    """The masked autoencoder to pretrain; with a classifier if it is fine-tuned."""
    preset = ResNetMAE.preset_options(config.preset) if config.preset else {}
    options: dict[str, Any] = {**preset, **config.options, "in_channels": shape[0]}
    options["num_classes"] = classes if config.finetune_steps else None
    try:
        model = ResNetMAE(**options)
        with torch.no_grad():
            model.patches(torch.zeros(1, *shape))
    except (InputError, TypeError) as error:
        raise InputError(f"mae: {error}") from None
    return model


def make_tokenizer(options: dict[str, Any] | None, device: torch.device) -> Tokenizer | None:
    """The tokenizer of a configuration, if it has one."""
    if options is None:
        return None
    tokenizer = build_tokenizer(options, Path(options["folder"]) if "folder" in options else None)
    if isinstance(tokenizer, nn.Module):
        tokenizer.to(device)
    return tokenizer
