"""Build the parts of a run from its configuration: data, tokenizer, generator, encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from driftgen.data.images import RealData, open_images
from driftgen.data.latents import open_latents
from driftgen.errors import InputError, OptionError
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.features.stack import DecodeFirst, Encoder, FeatureStack
from driftgen.generators.base import Generator, Noise
from driftgen.interop.model_sources import is_missing_folder
from driftgen.model_io import accepts, build_model, get_architecture, load_any
from driftgen.policy.episodes import Episodes
from driftgen.support.meta_init import check_network_size
from driftgen.tokenizers import Tokenizer, build_tokenizer
from driftgen.training import config as c
from driftgen.training.auto_encoder import pretrain_command
from driftgen.training.sharding import shard_features

__all__ = [
    "NO_PARTS",
    "Parts",
    "build_encoder",
    "build_features",
    "build_generator",
    "build_mae",
    "check_encoder_paths",
    "load_initial_weights",
    "make_tokenizer",
    "open_data",
]


class Parts(NamedTuple):
    """Parts of a run that were passed from Python, where the configuration can only describe them."""

    data: RealData | None = None  # for data.kind=memory
    generator: nn.Module | None = None  # for generator.kind=module
    encoders: Sequence[nn.Module] = ()  # for each encoder of kind=module, in order
    episodes: Episodes | None = None  # for data.kind=memory of a policy


NO_PARTS = Parts()


def open_data(config: c.Data, given: RealData | None = None) -> RealData:
    """Open the real samples of a configuration. ``given`` are those of ``data.kind=memory``."""
    if config.kind == "memory":
        if given is None:
            raise InputError("data.kind=memory: pass the data from Python, driftgen.train(..., data=...)")
        return given
    if config.kind == "latents":
        if config.path is None:
            raise InputError("data.path is not set: give the folder that driftgen encode wrote")
        return open_latents(config)
    return open_images(config)


def build_generator(
    config: c.Generator,
    shape: tuple[int, int, int],
    classes: int,
    *,
    checkpoint_blocks: bool = False,
    given: nn.Module | None = None,
) -> nn.Module:
    """Build the generator f for samples of this shape and this number of classes.

    ``given`` is the network of ``generator.kind=module``.
    """
    if config.kind == c.MODULE:
        if given is None:
            raise InputError(
                "generator.kind=module: pass the network from Python, driftgen.train(..., generator=...)"
            )
        if checkpoint_blocks:
            raise InputError("checkpoint_blocks=true: only a generator named in the recipe takes it")
        check_generator(given, shape, classes)
        return given
    entry = get_architecture("generator", config.kind)
    channels, height, width = shape
    fixed: dict[str, Any] = {"input_size": height, "in_channels": channels, "num_classes": classes}
    if height != width:
        if entry.built_in:
            raise InputError(
                f"samples are {height}x{width}, {entry.name} generates square ones: crop with data.size"
            )
        del fixed["input_size"]
    for name, value in fixed.items():
        if config.options.get(name, value) != value:
            raise InputError(f"generator.options.{name}={config.options[name]}, but the data has {value}")
    options = dict(config.options)
    if checkpoint_blocks:
        if not accepts(entry, "checkpoint_blocks"):
            raise InputError(f"checkpoint_blocks=true: {entry.name} does not take checkpoint_blocks")
        options["checkpoint_blocks"] = True
    build = partial(build_model, entry, options, preset=config.preset, if_accepted=fixed)
    try:
        if entry.built_in:
            check_network_size(build)
        network = build()
    except OptionError as error:
        raise error.within("generator.options") from None
    except InputError as error:
        raise InputError(f"generator: {error}") from None
    except TypeError as error:
        if not entry.built_in:
            raise  # a bug in the user's class: show where
        raise InputError(f"generator: {error}") from None
    if not entry.built_in:
        check_generator(network, shape, classes)
    return network


@torch.no_grad()
def check_generator(network: nn.Module, shape: tuple[int, int, int], classes: int) -> None:
    """Check with one call that a user's network has the interface and the output shape of a generator."""
    name = type(network).__name__
    if not isinstance(network, Generator):
        raise InputError(
            f"{name} is not a generator: it needs forward(noise, labels, alpha) and "
            "sample_noise(n, generator=None)"
        )
    noise = network.sample_noise(2, torch.Generator().manual_seed(0))
    if not isinstance(noise, Noise):
        raise InputError(
            f"{name}.sample_noise returns a {type(noise).__name__}, expected driftgen.generators.Noise"
        )
    parameter = next(network.parameters(), torch.empty(0))
    labels = torch.tensor([0, classes - 1], device=parameter.device)
    training = network.training
    samples = network.eval()(noise.to(parameter.device), labels, torch.ones(2, device=parameter.device))
    network.train(training)
    if samples.shape != (2, *shape):
        raise InputError(f"{name} generates {list(samples.shape[1:])}, the data has {list(shape)}")


