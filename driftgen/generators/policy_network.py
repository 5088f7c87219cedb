"""PolicyNetwork: the encoder of observations and the generator of action chunks in one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError, unknown_name
from driftgen.generators.chunk_mlp import ChunkMLP
from driftgen.generators.observation_encoder import ObservationEncoder, is_image
from driftgen.generators.transformer import ChunkTransformer
from driftgen.generators.unet1d import UNet1D
from driftgen.support.checked_arguments import checked
from driftgen.support.dense_tensors import check_tensor

__all__ = ["CHUNK_GENERATORS", "METHODS", "PolicyNetwork", "Statistics"]

CHUNK_GENERATORS: dict[str, type[UNet1D] | type[ChunkTransformer] | type[ChunkMLP]] = {
    "unet1d": UNet1D,
    "transformer": ChunkTransformer,
    "chunk-mlp": ChunkMLP,
}
METHODS = ("drifting", "regression", "diffusion")
TIME_SIZE = 128  # of a diffusion model, unless its options say otherwise
Statistics = Mapping[str, Mapping[str, Sequence[float]]]


class PolicyNetwork(nn.Module):
    """a = f(ε, o): map noise and an observation history to a chunk of actions, all normalized to [−1, 1].

    The network of a :class:`~driftgen.policy.DriftingPolicy`, which normalizes observations and returns
    actions in the units of the environment.

    Args:
        observations: shape of one step by key: ``[S]`` for a state, ``[H, W, 3]`` for a camera.
        action_size: width of an action.
        statistics: smallest and largest value of each dimension of actions and states in the demonstrations,
            ``{"action": {"low": [...], "high": [...]}, ...}``.
        horizon: actions of a chunk.
        observed: steps of the observation history.
        executed: actions of a chunk that are executed before the next call.
        method: the training that the weights come from: drifting, regression or diffusion.
        generator: unet1d, transformer or chunk-mlp.
        preset: of the generator.
        options: of the generator.
        crop: height and width that images are cropped to; the whole image if None.
        image_features: width of the features of one camera.
        image_widths: channels of each stage of the image encoder.
        keypoints: points of the spatial softmax of the image encoder.
    """

    @checked
    def __init__(
        self,
        observations: Mapping[str, Sequence[int]],
        action_size: int,
        statistics: Statistics | None = None,
        horizon: int = 16,
        observed: int = 2,
        executed: int = 8,
        method: str = "drifting",
        generator: str = "unet1d",
        preset: str | None = None,
        options: Mapping[str, Any] | None = None,
        crop: Sequence[int] | None = None,
        image_features: int = 64,
        image_widths: Sequence[int] = (32, 64, 128),
        keypoints: int = 32,
    ) -> None:
        super().__init__()
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
        if generator not in CHUNK_GENERATORS:
            raise unknown_name("generator", generator, CHUNK_GENERATORS)
        if not 1 <= executed <= horizon - observed + 1:
            raise InputError(
                f"executed={executed}: a chunk of {horizon} actions begins at the first of {observed} "
                f"observations, so 1 to {horizon - observed + 1} of them can be executed"
            )
        shapes = {key: tuple(shape) for key, shape in observations.items()}
        _check_crop(shapes, crop)
        self.observations, self.action_size, self.method = shapes, action_size, method
        self.horizon, self.observed, self.executed = horizon, observed, executed
        self.crop = None if crop is None else (int(crop[0]), int(crop[1]))
        self.statistics = {
            key: {name: [float(v) for v in values] for name, values in entry.items()}
            for key, entry in (statistics or {}).items()
        }
        self._built_with: dict[str, Any] = {
            "generator": generator,
            "preset": preset,
            "options": dict(options or {}),
            "image_features": image_features,
            "image_widths": list(image_widths),
            "keypoints": keypoints,
        }
        self.encoder = ObservationEncoder(shapes, image_features, image_widths, keypoints)
        time = {"time_size": TIME_SIZE} if method == "diffusion" else {}
        fixed = {
            "action_size": action_size,
            "horizon": horizon,
            "observed": observed,
            "condition_size": self.encoder.size,
        }
        kind, chosen = CHUNK_GENERATORS[generator], {**time, **(options or {}), **fixed}
        self.generator: nn.Module = kind(**chosen) if preset is None else kind.preset(preset, **chosen)

    def options(self) -> dict[str, Any]:
        """Return the arguments that build this network again."""
        return {
            "observations": {key: list(shape) for key, shape in self.observations.items()},
            "action_size": self.action_size,
            "statistics": self.statistics,
            "horizon": self.horizon,
            "observed": self.observed,
            "executed": self.executed,
            "method": self.method,
            "crop": None if self.crop is None else list(self.crop),
            **self._built_with,
        }

    def compile_parts(self) -> None:
        """Compile the blocks of the generator and each image encoder."""
        self.generator.compile_parts()  # type: ignore[operator]
        for camera in self.encoder.cameras.values():
            camera.compile(dynamic=False)

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return observation tokens ``[C, K, D]``, for several calls with the same observations."""
        tokens: Tensor = self.encoder(observations)
        return tokens

    def forward(
        self, noise: Tensor, observations: Mapping[str, Tensor] | Tensor, time: Tensor | None = None
    ) -> Tensor:
        """Return chunks ``[C · N, T, A]``: N for each of C observation histories, adjacent.

        Observations are encoded once, whatever the number of chunks.

        Args:
            noise: ``[C · N, T, A]``.
            observations: normalized states ``[C, K, S]`` and cropped images ``[C, K, h, w, 3]``, or their
                tokens, see :meth:`encode`.
            time: diffusion time steps ``[C · N]``, for a network of method diffusion.
        """
        weight = next(self.generator.parameters())
        check_tensor("noise", noise, weight, floating=True)
        if isinstance(observations, Mapping):
            for key, value in observations.items():
                check_tensor(f"observations[{key!r}]", value, weight)
                shape = (*value.shape[:2], *self.observations.get(key, value.shape[2:]))
                if not is_image(key) and value.shape != shape:
                    raise InputError(f"{key} has shape {list(value.shape)}, expected {list(shape)}")
            condition = self.encode(observations)
        else:
            check_tensor("observations", observations, weight, floating=True)
            condition = observations
        if noise.ndim == 0 or condition.ndim == 0:
            raise InputError("noise and observations must be tensors [B, steps, size]")
        # torch.export would specialize len() to a constant.
        chunk_count, rows = noise.shape[0], condition.shape[0]
        if rows == 0 or chunk_count % rows:
            raise InputError(
                f"noise has {chunk_count} chunks, observations have {rows} rows: give a multiple"
            )
        condition = condition.repeat_interleave(chunk_count // rows, dim=0)
        chunks: Tensor = self.generator(noise, condition, *([] if time is None else [time]))
        return chunks

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise chunks ε ~ N(0, I), ``[n, T, A]``, on the device of the weights."""
        noise: Tensor = self.generator.sample_noise(n, generator)  # type: ignore[operator]
        return noise


def _check_crop(shapes: Mapping[str, Sequence[int]], crop: Sequence[int] | None) -> None:
    if crop is not None and len(crop) != 2:
        raise InputError(f"crop={list(crop)}: give height and width")
    for key, shape in shapes.items():
        if is_image(key) and (len(shape) != 3 or shape[2] != 3):
            raise InputError(f"{key} has shape {list(shape)}, expected [height, width, 3]")
        if not is_image(key) and len(shape) != 1:
            raise InputError(f"{key} has shape {list(shape)}, expected one vector per step")
        if is_image(key) and crop is not None and (crop[0] > shape[0] or crop[1] > shape[1]):
            size = f"{shape[0]}x{shape[1]} pixels"
            raise InputError(f"crop={list(crop)} is larger than {key} of {size}: give height and width")
