"""Load autoencoders in the format of diffusers, from a folder or from the Hugging Face Hub."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.support.download import download, is_repository
from driftgen.support.untrusted_files import reading

__all__ = ["load_network", "local_folder", "require_diffusers"]

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"


def require_diffusers(feature: str) -> None:
    """Raise an error that names the extra to install if diffusers is missing."""
    if importlib.util.find_spec("diffusers") is None:
        raise InputError(f"{feature} needs diffusers: pip install 'driftgen[latent]'", topic="missing-extra")


def local_folder(source: str | Path) -> tuple[Path, str | None]:
    """Return the folder of an autoencoder and, if it was downloaded, the name of its repository."""
    path, name = Path(source), str(source)
    if path.is_dir():
        return path, None
    if path.exists() or not is_repository(name):
        raise InputError(f"{name} is neither a folder nor a name on the Hugging Face Hub (owner/repository)")
    return download(name, [CONFIG, WEIGHTS]), name


def load_network(kind: str, folder: Path) -> Any:
    """Load the diffusers class ``kind`` from ``folder``. Only safetensors weights are read."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} holds no autoencoder: it needs {CONFIG} and {WEIGHTS}")
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle, which can run code: convert it to safetensors" if pickled else ""
        raise InputError(f"{folder} holds no {WEIGHTS}{hint}")
    # Importing diffusers takes seconds, so only after the checks above.
    library: Any = importlib.import_module("diffusers")
    with reading(folder, kind):
        # low_cpu_mem_usage=True would require accelerate. The loading info lists weights left uninitialized.
        network, info = getattr(library, kind).from_pretrained(
            folder, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True
        )
    problems = [
        f"{problem}: {', '.join(sorted(info[key])[:5])}"
        for problem, key in (("missing", "missing_keys"), ("unknown", "unexpected_keys"))
        if info[key]
    ]
    if problems:
        raise InputError(f"{folder} does not match {kind}; {'; '.join(problems)}")
    return network
