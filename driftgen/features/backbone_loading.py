"""Find, check and load networks of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from driftgen.errors import InputError
from driftgen.features.resnet50_checkpoints import IMAGENET, listed
from driftgen.support.download import download, is_repository
from driftgen.support.untrusted_files import read_json, reading

__all__ = [
    "CONVNEXT",
    "RESNET",
    "check_network",
    "find_folder",
    "import_transformers",
    "load_backbone",
    "read_normalization",
]

CONVNEXT, RESNET = "convnextv2", "resnet"


def import_transformers() -> Any:
    """Import transformers, or raise an error that names the extra to install."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "Backbone needs transformers: pip install 'driftgen[encoders]'", topic="missing-extra"
        ) from None


def check_network(model: Any, kind: str) -> None:
    """Raise if the network has no feature maps or does not take three channels."""
    parts = {CONVNEXT: ("embeddings", "encoder", "layernorm"), RESNET: ("embedder", "encoder")}
    for part in ("config", *parts.get(kind, ("out_features",))):
        if not hasattr(model, part):
            raise InputError(
                f"{type(model).__name__} has no feature maps: use ConvNextV2Model, ResNetModel or a "
                "backbone of transformers"
            )
    channels = getattr(model.config, "num_channels", 3)
    if channels != 3:
        raise InputError(
            f"{type(model).__name__} takes images of {channels} channels: use a network for 3 channels"
        )


def find_folder(name_or_folder: str | Path) -> Path:
    """Return the folder itself, or download a repository of the Hub and return its folder."""
    folder = Path(name_or_folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} holds no config.json: give the folder of a transformers model")
        return folder
    if folder.exists():
        raise InputError(f"{folder} is a file: give a folder, or pass a weights file to Backbone.resnet50")
    name = str(name_or_folder)
    if isinstance(name_or_folder, Path) or not is_repository(name):
        raise InputError(f"{name} does not exist: give a folder or a name on the Hub (owner/repository)")
    import_transformers()
    snapshot = download(name, ["*.json", "*.safetensors"])
    if not any(snapshot.glob("*.safetensors")):
        snapshot = download(name, ["*.json", "pytorch_model*.bin"])
    return snapshot


def read_normalization(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read the mean and standard deviation that the network expects, for images in 0 ... 1."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return IMAGENET
    with reading(path, "the normalization of images"):
        record = read_json(path, "the normalization of images")
        mean, std = record.get("image_mean", IMAGENET[0]), record.get("image_std", IMAGENET[1])
        if not record.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        factor = float(record.get("rescale_factor", 1 / 255)) if record.get("do_rescale", True) else 1.0
        scale = 255 * factor
        # Convert to images in 0 ... 1, whatever range the folder rescales to.
        means, deviations = (tuple(float(value) / scale for value in values) for values in (mean, std))
        if not all(0 < abs(d) < 1e9 for d in deviations) or not all(abs(m) < 1e9 for m in means):
            raise ValueError(f"mean {mean}, standard deviation {std}")
        return means, deviations


def load_backbone(folder: Path, stages: Sequence[str] | None) -> Any:
    """Load the network; missing weights are an error."""
    transformers = import_transformers()
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            known = {CONVNEXT: "ConvNextV2Model", RESNET: "ResNetModel"}
            if config.model_type in known:
                if stages is not None:
                    raise InputError(
                        f"stages={list(stages)} does not apply to {config.model_type}, which returns all "
                        "stages: leave it out"
                    )
                model_class = getattr(transformers, known[config.model_type])
            else:
                config.out_features = _choose_stages(config, stages)
                # AutoBackbone.from_pretrained of transformers 5 queries the Hub even for a folder.
                with torch.device("meta"):
                    model_class = type(transformers.AutoBackbone.from_config(config))
            model, info = model_class.from_pretrained(
                folder, config=config, local_files_only=True, output_loading_info=True
            )
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{folder} cannot be read as a backbone ({type(error).__name__}: {reason})"
        ) from error
    # Some transformers backbones add norms that the trained network lacks. They keep their initial value, the
    # plain normalization.
    missing = sorted(name for name in info["missing_keys"] if "hidden_states_norms" not in name)
    if missing:
        raise InputError(f"{folder} lacks weights of a {config.model_type}; {listed('missing', missing)}")
    return model


def _choose_stages(config: Any, stages: Sequence[str] | None) -> list[str]:
    names = [name for name in getattr(config, "stage_names", []) if name != "stem"]
    if not names:
        raise InputError(
            f"{config.model_type} is not a transformers backbone: it has no feature maps; use a model that "
            "AutoBackbone supports"
        )
    if stages is None:
        count = min(4, len(names))
        return [names[len(names) * (i + 1) // count - 1] for i in range(count)]
    unknown = [name for name in stages if name not in names]
    if unknown or not stages:
        raise InputError(f"stages={list(stages)} must be chosen from {', '.join(names)}")
    return [name for name in names if name in stages]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress the progress bar and the report of unused weights, such as those of the classifier."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
