"""Checksums of files, to record which weights a result belongs to."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["files_checksum", "weights_checksum"]

WEIGHTS = {".safetensors", ".msgpack"}


def weights_checksum(folder: Path) -> str:
    """Return the SHA-256 of the weight files of a model's folder, as :func:`files_checksum` does."""
    return files_checksum(*(path for path in folder.rglob("*") if path.suffix in WEIGHTS))


def files_checksum(*paths: Path) -> str:
    """Return the SHA-256 of a file; for several files, that of their digests in the order of their paths."""
    digests = []
    for path in sorted(paths):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