def load_initial_weights(network: nn.Module, source: str, class_names: Sequence[str]) -> str:
    """Load the weights of a saved generator into ``network``, and return one line about it.

    Classes that the model knows by name keep their embedding; :func:`_embed_classes` makes those of others.
    """
    model, _, facts = load_any(source)
    if type(model) is not type(network):
        raise InputError(
            f"init={source} holds a {type(model).__name__}, the run trains a {type(network).__name__}: "
            "set generator.kind to that of the model"
        )
    weights, own = model.state_dict(), network.state_dict()
    for name in (*own, *weights):
        if name not in own or name not in weights:
            holder = "the model" if name in weights else "the generator of this run"
            raise InputError(
                f"init={source}: only {holder} has {name}; set generator.options to those of the model"
            )
    embedding, note = _class_embedding(network, len(class_names)), ""
    if embedding is not None and weights[embedding].shape[1:] == own[embedding].shape[1:]:
        # Without names, as many classes are taken for the same ones.
        same = list(class_names) if len(weights[embedding]) == len(class_names) else []
        known = list(facts.get("class_names") or same)
        if known != list(class_names):
            # The numbers of nameless classes say nothing about them.
            kept = {name: known.index(name) for name in class_names if name in known and not name.isdecimal()}
            weights[embedding] = _embed_classes(weights[embedding], own[embedding], class_names, kept)
            new, total = len(class_names) - len(kept), len(class_names)
            note = f"; the class embedding is new for {new} of {total} classes"
    for name, tensor in own.items():
        if weights[name].shape != tensor.shape:
            raise InputError(
                f"init={source}: {name} has shape {list(weights[name].shape)}, the generator of this run has "
                f"{list(tensor.shape)}; set data and generator.options to those of the model"
            )
    network.load_state_dict(weights)
    return f"generator weights from {source}{note}"


def _embed_classes(
    trained: Tensor, own: Tensor, class_names: Sequence[str], kept: Mapping[str, int]
) -> Tensor:
    """Return the embedding of each class: the row of ``trained`` that ``kept`` names, or a new one.

    New ones are the initial weights ``own``, moved and scaled to the mean and the spread of the trained ones:
    the network tells classes apart at that scale, which the far smaller initial weights would reach late.
    """
    mean, spread = trained.mean(0), trained.std(0, correction=0)
    embeddings = mean + own * (spread / own.std().clamp(min=1e-12)).clamp(min=1)
    for row, name in enumerate(class_names):
        if name in kept:
            embeddings[row] = trained[kept[name]]
    return embeddings


def _class_embedding(network: nn.Module, classes: int) -> str | None:
    """Return the name of the weight that embeds the class, if the network has one."""
    embeddings = [
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == classes
    ]
    ours = "conditioning.classes.weight"  # the name in every generator of this package
    if ours in embeddings:
        return ours
    return embeddings[0] if len(embeddings) == 1 else None


