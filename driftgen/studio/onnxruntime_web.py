"""onnxruntime-web runs networks inside a browser. Its files come from a folder, the cache or npm's registry.

They are not part of the package: 14 MB, of which a page needs two files. The npm package has no license file;
the MIT license of its repository is beside this module.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_folder
from driftgen.support.untrusted_files import reason
from driftgen.support.user_paths import cache_folder, expand_user

__all__ = ["FILES", "LICENSE", "VERSION", "find_runtime"]

VERSION = "1.30.0"
# SHA-512 of the package, as npm lists it.
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
MOST_BYTES = 2**26  # of the package
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
LICENSE = Path(__file__).parent / "onnxruntime-LICENSE.txt"
REGISTRY = "https://registry.npmjs.org"
BY_HAND = f"run 'npm install onnxruntime-web@{VERSION}' and give its node_modules with --runtime"
SECONDS = 30  # without an answer


def find_runtime(
    folder: Path | None = None, on_download: Callable[[str], object] = lambda line: None
) -> Path:
    """Return the folder with :data:`FILES`.

    Args:
        folder: a ``node_modules`` or a folder in one, of any version that has these files. None: the cache,
            which is filled from npm's registry by the first call.
        on_download: called with one line before a download.
    """
    if folder is not None:
        given = expand_user(folder)
        for place in (given, *(given / inner for inner in ("dist", "onnxruntime-web/dist"))):
            if all((place / name).is_file() for name in FILES):
                return place
        nested = given / "node_modules"
        if nested.is_dir() and given.name != "node_modules":
            return find_runtime(nested)
        raise InputError(f"{folder} does not hold onnxruntime-web ({', '.join(FILES)}): {BY_HAND}")
    cached = cache_folder() / f"onnxruntime-web-{VERSION}"
    if not all((cached / name).is_file() for name in FILES):
        on_download(f"downloading onnxruntime-web {VERSION} (33 MB) to {cached}")
        _download(cached)
    return cached


def _download(folder: Path) -> None:
    """Fetch the package from npm's registry, compare its checksum, and keep :data:`FILES`."""
    # npm's own variable, for registries inside a company.
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or REGISTRY
    url = f"{registry.rstrip('/')}/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"
    with tempfile.TemporaryFile() as package:
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                found = _copy(answer, package)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(
                f"onnxruntime-web cannot be downloaded from {url} ({reason(error)}): "
                f"on a machine with a network, {BY_HAND}"
            ) from None
        if found != INTEGRITY:
            raise InputError(
                f"{url} is damaged or another package: its SHA-512 is {found}, not {INTEGRITY}; {BY_HAND}"
            )
        package.seek(0)
        with atomic_folder(folder) as scratch, tarfile.open(fileobj=package, mode="r:gz") as archive:
            for name in FILES:
                member = archive.extractfile(f"package/dist/{name}")
                assert member is not None  # of a known package
                (scratch / name).write_bytes(member.read())


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy a download of at most :data:`MOST_BYTES` and return its SHA-512 as npm writes it."""
    digest, size = hashlib.sha512(), 0
    while size <= MOST_BYTES and (part := source.read(2**20)):
        digest.update(part)
        target.write(part)
        size += len(part)
    return base64.b64encode(digest.digest()).decode()
