"""Load and save the authors' released models (JAX artifacts)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.features.backbones import Backbone
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.dit import DiT
from driftgen.interop import hub
from driftgen.interop.convnext_names import convnext_config_from, official_convnext_names
from driftgen.interop.dit_names import official_dit_config, official_dit_names, official_dit_options
from driftgen.interop.flax_msgpack import Stored, index_parameters, write_parameters
from driftgen.interop.mae_names import official_mae_arguments, official_mae_names, official_mae_options
from driftgen.support.atomic_write import atomic_write
from driftgen.support.checked_arguments import checked
from driftgen.support.meta_init import on_meta_device
from driftgen.support.untrusted_files import described_by, read_json, reading, shown

__all__ = ["is_official", "load_official", "read_metadata", "save_official"]

PARAMETERS, METADATA = "ema_params.msgpack", "metadata.json"
CONVNEXT_PARAMETERS = "params.msgpack"


def is_official(folder: Path) -> bool:
    """Return True if the folder holds a released artifact."""
    return _artifact_folder(folder) is not None


@checked
def load_official(folder: str | Path) -> nn.Module:
    """Load a released artifact: a generator as :class:`~driftgen.generators.DiT`, a masked autoencoder as
    :class:`~driftgen.features.ResNetMAE`, a ConvNeXt-V2 as :class:`~driftgen.features.Backbone`.

    Weights keep the dtype they are stored in.

    Args:
        folder: contains ``ema_params.msgpack`` and ``metadata.json``, or ``params.msgpack`` alone for a
            ConvNeXt-V2, directly or in the subfolder ``params_ema``; or ``hf://name``.
    """
    if isinstance(folder, str) and folder.startswith("hf://"):
        folder = hub.fetch(folder)
    place = _find(Path(folder))
    metadata = read_metadata(place)
    path = place / (PARAMETERS if metadata else CONVNEXT_PARAMETERS)
    parameters = index_parameters(path)
    described = place / METADATA if metadata else path
    with described_by(described, "a configuration"), on_meta_device(len(parameters)):
        try:
            model, names = _build(metadata, parameters)
        except KeyError as error:
            raise InputError(f"model_config lacks {error}") from None
    with reading(path, f"the weights that {described.name} describes"):
        model.load_state_dict(_to_ours(parameters, names, model.state_dict(), path), assign=True)
    return model


def save_official(model: nn.Module, folder: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a DiT, a ResNetMAE or a ConvNeXt-V2 as a released artifact, which :func:`load_official` and the
    authors' code read.

    Entries of ``metadata``, for example those of the artifact that the model came from, are written as they
    are. Missing entries are added.
    """
    kind = ""
    if isinstance(model, DiT):
        kind, options, names = "gen", official_dit_options(model.config), official_dit_names(model.config)
    elif isinstance(model, ResNetMAE):
        kind, options = "mae", official_mae_options(model)
        if model.decoder is not None and model.classifier is None:
            raise InputError(
                "the model has no classifier, and the authors' format needs a classifier beside the decoder: "
                "pretrain with mae.finetune_steps above 0"
            )
        names = official_mae_names(options, encoder_only=model.decoder is None)
    elif isinstance(model, Backbone):
        options = model.options()
        names = official_convnext_names(options)
    else:
        raise InputError(
            f"the model is of class {type(model).__name__}: only DiT, ResNetMAE and ConvNeXt-V2 have a "
            "released form"
        )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    path = place / (PARAMETERS if kind else CONVNEXT_PARAMETERS)
    write_parameters(path, {name: _to_theirs(name, state[names[name]]) for name in sorted(names)})
    if kind:
        record = {"format": "flax.msgpack", "kind": kind, "backend": "jax", **(metadata or {})}
        known = record.get("model_config", {})
        record["model_config"] = known | {key: value for key, value in options.items() if key not in known}
        with atomic_write(place / METADATA) as scratch:
            scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return place


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read ``metadata.json``; return an empty dict for a ConvNeXt-V2, which has none."""
    place = _find(folder)
    path = place / METADATA
    if not path.is_file():
        return {}
    metadata = read_json(path, "the description of a released model")
    if not isinstance(metadata.get("model_config"), dict):
        raise InputError(f"{path} holds no model_config")
    if metadata.get("kind") not in ("gen", "mae"):
        raise InputError(f"{path} is of kind {shown(metadata.get('kind'))}, expected 'gen' or 'mae'")
    return metadata


def _build(metadata: Mapping[str, Any], parameters: Mapping[str, Stored]) -> tuple[nn.Module, dict[str, str]]:
    """Return the model, built on the current device, and the release's names of its tensors."""
    if not metadata:
        convnext = convnext_config_from(parameters)
        return Backbone.from_convnext(**convnext), official_convnext_names(convnext)
    options = metadata["model_config"]
    if metadata["kind"] == "gen":
        config = official_dit_config(options)
        return DiT(config), official_dit_names(config)
    arguments = official_mae_arguments(options)
    # An encoder exported for its features has the configuration of the full model, but no decoder or
    # classifier.
    encoder_only = not any(name.startswith("decoder/") for name in parameters)
    if encoder_only:
        arguments |= {"decoder": False, "num_classes": None}
    return ResNetMAE(**arguments), official_mae_names(options, encoder_only=encoder_only)


def _artifact_folder(folder: Path) -> Path | None:
    """Return the folder of the artifact: the folder itself or ``params_ema`` in it."""
    for place in (folder, folder / "params_ema"):
        if (place / METADATA).is_file() or (place / CONVNEXT_PARAMETERS).is_file():
            return place
    return None


def _find(folder: Path) -> Path:
    place = _artifact_folder(folder)
    if place is None:
        raise InputError(f"{folder} holds no released model: it needs {METADATA} and {PARAMETERS}")
    return place


def _to_ours(
    parameters: Mapping[str, Stored], names: Mapping[str, str], expected: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Read the tensors under our names and in our layout."""
    unknown, missing = sorted(parameters.keys() - names.keys()), sorted(names.keys() - parameters.keys())
    if unknown or missing:
        parts = [_listed(what, some) for what, some in (("unknown", unknown), ("missing", missing)) if some]
        raise InputError(f"{path} does not fit its configuration; {'; '.join(parts)}")
    for name, stored in parameters.items():
        shape, expected_shape = _our_order(name, stored.shape), expected[names[name]].shape
        if shape != tuple(expected_shape):
            raise InputError(f"{path}: {name} has shape {list(shape)}, expected {list(expected_shape)}")
    # Tensors that are transposed are all read into one buffer: allocating and freeing a buffer for each would
    # fragment the heap and raise peak memory by half.
    memory = torch.empty(max(s.size for s in parameters.values()), dtype=torch.uint8)
    state = {}
    for name, stored in parameters.items():
        axes = _our_axes(name, len(stored.shape))
        state[names[name]] = (
            stored.read()
            if axes is None
            else stored.read(memory).permute(axes).clone(memory_format=torch.contiguous_format)
        )
    return state


def _our_axes(name: str, ndim: int) -> tuple[int, ...] | None:
    """Return the permutation to our layout; the release has convolutions HWIO and dense layers [in, out]."""
    if not name.endswith("/kernel"):
        return None
    return (3, 2, 0, 1) if ndim == 4 else (1, 0)


def _our_order(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = _our_axes(name, len(shape))
    return shape if axes is None or len(axes) != len(shape) else tuple(shape[i] for i in axes)


def _to_theirs(name: str, tensor: Tensor) -> Tensor:
    if not name.endswith("/kernel"):
        return tensor
    return (tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T).contiguous()


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what}: {', '.join(names[:5])}{more}"
