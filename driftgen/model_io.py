"""A model as a folder: ``config.json`` (what it is), ``model.safetensors`` (its numbers), ``README.md`` (its
card)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import driftgen
from driftgen.errors import InputError
from driftgen.features.backbones import Backbone
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.dit import DiT
from driftgen.generators.image_mlp import ImageMLP
from driftgen.generators.unet import UNet2D
from driftgen.support.atomic_write import atomic_write
from driftgen.support.meta_init import on_meta_device

__all__ = ["CONFIG", "WEIGHTS", "SavedConfig", "load_model", "read_config", "save_model"]

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
VERSION = 1


class SavedConfig(BaseModel):
    """What ``config.json`` holds. A key that is not listed here is refused.

    Attributes:
        format: tells this kind of folder from others that have a config.json too.
        version: of this form; a newer one is refused.
        architecture: the class of the model.
        options: the arguments it is built with.
        tokenizer: how samples become images, see :func:`driftgen.tokenizers.build_tokenizer`; None for
            encoders.
        class_names: the name of each label, in order.
        guidance: α to sample with unless told otherwise.
        source: where the weights come from, free text pairs.
        official: the ``metadata.json`` of the released artifact this was converted from, so that it can be
            written again as it was.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["driftgen"]
    version: int
    architecture: str
    options: dict[str, Any]
    tokenizer: dict[str, Any] | None = None
    class_names: list[str] | None = None
    guidance: float = Field(default=1.0, ge=1.0)
    source: dict[str, Any] = {}
    official: dict[str, Any] | None = None


class Architecture(NamedTuple):
    """How one class of models is built from ``options``, and described by them."""

    kind: Literal["generator", "encoder"]
    model: type[nn.Module]
    build: Callable[[dict[str, Any]], nn.Module]
    describe: Callable[[Any], dict[str, Any]]


ARCHITECTURES = {
    "DiT": Architecture("generator", DiT, lambda o: DiT(**o), lambda m: asdict(m.config)),
    "UNet2D": Architecture("generator", UNet2D, lambda o: UNet2D(**o), lambda m: asdict(m.config)),
    "ImageMLP": Architecture("generator", ImageMLP, lambda o: ImageMLP(**o), lambda m: asdict(m.config)),
    "ResNetMAE": Architecture("encoder", ResNetMAE, lambda o: ResNetMAE(**o), lambda m: m.options()),
    "ConvNeXtV2": Architecture(
        "encoder", Backbone, lambda o: Backbone.from_convnext(**o), lambda m: m.options()
    ),
}


def save_model(model: nn.Module, folder: str | Path, **facts: Any) -> Path:
    """Writes the folder of a model; ``facts`` are further entries of :class:`SavedConfig`.

    ``config.json`` comes last, so that a folder that has it is whole.
    """
    name = next((n for n, a in ARCHITECTURES.items() if type(model) is a.model), None)
    if name is None:
        known = ", ".join(ARCHITECTURES)
        raise InputError(
            f"model is a {type(model).__name__}: only {known} can be saved as a folder; "
            "save the state_dict of your own network with safetensors"
        )
    config = SavedConfig(
        format="driftgen",
        version=VERSION,
        architecture=name,
        options=ARCHITECTURES[name].describe(model),
        **facts,
    )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    with atomic_write(place / WEIGHTS) as scratch:
        save_file(tensors, scratch, metadata={"format": "pt"})
    with atomic_write(place / CARD) as scratch:
        scratch.write_text(_card(config, model), encoding="utf-8")
    with atomic_write(place / CONFIG) as scratch:
        scratch.write_text(json.dumps(config.model_dump(), indent=2) + "\n", encoding="utf-8")
    return place


def load_model(folder: str | Path) -> nn.Module:
    """The model of a folder that :func:`save_model` wrote, in the number type it was saved in."""
    place = Path(folder)
    config = read_config(place)
    architecture = ARCHITECTURES[config.architecture]
    try:
        with on_meta_device():
            model = architecture.build(config.options)
    except (InputError, TypeError) as error:
        raise InputError(f"{place / CONFIG}: options do not fit {config.architecture}: {error}") from None
    state = _read_weights(place / WEIGHTS, model.state_dict())
    model.load_state_dict(state, assign=True)
    return model.eval() if architecture.kind == "encoder" else model


def read_config(folder: Path) -> SavedConfig:
    """``config.json`` of a model's folder, checked."""
    path = folder / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no model: {CONFIG} and {WEIGHTS} are expected in it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(record, dict) or record.get("format") != "driftgen":
        raise InputError(f"{path} is not that of a driftgen model{_foreign(record)}")
    if record.get("version") != VERSION:
        raise InputError(
            f"{path} has version {record.get('version')!r}, this driftgen {driftgen.__version__} reads "
            f"version {VERSION}: update driftgen, or save the model again"
        )
    try:
        config = SavedConfig.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {where}: {first['msg']}") from None
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{path}: architecture={config.architecture!r} is not known, only {known}")
    return config


def _foreign(record: Any) -> str:
    if isinstance(record, Mapping):
        for key in ("_class_name", "model_type", "architectures", "architecture"):
            if key in record:
                return f": {key} is {record[key]!r}"
    return ""


def _read_weights(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            problems = [
                f"{what}: {', '.join(sorted(found)[:5])}{' ...' if len(found) > 5 else ''}"
                for what, found in (("unknown", names - set(expected)), ("missing", set(expected) - names))
                if found
            ]
            if problems:
                raise InputError(f"{path} does not fit {CONFIG}; {'; '.join(problems)}")
            for name, want in expected.items():
                shape = list(file.get_slice(name).get_shape())
                if shape != list(want.shape):
                    raise InputError(f"{path}: {name} has shape {shape}, expected {list(want.shape)}")
            return {name: file.get_tensor(name) for name in expected}
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: the folder is not whole, copy it again") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): copy it again") from None


def _card(config: SavedConfig, model: nn.Module) -> str:
    count = sum(p.numel() for p in model.parameters())
    kind = ARCHITECTURES[config.architecture].kind
    options = "\n".join(f"| {key} | {value} |" for key, value in config.options.items())
    source = "".join(f"- {key}: {value}\n" for key, value in config.source.items())
    if kind == "generator":
        use = (
            "import driftgen as dg\n\n"
            'pipe = dg.DriftPipeline.from_pretrained("this/folder")\n'
            f"images = pipe(labels=[0], guidance={config.guidance:g}, seed=0)  # one network call per image"
        )
    else:
        use = (
            "import driftgen as dg\n\n"
            'encoder = dg.load_model("this/folder")\n'
            "features = encoder.features(images)"
        )
    origin = (
        f"Where the weights come from:\n\n{source}"
        if source
        else "Where the weights come from is not recorded.\n"
    )
    return f"""---
library_name: driftgen
tags:
- drifting-models
- one-step-generation
---
# {config.architecture}, {count / 1e6:.1f}M parameters

A {kind} of the [Drifting Models](https://lambertae.github.io/projects/drifting) kind, in the folder format of
driftgen {driftgen.__version__}.

```python
{use}
```

{origin}
| option | value |
|---|---|
{options}
"""
