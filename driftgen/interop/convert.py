"""The authors' artifacts and our folders: either is read, and each becomes the other without losing a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from driftgen.errors import InputError
from driftgen.interop import hub
from driftgen.interop.official import is_official, load_official, read_metadata, save_official
from driftgen.model_io import load_model, read_config, save_model

__all__ = ["from_official", "load_any", "to_official"]


def load_any(folder: Path, name: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The model of an artifact or of a saved folder, and what else is known of it, as entries of
    :class:`~driftgen.model_io.SavedConfig`. ``name`` is what it was asked for by.
    """
    if not is_official(folder):
        config = read_config(folder)
        keep = {"tokenizer", "class_names", "guidance", "source", "official"}
        return load_model(folder), config.model_dump(include=keep)
    metadata = read_metadata(folder)
    known = (name or "").removeprefix("hf://")
    released = known in hub.RELEASED
    source = {
        "artifact": f"{hub.RELEASE_REPOSITORY}, {known}" if released else "an artifact in the authors' form"
    }
    source |= {key: metadata[key] for key in ("step", "ema_decay") if key in metadata}
    facts: dict[str, Any] = {"source": source, "official": metadata}
    guidance = hub.RELEASED[known][1] if released else None
    return load_official(folder), facts | ({} if guidance is None else {"guidance": guidance})


def from_official(source: str, out: Path) -> Path:
    """Writes an artifact (a folder, or ``hf://name``) as a saved model: safetensors and config.json."""
    folder = hub.fetch(source) if source.startswith("hf://") else Path(source)
    if not is_official(folder):
        _ = read_metadata(folder)  # says what is missing
    _check_free(out)
    model, facts = load_any(folder, source)
    return save_model(model, out, **facts)


def to_official(source: Path, out: Path) -> Path:
    """Writes a saved model as an artifact that the authors' code reads; the inverse of
    :func:`from_official`.
    """
    config = read_config(source)
    _check_free(out)
    return save_official(load_model(source), out, config.official)


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder: name another one")
