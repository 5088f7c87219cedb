"""Encoders of images for evaluation: the FID Inception, trained encoders, pixels. Each knows its identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.evaluation.inception import FEATURES, load_inception
from driftgen.model_io import load_any
from driftgen.support.checksum import weights_checksum
from driftgen.support.tf32 import tf32
from driftgen.support.user_paths import expand_user

__all__ = ["TF32", "Encoder", "load_encoder", "wrap_encoder"]

PIXELS, INCEPTION, TF32 = "pixels", "inception", "tf32"
WEIGHT_FILES = (".pt", ".pth")
Output = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Encoder:
    """Maps uint8 images ``[n, C, H, W]`` to features ``[n, D]`` in float32.

    Attributes:
        name: in tables and files.
        distance: name of the Fréchet distance in this space: "FID" for the FID Inception only.
        identity: everything that determines the features: weights checksum, resize, dtype.
        function: returns features, and logits for the Inception score or None.
        device: of the features.
    """

    name: str
    distance: str
    identity: Mapping[str, Any]
    function: Callable[[Tensor], Output]
    device: torch.device

    def __call__(self, images: Tensor) -> Tensor:
        """Return features of images."""
        return self.encode(images)[0]

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Output:
        """Return features of images, and logits for the Inception score or None."""
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise InputError(f"images are {images.dtype} {list(images.shape)}, expected uint8 [n, C, H, W]")
        with tf32(self.identity.get("dtype") == TF32):
            features, logits = self.function(images.to(self.device))
        return features.float(), logits


def load_encoder(
    name: str | Path, device: str | torch.device = "cpu", *, force: bool = False, fast: bool = False
) -> Encoder:
    """Load an encoder.

    Args:
        name: ``pixels`` for the images themselves; a ``.pt`` or ``.pth`` file of the FID Inception; or a
            trained encoder: a pretraining run, a saved encoder, an artifact of the authors, a backbone.
        device: of the encoder.
        force: accept Inception weights with an unknown checksum.
        fast: run the Inception in TF32 on an NVIDIA GPU: 3 times as fast, and FID moves by less than 0.001.
    """
    place = torch.device(device)
    if str(name) == PIXELS:
        identity = {"encoder": PIXELS}
        return Encoder(PIXELS, f"FD-{PIXELS}", identity, lambda x: (x.flatten(1).float() / 255, None), place)
    path = expand_user(name)
    if path.suffix.lower() in WEIGHT_FILES:
        return _inception(path, place, force, fast)
    model = load_any(name).model
    if not callable(getattr(model, "features", None)):
        raise InputError(
            f"{name} is no encoder ({type(model).__name__}): give a pretraining run, pixels, or "
            "the file of the FID Inception"
        )
    return wrap_encoder(model, path.name or str(name), place)


def wrap_encoder(model: nn.Module, name: str, device: str | torch.device) -> Encoder:
    """Return an evaluation encoder: mean and standard deviation of each of the network's last maps.

    Features are the global ``*_mean`` and ``*_std`` of ``model.features``, concatenated over stages.
    """
    place = torch.device(device)
    model = model.to(place).eval()

    def encode(images: Tensor) -> Output:
        channels = getattr(model, "in_channels", images.shape[1])
        if channels == 3 and images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        x = images.float() / 127.5 - 1
        pyramid = _features(model, x, name)
        chosen = [
            v.flatten(1).float() for k, v in pyramid.items() if k.endswith("_mean") or k.endswith("_std")
        ]
        if not chosen:
            chosen = [v.float().mean(dim=1) for v in pyramid.values()]
        return torch.cat(chosen, dim=1), None

    identity = {
        "encoder": name,
        "class": type(model).__name__,
        "weights": weights_checksum(model),
        "dtype": "float32",
    }
    return Encoder(name, f"FD-{name}", identity, encode, place)


def _features(model: Any, x: Tensor, name: str) -> Mapping[str, Tensor]:
    try:
        pyramid: Mapping[str, Tensor] = model.features(x)
    except (RuntimeError, ValueError) as error:
        shape = "x".join(map(str, x.shape[1:]))
        raise InputError(f"{name} takes no images of {shape}: {str(error).splitlines()[0]}") from None
    return pyramid


def _inception(path: Path, device: torch.device, force: bool, fast: bool) -> Encoder:
    network, checksum = load_inception(path, force=force)
    network = network.to(device)
    identity = {
        "encoder": "FID Inception 2015-12-05",
        "weights": checksum,
        "resize": "TensorFlow 1 bilinear to 299x299, no half-pixel shift, (x - 128) / 128",
        "dtype": TF32 if fast else "float32",
        "features": FEATURES,
    }

    batch = 250 if device.type == "cuda" else 50  # bounds the memory of the first maps

    def encode(images: Tensor) -> Output:
        parts = [network(part.expand(-1, 3, -1, -1)) for part in images.split(batch)]
        features = torch.cat([part for part, _ in parts])
        logits = [part for _, part in parts if part is not None]
        return features, torch.cat(logits) if logits else None

    return Encoder(INCEPTION, "FID", identity, encode, device)
