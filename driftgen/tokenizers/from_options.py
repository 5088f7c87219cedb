"""Build a tokenizer from its saved options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftgen.errors import InputError, unknown_name
from driftgen.support.checked_arguments import checked
from driftgen.support.download import is_repository
from driftgen.tokenizers.frozen_tokenizer import DTYPES
from driftgen.tokenizers.identity import Identity
from driftgen.tokenizers.protocol import Tokenizer
from driftgen.tokenizers.sd_vae import SDVAE
from driftgen.tokenizers.tiny_vae import TinyVAE

__all__ = ["build_tokenizer"]


@checked
def build_tokenizer(options: Mapping[str, Any], folder: str | Path | None = None) -> Tokenizer:
    """Build the tokenizer that ``options()`` of a tokenizer describes.

    Args:
        options: ``kind`` ("identity", "sd-vae" or "tiny") and the arguments of its class. ``source`` is a
            repository on the Hub or a folder.
        folder: the folder that ``save`` wrote the weights to. If it does not exist, ``source`` is used.
    """
    arguments = dict(options)
    kind, source = str(arguments.pop("kind", None)), arguments.pop("source", None)
    classes: dict[str, type[SDVAE] | type[TinyVAE]] = {"sd-vae": SDVAE, "tiny": TinyVAE}
    if kind != "identity" and kind not in classes:
        raise unknown_name("the tokenizer's kind", kind, ["identity", *classes])
    known = ("channels",) if kind == "identity" else classes[kind].known
    for name in arguments:
        if name not in known:
            raise unknown_name("the tokenizer's option", name, known)
    try:
        if "dtype" in arguments:
            # An unknown name is passed on: the class rejects it.
            arguments["dtype"] = DTYPES.get(arguments["dtype"], arguments["dtype"])
        if kind == "identity":
            return Identity(**arguments)
        saved = folder if folder is not None and Path(folder).is_dir() else None
        if saved is None and source is None:
            raise InputError(
                f"the tokenizer's weights are missing: {folder} is not a folder; name the one that holds them"
            )
        tokenizer = classes[kind](source if saved is None else saved, **arguments)
    except TypeError as error:
        raise InputError(f"the tokenizer's options {dict(options)} are wrong: {error}") from None
    if saved is not None and isinstance(source, str) and is_repository(source):
        tokenizer.source = source
    return tokenizer
