"""The registry of architectures, and models as folders: ``config.json`` (architecture and options),
``model.safetensors`` or its shards (weights) and ``README.md`` (model card)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from driftgen.errors import InputError
from driftgen.features.backbones import Backbone
from driftgen.features.efficientnet_lite import EfficientNetLite
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.chunk_mlp import ChunkMLP
from driftgen.generators.conv_decoder import ConvDecoder
from driftgen.generators.dit import DiT
from driftgen.generators.image_mlp import ImageMLP
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.generators.transformer import ChunkTransformer
from driftgen.generators.unet import UNet2D
from driftgen.generators.unet1d import UNet1D
from driftgen.interop import hub
from driftgen.interop.model_card import saved_source
from driftgen.interop.model_sources import find_model
from driftgen.interop.official import is_official, load_official, read_metadata, save_official
from driftgen.interop.run_models import RUN_MODEL
from driftgen.interop.saved_config import (
    CONFIG,
    SavedConfig,
    check_overwrite,
    check_tokenizer,
    model_options,
    new_config,
    read_config,
    tokenizer_checksums,
    write_description,
)
from driftgen.support.atomic_write import check_free
from driftgen.support.checked_arguments import checked
from driftgen.support.meta_init import on_meta_device
from driftgen.support.plugins import listed_failures, load_entry_points
from driftgen.support.sharded_safetensors import count_tensors, read_weights, write_weights
from driftgen.support.untrusted_files import reason

__all__ = [
    "CONFIG",
    "RUN_MODEL",
    "Architecture",
    "LoadedModel",
    "SavedConfig",
    "build_model",
    "find_model",
    "from_official",
    "get_architecture",
    "load_any",
    "load_model",
    "read_config",
    "register_encoder",
    "register_generator",
    "save_model",
    "to_official",
]

Kind = Literal["generator", "encoder", "policy"]

# --- the registry ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """One entry of the registry.

    Attributes:
        kind: generator of images, encoder, or policy (a policy's network, or its generator of chunks).
        name: the name in recipes (``generator.kind``, ``encoders.N.kind``).
        model: the class.
        saved_as: the name in ``config.json``; None if the class has no saved form.
        build: builds a model from keyword options; the class itself by default.
        built_in: True for the classes of this package.
        path: use of an encoder's ``path`` in a recipe: the folder of a saved model (``"model"``), or the
            first argument of ``build`` (``"argument"``).
    """

    kind: Kind
    name: str
    model: type[nn.Module]
    saved_as: str | None
    build: Callable[..., nn.Module]
    built_in: bool = True
    path: Literal["model", "argument"] = "model"


# A new generator or encoder is one file and one line here.
_REGISTRY: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture("generator", "dit", DiT, "DiT", DiT),
        Architecture("generator", "unet", UNet2D, "UNet2D", UNet2D),
        Architecture("generator", "mlp", ImageMLP, "ImageMLP", ImageMLP),
        Architecture("generator", "decoder", ConvDecoder, "ConvDecoder", ConvDecoder),
        Architecture("policy", "unet1d", UNet1D, "UNet1D", UNet1D),
        Architecture("policy", "transformer", ChunkTransformer, "ChunkTransformer", ChunkTransformer),
        Architecture("policy", "chunk-mlp", ChunkMLP, "ChunkMLP", ChunkMLP),
        Architecture("policy", "policy", PolicyNetwork, "PolicyNetwork", PolicyNetwork),
        Architecture("encoder", "mae", ResNetMAE, "ResNetMAE", ResNetMAE),
        Architecture("encoder", "convnext", Backbone, "ConvNeXtV2", Backbone.from_convnext),
        Architecture("encoder", "backbone", Backbone, None, Backbone, path="argument"),
        Architecture("encoder", "resnet50", Backbone, None, Backbone.resnet50, path="argument"),
        Architecture(
            "encoder", "efficientnet-lite0", EfficientNetLite, None, EfficientNetLite, path="argument"
        ),
    )
}


def register_generator(name: str, cls: type[nn.Module]) -> None:
    """Register a generator class, so that recipes can name it and its saved models load.

    A recipe then says ``generator: {kind: NAME, options: {...}}``, and the class is built as
    ``cls(**options)``. The data fixes ``input_size``, ``in_channels`` and ``num_classes``; each is passed if
    ``cls`` takes an argument of that name. An instance needs ``forward(noise, labels, alpha)`` and
    ``sample_noise(n, generator=None)``, see :class:`~driftgen.generators.Generator`. An optional method
    ``options()`` returns the arguments that build the instance again; without it, saving records the options
    that the recipe passed.
    """
    _check_class("register_generator", name, cls, "sample_noise")
    _register(Architecture("generator", name, cls, name, cls, built_in=False))


def register_encoder(name: str, cls: type[nn.Module]) -> None:
    """Register an encoder class, so that recipes can name it and its saved models load.

    A recipe then says ``encoders: [{kind: NAME, options: {...}}]`` for ``cls(**options)``, or ``path:`` for
    a saved model of this class. An instance needs ``features(x, **switches)``, see
    :class:`~driftgen.features.Encoder`. ``options()`` is as in :func:`register_generator`.
    """
    _check_class("register_encoder", name, cls, "features")
    _register(Architecture("encoder", name, cls, name, cls, built_in=False))


def get_architecture(kind: Kind, name: str) -> Architecture:
    """Return the registered generator or encoder of this name. Plugins are loaded if it is not known yet."""
    entry = _REGISTRY.get(name)
    if entry is not None and entry.kind == kind:
        return entry
    failures = _load_plugins()
    known = {n: e for n, e in _REGISTRY.items() if e.kind == kind}
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"{kind} {name!r} is not registered: {hint}choose from {', '.join(sorted(known))}, or call "
        f"driftgen.register_{kind}({name!r}, YourClass) first{listed_failures(failures)}"
    )


def build_model(
    entry: Architecture,
    options: Mapping[str, Any],
    *,
    preset: str | None = None,
    if_accepted: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a model from its options, or from the options on top of a preset.

    ``if_accepted`` are further arguments for classes that have parameters of these names.
    """
    arguments = {**options, **{k: v for k, v in (if_accepted or {}).items() if accepts(entry, k)}}
    if preset is not None:
        from_preset = getattr(entry.model, "preset", None)
        if from_preset is None:
            raise InputError(f"{entry.name} has no presets: remove preset={preset!r}")
        model: nn.Module = from_preset(preset, **arguments)
        return model
    if entry.built_in:
        return entry.build(**arguments)
    try:
        inspect.signature(entry.build).bind(**arguments)
    except TypeError as error:
        taken = ", ".join(inspect.signature(entry.build).parameters) or "none"
        raise InputError(f"{entry.name}: {error}; its options are {taken}") from None
    model = entry.build(**arguments)
    vars(model)["_driftgen_options"] = arguments  # a plain attribute: copies of the model keep it
    return model


def accepts(entry: Architecture, option: str) -> bool:
    """Return True if the class can be built with this option."""
    parameters = inspect.signature(entry.build).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def registered_name(cls: type[nn.Module], *, saved: bool = True) -> str | None:
    """Return the saved name of a class, or its name in recipes; None if the class is not registered."""
    entry = next((e for e in _REGISTRY.values() if e.model is cls and e.saved_as), None)
    return None if entry is None else entry.saved_as if saved else entry.name


def _register(entry: Architecture) -> None:
    cls = entry.model
    for other in _REGISTRY.values():
        if entry.name in (other.name, other.saved_as):
            owner = f"{other.model.__module__}.{other.model.__qualname__}"
            # A notebook cell that runs again defines the same class anew.
            again = owner == f"{cls.__module__}.{cls.__qualname__}" and other.kind == entry.kind
            if other.built_in or not again:
                raise InputError(f"name={entry.name!r} is registered for {owner}: choose another name")
    _REGISTRY[entry.name] = entry


def _check_class(function: str, name: str, cls: Any, method: str) -> None:
    if not isinstance(name, str) or not name or name == "module" or not name.replace("_", "").isalnum():
        raise InputError(f"name={name!r}: use letters, digits and underscores, such as 'my_net'")
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError(f"{function}: {cls!r} is not a subclass of torch.nn.Module")
    if not callable(getattr(cls, method, None)):
        raise InputError(f"{function}: {cls.__name__} has no method {method}")


@functools.cache
def _load_plugins() -> tuple[str, ...]:
    """Load the plugins of other packages, once; return one line per failure."""
    return load_entry_points("driftgen.plugins")


# --- a model as a folder ----------------------------------------------------------------------------------


class LoadedModel(NamedTuple):
    """A loaded model, its folder, and the entries of :class:`SavedConfig` that describe it."""

    model: nn.Module
    folder: Path
    facts: dict[str, Any]


@checked
def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    **facts: Any,
) -> Path:
    """Save a model of a registered class as a folder.

    Args:
        model: the model.
        folder: created if missing.
        dtype: dtype of the saved weights; the model's own if None. ``torch.int8`` saves 8 bits per weight and
            a scale per output channel; such a model loads in float32.
        max_shard_size: largest weight file, in bytes or as text such as ``"5GB"``. A larger model is split
            into shards with an index, in the format of transformers.
        overwrite: replace a model that the folder holds; otherwise it is an error.
        facts: further entries of :class:`SavedConfig`.
    """
    name = registered_name(type(model))
    if name is None:
        cls = type(model).__name__
        raise InputError(
            f"{cls} is not registered: call driftgen.register_generator or driftgen.register_encoder with "
            f"a name and {cls} before saving"
        )
    if dtype is not None and not dtype.is_floating_point and dtype != torch.int8:
        raise InputError(f"dtype={dtype}: choose torch.int8 or a floating-point type, such as torch.bfloat16")
    facts["source"] = saved_source(facts.get("source", {}), model, dtype)
    config = new_config(name, model_options(model), **facts)
    place = Path(folder)
    check_overwrite(place, overwrite)
    place.mkdir(parents=True, exist_ok=True)
    checksums = write_weights(place, model.state_dict(), max_shard_size, dtype)
    if config.tokenizer is not None:
        checksums |= tokenizer_checksums(place)
    config = config.model_copy(update={"checksums": checksums})
    write_description(place, config, _by_saved_name(name).kind, model)
    return place


