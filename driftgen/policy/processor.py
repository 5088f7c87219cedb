"""Processing around the network of a policy: normalization to [−1, 1] and crops of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError
from driftgen.generators.observation_encoder import is_image
from driftgen.policy.episodes import Episodes
from driftgen.support.dense_tensors import check_dense

__all__ = ["ACTION", "MinMax", "Processor", "as_array", "center_crop", "image_bytes", "measure_statistics"]

ACTION = "action"  # key of the actions in statistics
CONSTANT = 1e-4  # a dimension with a smaller range is constant
BEYOND = 0.1  # brightness that is clamped; more is another range, such as 0 to 255 or -1 to 1
Array = NDArray[Any]


class MinMax:
    """Maps each dimension from [low, high] to [−1, 1]; a constant dimension becomes 0, shifted only.

    The normalization of Diffusion Policy. Values beyond the range of the demonstrations are not clipped.

    Args:
        low: smallest value of each dimension.
        high: largest value of each dimension.
    """

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        lows, highs = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        self.center = ((lows + highs) / 2).float()
        half = (highs - lows) / 2
        self.half = torch.where(half * 2 < CONSTANT, 1.0, half).float()

    def normalize(self, values: Tensor) -> Tensor:
        """Map values ``[..., D]`` to [−1, 1]."""
        return (values.float() - self.center.to(values.device)) / self.half.to(values.device)

    def restore(self, values: Tensor) -> Tensor:
        """Map values ``[..., D]`` from [−1, 1] to their own units."""
        return values.float() * self.half.to(values.device) + self.center.to(values.device)


def measure_statistics(episodes: Episodes) -> dict[str, dict[str, list[float]]]:
    """Return the smallest and largest value of each dimension of actions and states, in float32."""
    arrays = {ACTION: episodes.actions} | {k: v for k, v in episodes.observations.items() if not is_image(k)}
    result = {}
    for key, values in arrays.items():
        flat = np.asarray(values, dtype=np.float32)
        if not np.isfinite(flat).all():
            raise InputError(f"{key} contains NaN or infinite values: remove those episodes")
        result[key] = {"low": flat.min(axis=0).tolist(), "high": flat.max(axis=0).tolist()}
    return result


class Processor:
    """Normalizes observations for a network and restores the units of its actions.

    Args:
        shapes: shape of one step by key of the observations.
        statistics: as in :class:`~driftgen.generators.policy_network.PolicyNetwork`.
        crop: height and width that images are cropped to; None for the whole image.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        statistics: Mapping[str, Mapping[str, Sequence[float]]],
        crop: Sequence[int] | None = None,
    ) -> None:
        self.shapes, self.crop = dict(shapes), crop
        wanted = [ACTION, *(key for key in shapes if not is_image(key))]
        missing = [key for key in wanted if key not in statistics]
        if missing:
            raise InputError(f"statistics of {missing[0]} are missing: save the policy again from its run")
        self.normalizers = {key: MinMax(statistics[key]["low"], statistics[key]["high"]) for key in wanted}

    def prepare(self, observations: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return normalized states and center-cropped images ``[B, K, ...]`` on a device.

        Further keys are ignored. Bad shapes raise InputError.
        """
        prepared = {}
        for key, shape in self.shapes.items():
            if key not in observations:
                given = ", ".join(observations) or "none"
                raise InputError(
                    f"{key} is missing: the policy observes {', '.join(self.shapes)}; got {given}"
                )
            value = as_values(key, observations[key])
            if is_image(key):
                _check_brightness(key, value)
                value = image_bytes(key, value, shape)
            if tuple(value.shape[2:]) != tuple(shape):
                raise InputError(
                    f"{key} has shape {list(value.shape)}, expected [batch, steps, "
                    f"{', '.join(map(str, shape))}]"
                )
            value = value.to(device)
            prepared[key] = center_crop(value, self.crop) if is_image(key) else self.normalize(key, value)
        return prepared

    def normalize(self, key: str, values: Tensor) -> Tensor:
        """Normalize actions (key ``action``) or a state."""
        return self.normalizers[key].normalize(values)

    def restore_actions(self, chunks: Tensor) -> Tensor:
        """Return normalized actions in the units of the environment."""
        return self.normalizers[ACTION].restore(chunks)


def as_values(key: str, value: Any) -> Tensor:
    """Return an observation, an array or nested lists of numbers, as a dense tensor."""
    try:
        read_only = isinstance(value, np.ndarray) and not value.flags.writeable  # PyTorch would warn
        tensor = torch.as_tensor(value.copy() if read_only else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{key} must be an array of numbers: {error}") from None
    check_dense(key, tensor)
    return tensor


def as_array(key: str, value: Any) -> Array:
    """Return an observation as a NumPy array, which has no bfloat16."""
    tensor = as_values(key, value).detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def center_crop(images: Tensor, crop: Sequence[int] | None) -> Tensor:
    """Crop images ``[..., H, W, 3]`` at their center."""
    if crop is None:
        return images
    height, width = images.shape[-3:-1]
    top, left = (height - crop[0]) // 2, (width - crop[1]) // 2
    return images[..., top : top + crop[0], left : left + crop[1], :]


def _check_brightness(key: str, images: Tensor) -> None:
    """Raise InputError unless floats are from 0 to 1, up to what interpolation adds."""
    if not images.is_floating_point() or not images.numel():
        return
    low, high = (float(value) for value in images.float().aminmax())
    if not (low >= -BEYOND and high <= 1 + BEYOND):
        raise InputError(f"{key} has values from {low:g} to {high:g}, expected 0 to 1, or bytes")


def image_bytes(key: str, images: Tensor, shape: Sequence[int]) -> Tensor:
    """Return images as uint8 ``[..., H, W, 3]``; LeRobot has floats in [0, 1] with channels first."""
    if images.ndim == len(shape) + 2 and images.shape[2] == 3 and tuple(images.shape[2:]) != tuple(shape):
        images = images.movedim(2, -1)
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InputError(f"{key} is {images.dtype}: give bytes, or numbers from 0 to 1")
    return (images * 255).round().clamp(0, 255).to(torch.uint8)