def build_features(
    config: c.TrainConfig,
    shape: tuple[int, int, int],
    tokenizer: Tokenizer | None,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    given: Sequence[nn.Module] = (),
) -> FeatureStack:
    """Build φ: every encoder of the configuration, and the sample itself. One sample is passed through it.

    If two encoders have a kind or the name of a feature in common, features are named ``encoder0/layer1``.
    With a mesh, each process holds its shard of the encoders. ``given`` are the encoders of kind ``module``.
    """
    check_encoder_paths(config)
    modules = iter(given)
    entries: list[tuple[Encoder, dict[str, Any]]] = []
    for i, entry in enumerate(config.encoders):
        encoder: Any = (
            next(modules, None) if entry.kind == c.MODULE else build_encoder(entry, f"encoders.{i}")
        )
        if encoder is None:
            raise InputError(
                f"encoders.{i}.kind=module: pass the encoder from Python, driftgen.train(..., encoders=...)"
            )
        if entry.decode_first:
            if tokenizer is None:
                raise InputError(f"encoders.{i}.decode_first is set, but tokenizer is not")
            encoder = DecodeFirst(encoder, tokenizer)
        entries.append((encoder, dict(entry.switches)))
    # Encoders that will be sharded may not fit on one device.
    probe_device = device if mesh is None else torch.device("cpu")
    stack = FeatureStack({f"encoder{i}": entry for i, entry in enumerate(entries)}, vanilla=config.vanilla)
    stack.to(probe_device)
    try:
        with torch.no_grad():
            prefixed = stack.features(torch.zeros(1, *shape, device=probe_device))
    except (InputError, TypeError) as error:
        raise InputError(f"encoders do not fit samples of shape {list(shape)}: {error}") from None
    names = [name.split("/", 1)[-1] for name in prefixed]
    kinds = [entry.kind for entry in config.encoders if entry.kind != c.MODULE]
    # Two encoders of a kind have prefixes even if their switches leave no name in common.
    if len(set(names)) == len(names) and len(set(kinds)) == len(kinds):
        stack = FeatureStack(entries, vanilla=config.vanilla)
    if mesh is not None:
        shard_features(stack, mesh)
        stack.to(device)  # the tokenizer is not sharded
    return stack


def check_encoder_paths(config: c.TrainConfig) -> None:
    """Raise if an encoder is a run folder that does not exist: a missing run is no name on the Hub."""
    paths = [path for entry in config.encoders if entry.kind == "mae" for path in (entry.path, *entry.pool)]
    for path in paths:
        if path is not None and is_missing_folder(path):
            command = pretrain_command(path, config.data.path, about=config.about)
            raise InputError(f"Encoder {path} not found. Train it first: {command}", topic="not-found")


def build_encoder(config: c.Encoder, where: str) -> nn.Module:
    """Build or load one encoder; ``where`` names it in messages."""
    if config.kind == c.AUTO:
        raise InputError(f"{where}.kind=auto is not resolved: start the run with driftgen train")
    entry = get_architecture("encoder", config.kind)
    if config.path is None or entry.path == "argument":
        try:
            if config.path is not None:
                return entry.build(config.path, **config.options)
            return build_model(entry, config.options)
        except TypeError as error:
            if not entry.built_in:
                raise  # a bug in the user's class: show where
            raise InputError(f"{where}.options: {error}") from None
    if config.options:
        raise InputError(f"{where}.options: a saved model has its own options, remove them or the path")
    encoder = load_any(config.path).model
    if not isinstance(encoder, entry.model):
        raise InputError(
            f"{where}.path: {config.path} holds a {type(encoder).__name__}, expected {entry.model.__name__}"
        )
    if isinstance(encoder, ResNetMAE):
        encoder.decoder = encoder.classifier = None  # not needed for features
    return encoder


def build_mae(config: c.Masking, shape: tuple[int, int, int], classes: int | None) -> ResNetMAE:
    """Build the masked autoencoder to pretrain, with a classifier if its last steps fine-tune one."""
    preset = ResNetMAE.preset_options(config.preset) if config.preset else {}
    options: dict[str, Any] = {**preset, **config.options, "in_channels": shape[0]}
    options["num_classes"] = classes if config.finetune_steps else None
    try:
        check_network_size(partial(ResNetMAE, **options))
        model = ResNetMAE(**options)
        with torch.no_grad():
            model.patches(torch.zeros(1, *shape))
    except OptionError as error:
        raise error.within("mae.options") from None
    except (InputError, TypeError) as error:
        raise InputError(f"mae: {error}") from None
    return model


def make_tokenizer(options: dict[str, Any] | None, device: torch.device) -> Tokenizer | None:
    """Build the tokenizer of a configuration, if it has one."""
    if options is None:
        return None
    tokenizer = build_tokenizer(options, Path(options["folder"]) if "folder" in options else None)
    if isinstance(tokenizer, nn.Module):
        tokenizer.to(device)
    return tokenizer
