"""Download repositories from the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from driftgen.errors import InputError

__all__ = ["download", "first_line", "is_repository"]


def is_repository(name: str) -> bool:
    """Return True if ``name`` has the form of a Hub repository, ``owner/repository``."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def download(repository: str, patterns: Sequence[str], asked: str | None = None) -> Path:
    """Download the files that match ``patterns``, unless they are cached, and return their folder.

    Error messages mention ``asked``, the name that the user gave, instead of the repository.
    """
    name = asked or repository
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError:
        raise InputError(
            f"{name} is neither a folder here nor in the local cache, and "
            "the Hugging Face Hub cannot be reached: "
            "download it on a machine with a network and give the folder instead",
            topic="download",
        ) from None
    # Versions of huggingface_hub raise the exceptions of different HTTP libraries.
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{name} cannot be downloaded from the Hugging Face Hub: {reason}", topic="download"
        ) from None


def first_line(error: Exception) -> str:
    """Return the first non-empty line of an error message, or the name of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
