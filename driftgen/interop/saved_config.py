"""``config.json`` of a saved model, and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

import driftgen
from driftgen.errors import InputError
from driftgen.interop.model_card import model_card
from driftgen.support.atomic_write import atomic_write
from driftgen.support.sharded_safetensors import WEIGHTS, check_files, file_checksum
from driftgen.support.untrusted_files import read_json, shown

__all__ = [
    "CARD",
    "CONFIG",
    "TOKENIZER",
    "VERSION",
    "SavedConfig",
    "check_overwrite",
    "check_tokenizer",
    "model_options",
    "read_config",
    "tokenizer_checksums",
    "write_description",
]

CONFIG, CARD = "config.json", "README.md"
TOKENIZER = "tokenizer"  # the tokenizer's folder inside a model's folder
VERSION = 1


class SavedConfig(BaseModel):
    """The contents of ``config.json``. Unknown keys are refused.

    Attributes:
        format: marks the file as one of this package.
        version: version of the file format.
        architecture: name of the model's class in the registry.
        options: keyword arguments that build the model.
        tokenizer: options of :func:`driftgen.tokenizers.build_tokenizer`; None for encoders.
        class_names: name of each label, in order.
        guidance: default α for sampling.
        source: origin of the weights, for the model card.
        official: ``metadata.json`` of the released artifact that the model was converted from; needed to
            convert it back bit for bit.
        checksums: SHA-256 of each weight file by its path in the folder; empty for models of versions before
            checksums.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["driftgen"]
    version: int
    architecture: str
    options: dict[str, Any]
    tokenizer: dict[str, Any] | None = None
    class_names: list[str] | None = None
    guidance: float = Field(default=1.0, ge=1.0, le=1e6)
    source: dict[str, Any] = {}
    official: dict[str, Any] | None = None
    checksums: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = {}


def read_config(folder: Path) -> SavedConfig:
    """Read and check the ``config.json`` of a model's folder."""
    path = folder / CONFIG
    if not path.exists():
        raise InputError(f"{folder} holds no model: {CONFIG} and {WEIGHTS} are expected in it")
    record = read_json(path, "the description of a model")
    if record.get("format") != "driftgen":
        raise InputError(f"{path} does not describe a driftgen model{_foreign(record)}")
    if record.get("version") != VERSION:
        raise InputError(
            f"{path} has version {shown(record.get('version'))}, driftgen {driftgen.__version__} reads "
            f"version {VERSION}: update driftgen, or save the model again"
        )
    try:
        return SavedConfig.model_validate(record)
    except ValidationError as error:
        raise InputError(f"{path}: {_first_problem(error)}") from None


def new_config(architecture: str, options: Mapping[str, Any], **facts: Any) -> SavedConfig:
    """Return the description of a model to save; ``facts`` are further entries of :class:`SavedConfig`."""
    entries = {"format": "driftgen", "version": VERSION, "architecture": architecture, "options": options}
    try:
        config = SavedConfig.model_validate({**entries, **facts})
        json.dumps(config.model_dump())
    except ValidationError as error:
        raise InputError(f"{architecture}: {_first_problem(error)}") from None
    except TypeError as error:
        raise InputError(f"{architecture}: its options cannot be written to {CONFIG}: {error}") from None
    return config


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def write_description(folder: Path, config: SavedConfig, kind: str, model: nn.Module) -> None:
    """Write card and ``config.json`` of a model; the latter last, so that a folder with it is complete."""
    count = sum(p.numel() for p in model.parameters())
    with atomic_write(folder / CARD) as scratch:
        card = model_card(config.architecture, kind, count, config.options, config.source, config.guidance)
        scratch.write_text(card, encoding="utf-8")
    with atomic_write(folder / CONFIG) as scratch:
        scratch.write_text(json.dumps(config.model_dump(), indent=2) + "\n", encoding="utf-8")


def check_overwrite(folder: Path, overwrite: bool) -> None:
    """Raise if saving a model into the folder would replace a file, unless ``overwrite``."""
    if overwrite or not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir()}
    weights = sorted(name for name in names if name.startswith("model") and ".safetensors" in name)
    taken = [name for name in (CONFIG, *weights, CARD, TOKENIZER) if name in names]
    if taken:
        raise InputError(
            f"{folder} holds {taken[0]} already: choose another folder, or pass overwrite=True",
            topic="file-exists",
        )


def tokenizer_checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight file of the tokenizer in a model's folder."""
    return {name: file_checksum(folder / name) for name in _tokenizer_files(folder)}


def check_tokenizer(folder: Path, checksums: Mapping[str, str]) -> None:
    """Compare the weight files of the tokenizer with their checksums."""
    check_files(folder, {name: checksums[name] for name in _tokenizer_files(folder) if name in checksums})


def _tokenizer_files(folder: Path) -> list[str]:
    return sorted(f"{TOKENIZER}/{path.name}" for path in (folder / TOKENIZER).glob("*.safetensors"))


def model_options(model: nn.Module) -> dict[str, Any]:
    """Return the options that build the model again, as far as the model tells them."""
    options, config = getattr(model, "options", None), getattr(model, "config", None)
    if callable(options):
        return dict(options())
    if "_driftgen_options" in vars(model):
        return dict(vars(model)["_driftgen_options"])
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    return dict(config) if isinstance(config, Mapping) else {}


def _foreign(record: Any) -> str:
    if isinstance(record, Mapping):
        for key in ("_class_name", "model_type", "architectures", "architecture"):
            if key in record:
                return f": {key} is {shown(record[key])}"
    return ""
