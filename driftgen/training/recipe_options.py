"""The options of the networks of a recipe, with the defaults that hold for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from driftgen.errors import InputError
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.policy_network import CHUNK_GENERATORS
from driftgen.interop.saved_config import model_options
from driftgen.model_io import Architecture, build_model, get_architecture
from driftgen.support.meta_init import on_meta_device
from driftgen.support.option_docs import Option, as_recipe_value, describe_options
from driftgen.training.config import AUTO, PretrainConfig, TrainConfig
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.recipes import RunConfig

__all__ = ["FROM_DATA", "OptionSection", "recipe_options"]

FROM_DATA = ("input_size", "in_channels", "num_classes")  # options that a recipe does not set
FROM_RECIPE = ("action_size", "horizon", "condition_size", "observed")  # of a policy, or of its data


class OptionSection(NamedTuple):
    """Options of one network: the key of their section in the recipe, the network, the options."""

    key: str
    about: str
    options: list[Option]


def recipe_options(config: RunConfig) -> list[OptionSection]:
    """Return the options of the generator and the encoders, or of the autoencoder to pretrain.

    A network that was passed from Python has none.
    """
    if isinstance(config, PolicyConfig):
        return list(_policy(config))
    return list(_pretraining(config) if isinstance(config, PretrainConfig) else _training(config))


def _policy(config: PolicyConfig) -> Iterator[OptionSection]:
    generator = config.generator
    kind = CHUNK_GENERATORS[generator.kind]
    preset: Mapping[str, Any] = {}
    if generator.preset is not None:
        with on_meta_device():
            preset = model_options(kind.preset(generator.preset))
    options = [o for o in describe_options(kind) if o.name not in FROM_RECIPE]
    about = _about(generator.kind, generator.preset)
    yield OptionSection("generator.options", about, _in_effect(options, preset, generator.options))


def _pretraining(config: PretrainConfig) -> Iterator[OptionSection]:
    mae = config.mae
    preset = ResNetMAE.preset_options(mae.preset) if mae.preset else {}
    options = _in_effect(describe_options(ResNetMAE), preset, mae.options, ("in_channels", "num_classes"))
    yield OptionSection("mae.options", _about("ResNetMAE", mae.preset), options)


def _training(config: TrainConfig) -> Iterator[OptionSection]:
    generator = config.generator
    entry = _find("generator", generator.kind)
    if entry is not None:
        preset: Mapping[str, Any] = {}
        if generator.preset is not None:
            with on_meta_device():
                preset = model_options(build_model(entry, {}, preset=generator.preset))
        target = entry.model if entry.built_in else entry.build
        options = _in_effect(describe_options(target), preset, generator.options, FROM_DATA)
        yield OptionSection("generator.options", _about(generator.kind, generator.preset), options)
    for i, encoder in enumerate(config.encoders):
        kind = "mae" if encoder.kind == AUTO else encoder.kind  # the switches of auto are those of a mae
        entry = _find("encoder", kind)
        if entry is None:
            continue
        if encoder.kind != AUTO and (encoder.path is None or entry.path == "argument"):
            first = list(describe_options(entry.build))[:1] if entry.path == "argument" else []
            described = describe_options(entry.build, [option.name for option in first])
            options = _in_effect(described, {}, encoder.options)
            if options:
                yield OptionSection(f"encoders.{i}.options", encoder.kind, options)
        features: Any = getattr(entry.model, "features", None)
        switches = _in_effect(describe_options(features, ["x"]), {}, encoder.switches)
        if switches:
            about = f"{kind}, arguments of features()"
            yield OptionSection(f"encoders.{i}.switches", about, switches)


def _find(kind: Any, name: str) -> Architecture | None:
    try:
        return get_architecture(kind, name)
    except InputError:  # a module from Python, or a kind that is resolved when the run starts
        return None


def _about(name: str, preset: str | None) -> str:
    return name if preset is None else f"{name}, preset {preset}"


def _in_effect(
    options: list[Option],
    preset: Mapping[str, Any],
    given: Mapping[str, Any],
    from_data: tuple[str, ...] = (),
) -> list[Option]:
    """Replace the defaults by those of the preset, of the recipe, or of the data."""
    changed = []
    for option in options:
        default = as_recipe_value(preset[option.name]) if option.name in preset else option.default
        if option.name in from_data:
            default = "from the data"
        elif option.name in given:
            default = f"{as_recipe_value(given[option.name])} (set here; otherwise {default})"
        changed.append(option._replace(default=default))
    return changed