@checked
def load_model(source: str | Path, *, verify: bool = True) -> nn.Module:
    """Load a model in the dtype it was saved in; ``source`` is as in :func:`find_model`.

    ``verify`` compares the weight files with the checksums of ``config.json``, which takes about a second
    per 1-2 GB.
    """
    return load_any(source, verify=verify).model


def load_any(source: str | Path, weights: str | None = None, *, verify: bool = True) -> LoadedModel:
    """Load a saved model or one of the authors' artifacts, with everything known about it.

    Arguments are those of :func:`find_model` and :func:`load_model`.
    """
    folder = find_model(str(source), weights)
    if is_official(folder):
        return LoadedModel(load_official(folder), folder, _official_facts(folder, str(source)))
    config = read_config(folder)
    keep = {"tokenizer", "class_names", "guidance", "source", "official"}
    return LoadedModel(_load(folder, config, verify), folder, config.model_dump(include=keep))


def _by_saved_name(name: str) -> Architecture:
    """Return the architecture that ``config.json`` names. Plugins are loaded if it is not known yet."""
    for load in (tuple, _load_plugins):
        failures = load()
        for entry in _REGISTRY.values():
            if entry.saved_as == name:
                return entry
    known = ", ".join(sorted(e.saved_as for e in _REGISTRY.values() if e.saved_as))
    raise InputError(
        f"architecture={name!r} is not registered, only {known}: call driftgen.register_generator({name!r}, "
        f"YourClass) or driftgen.register_encoder before loading{listed_failures(failures)}"
    )


