"""Encoder of a policy's observations: states as they are, images through a small residual network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError

__all__ = ["ImageEncoder", "ObservationEncoder", "SpatialSoftmax", "is_image"]

GROUP_CHANNELS = 16  # channels of a normalization group


def is_image(key: str) -> bool:
    """Return True for the keys of cameras: ``observation.image`` and ``observation.images.NAME``."""
    return key == "observation.image" or key.startswith(("observation.images.", "observation.image."))


class ObservationEncoder(nn.Module):
    """Maps an observation history to one token per step, ``[B, K, C]``.

    A token is the concatenation of all states and of the features of each camera, in the order of the keys.

    Args:
        shapes: shape of one step by key: ``[S]`` for a state, ``[H, W, 3]`` for a camera.
        features: width of the features of one camera.
        widths: channels of each stage of the image encoder; each stage after the first halves the resolution.
        keypoints: points of the spatial softmax.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        features: int = 64,
        widths: Sequence[int] = (32, 64, 128),
        keypoints: int = 32,
    ) -> None:
        super().__init__()
        self.shapes = {key: tuple(shape) for key, shape in shapes.items()}
        if not self.shapes:
            raise InputError("observations is empty: name at least one key, such as observation.state")
        # Module names must not contain dots.
        self.cameras = nn.ModuleDict(
            {
                _module_name(key): ImageEncoder(features, widths, keypoints)
                for key in self.shapes
                if is_image(key)
            }
        )
        self.size = sum(features if is_image(k) else math.prod(shape) for k, shape in self.shapes.items())

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Encode normalized states ``[B, K, S]`` and images ``[B, K, h, w, 3]`` (uint8)."""
        parts = []
        for key in self.shapes:
            if key not in observations:
                raise InputError(f"{key} is missing: the network observes {', '.join(self.shapes)}")
            value = observations[key]
            if is_image(key):
                features: Tensor = self.cameras[_module_name(key)](value.flatten(0, 1))
                parts.append(features.unflatten(0, value.shape[:2]))
            else:
                parts.append(value.flatten(2))
        dtype = torch.promote_types(parts[0].dtype, torch.bfloat16)
        return torch.cat([part.to(dtype) for part in parts], dim=2)


class ImageEncoder(nn.Module):
    """Residual network with GroupNorm, a spatial softmax and a linear layer, for one camera.

    Diffusion Policy encodes images with such a network, trained end to end: GroupNorm instead of BatchNorm,
    because averaged weights and batch statistics do not go together, and a spatial softmax instead of
    pooling, because positions matter.
    """

    def __init__(self, features: int, widths: Sequence[int], keypoints: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 5, stride=2, padding=2)
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            blocks += [ImageBlock(channels, width, 2 if stage else 1), ImageBlock(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = _group_norm(channels)
        self.points = SpatialSoftmax(channels, keypoints)
        self.output = nn.Linear(2 * keypoints, features)

    def forward(self, images: Tensor) -> Tensor:
        """Encode images ``[B, h, w, 3]`` (uint8) to ``[B, features]``."""
        # A view with this order of axes is channels-last without a copy.
        x = images.permute(0, 3, 1, 2).to(self.stem.weight.dtype) / 127.5 - 1
        x = self.blocks(self.stem(x))
        features: Tensor = self.output(self.points(F.silu(self.norm(x))))
        return features


class ImageBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))))))."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.first_norm, self.second_norm = _group_norm(channels), _group_norm(width)
        same = channels == width and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(F.silu(self.first_norm(x)))
        out: Tensor = self.shortcut(x) + self.second(F.silu(self.second_norm(h)))
        return out


class SpatialSoftmax(nn.Module):
    """Expected image coordinates in [−1, 1] of each keypoint, ``[B, 2 · keypoints]``: x of all, then y."""

    def __init__(self, channels: int, keypoints: int) -> None:
        super().__init__()
        self.maps = nn.Conv2d(channels, keypoints, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.maps(x).float()
        height, width = logits.shape[2:]
        mass = logits.flatten(2).softmax(-1).unflatten(2, (height, width))
        columns = torch.linspace(-1, 1, width, device=x.device)
        rows = torch.linspace(-1, 1, height, device=x.device)
        points = torch.cat([mass.sum(2) @ columns, mass.sum(3) @ rows], dim=1)
        return points.to(x.dtype)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(channels // GROUP_CHANNELS, 1), channels)


def _module_name(key: str) -> str:
    return key.replace(".", "_")
