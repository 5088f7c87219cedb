"""Files of a repository on the Hugging Face Hub -> a folder on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from driftgen.errors import InputError

__all__ = ["download", "first_line", "is_repository"]


def is_repository(name: str) -> bool:
    """Whether ``name`` reads like one on the Hub: ``owner/repository``."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def download(repository: str, patterns: Sequence[str], asked: str | None = None) -> Path:
    """The folder of a repository's files that fit ``patterns``, fetched where they are not in the cache.

    ``asked`` is what the person asked for, if not the repository itself.
    """
    name = asked or repository
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError:
        raise InputError(
            f"{name} is not in the local cache and the Hugging Face Hub cannot be reached: "
            "download it on a machine with a network and give the folder instead"
        ) from None
    # Each version of huggingface_hub raises the exceptions of another HTTP library.
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{name} cannot be fetched from the Hugging Face Hub: {reason}") from None


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