def _load(folder: Path, config: SavedConfig, verify: bool = True) -> nn.Module:
    try:
        entry = _by_saved_name(config.architecture)
    except InputError as error:
        raise InputError(f"{folder / CONFIG}: {error}") from None
    stored = count_tensors(folder)
    try:
        # Constructors of other packages may compute buffers that no file holds.
        with on_meta_device(stored) if entry.built_in else nullcontext():
            model = build_model(entry, config.options)
    except Exception as error:
        raise InputError(
            f"{folder / CONFIG}: options do not fit {config.architecture}: {reason(error)}"
        ) from None
    checksums = config.checksums if verify else {}
    load_weights(model, folder, assign=entry.built_in, checksums=checksums)
    check_tokenizer(folder, checksums)
    return model.eval() if entry.kind == "encoder" else model


def load_weights(
    model: nn.Module, folder: Path, *, assign: bool = False, checksums: Mapping[str, str] | None = None
) -> None:
    """Load the weights of a folder into a model, which takes over their dtype.

    ``assign`` replaces the parameters, as a model on the meta device needs; otherwise they are copied into,
    and parameters that share memory still do.
    """
    obsolete = getattr(model, "obsolete_weights", ())
    state = read_weights(folder, model.state_dict(), obsolete, checksums)
    if not assign:
        dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            model.to(dtypes.pop())
    model.load_state_dict(state, assign=assign)


# --- the authors' artifacts -------------------------------------------------------------------------------


def from_official(source: str, out: Path) -> Path:
    """Convert an artifact (a folder, or ``hf://name``) to a saved model."""
    folder = find_model(source) if Path(source).is_dir() else hub.fetch(source)
    if not is_official(folder):
        if (folder / CONFIG).is_file():
            raise InputError(f"{source} holds a driftgen model already; back: driftgen convert to-official")
        read_metadata(folder)  # raises: names the missing files
    check_free(out)
    return save_model(load_official(folder), out, **_official_facts(folder, source))


def to_official(source: str | Path, out: Path) -> Path:
    """Convert a saved model to an artifact that the authors' code reads; inverse of :func:`from_official`.

    ``source`` is as in :func:`find_model`.
    """
    folder = find_model(str(source))
    config = read_config(folder)
    check_free(out)
    return save_official(_load(folder, config), out, config.official)


def _official_facts(folder: Path, source: str) -> dict[str, Any]:
    metadata = read_metadata(folder)
    name = source.removeprefix("hf://")
    released = name in hub.RELEASED
    origin = f"{hub.RELEASE_REPOSITORY}, {name}" if released else "an artifact in the authors' format"
    record = {"artifact": origin} | {key: metadata[key] for key in ("step", "ema_decay") if key in metadata}
    guidance = hub.RELEASED[name][1] if released else None
    return {"source": record, "official": metadata} | ({} if guidance is None else {"guidance": guidance})
