"""Download models from the Hugging Face Hub, and upload them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.interop.model_card import HERE
from driftgen.interop.saved_config import CARD
from driftgen.support.download import download, first_line, is_repository

__all__ = ["RELEASED", "RELEASE_REPOSITORY", "fetch", "is_hub_name", "upload"]

RELEASE_REPOSITORY = "Goodeat/drifting"
# The authors' models: folder in their repository, and the guidance of their evaluation (generators only).
RELEASED: dict[str, tuple[str, float | None]] = {
    "latent_L_sota": ("models/gen/jax", 1.0),
    "latent_B_sota": ("models/gen/jax", 1.1),
    "pixel_L_sota": ("models/gen/jax", 1.0),
    "pixel_B_sota": ("models/gen/jax", 1.0),
    "ablation": ("models/gen/jax", 2.0),
    "mae_latent_256": ("models/mae/jax", None),
    "mae_latent_640": ("models/mae/jax", None),
    "mae_pixel_640": ("models/mae/jax", None),
}
FILES = [
    *("config.json", "model*.safetensors", "model.safetensors.index.json", "README.md", "tokenizer/*"),
    *("metadata.json", "*.msgpack"),
]


def is_hub_name(source: str) -> bool:
    """Return True if ``source`` has the form of a name on the Hub: ``hf://name`` or ``owner/repository``."""
    return source.startswith("hf://") or is_repository(source)


def fetch(source: str) -> Path:
    """Return the local folder of a model on the Hub; download it if it is not in the cache.

    ``hf://ablation`` names one of the authors' :data:`RELEASED` models; ``owner/repository`` and
    ``hf://owner/repository`` name a repository.
    """
    name = source.removeprefix("hf://")
    if "/" in name:
        return download(name, FILES)
    if name not in RELEASED:
        known = ", ".join(f"hf://{released}" for released in RELEASED)
        raise InputError(f"{source} is not a released model: choose from {known}, or hf://owner/repository")
    inside = f"{RELEASED[name][0]}/{name}"
    folder = download(RELEASE_REPOSITORY, [f"{inside}/*"], source) / inside
    if not folder.is_dir():
        raise InputError(f"{source}: {RELEASE_REPOSITORY} has no folder {inside}")
    return folder


def upload(folder: Path, repository: str, **options: Any) -> str:
    """Upload the files of a folder, create the repository if it is missing, and return its address."""
    from huggingface_hub import HfApi

    message, private = options.pop("message", "Upload a driftgen model"), options.pop("private", None)
    api = HfApi(**options)
    card = folder / CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8")
        for own in (HERE, '"this/folder")'):  # the second one in cards of older versions
            text = text.replace(own, f'"{repository}")')
        card.write_text(text, encoding="utf-8")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    # The exceptions of huggingface_hub depend on its version and HTTP library.
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{repository} cannot be uploaded to the Hugging Face Hub: {reason}") from None
    return f"{api.endpoint}/{repository}"
