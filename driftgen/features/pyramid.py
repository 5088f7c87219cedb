"""Feature maps -> the sets of vectors (a) to (d) (appendix "Multi-scale Features for Drifting Loss")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["at_least_float32", "feature_pyramid"]

LEAST_VARIANCE = 1e-6  # keeps the gradient of a standard deviation finite where a map is constant


def feature_pyramid(
    maps: Mapping[str, Tensor],
    *,
    vectors: bool = True,
    mean_std: bool = True,
    patch_sizes: Sequence[int] = (2, 4),
) -> dict[str, Tensor]:
    """The vectors of each feature map (appendix "Multi-scale Features for Drifting Loss", (a) to (d)).

    A map ``name`` of shape ``[B, C, H, W]`` gives, each as ``[B, V, C]``:

    - (a) ``name``: one vector per location, V = H·W in row-major order;
    - (b) ``name_mean`` and ``name_std``: V = 1;
    - (c, d) ``name_mean_p`` and ``name_std_p`` for each patch size p that divides H and W: V = H·W / p².

    The paper's study of feature sets is ``patch_sizes=()`` for (a,b), ``(2,)`` for (a-c), ``(2, 4)`` for
    (a-d). Standard deviations are √(biased variance + 1e-6), and float32 where maps are 16-bit; all else
    keeps the type of its map.

    Args:
        maps: feature maps by name.
        vectors: whether to give the vectors per location.
        mean_std: whether to give the mean and standard deviation over the whole map.
        patch_sizes: side lengths of the patches whose means and standard deviations are given.
    """
    for size in patch_sizes:
        if size < 1:
            raise InputError(f"patch_sizes={tuple(patch_sizes)} holds {size}: every size must be at least 1")
    if len(set(patch_sizes)) < len(patch_sizes):
        raise InputError(f"patch_sizes={tuple(patch_sizes)} names a size twice")
    features: dict[str, Tensor] = {}
    for name, feature_map in maps.items():
        if feature_map.ndim != 4 or 0 in feature_map.shape[2:]:
            shape = list(feature_map.shape)
            raise InputError(f"maps[{name!r}] has shape {shape}, expected [B, C, H, W] of at least one pixel")
        height, width = feature_map.shape[-2:]
        wide = at_least_float32(feature_map)  # once, so that a backward pass keeps one copy
        if vectors:
            features[name] = feature_map.flatten(2).mT
        if mean_std:
            mean, std = _patch_statistics(wide, height, width)
            features[f"{name}_mean"], features[f"{name}_std"] = mean.to(feature_map.dtype), std
        fitting = [p for p in patch_sizes if height % p == 0 and width % p == 0]
        patches = {p: _patch_statistics(wide, p, p) for p in fitting}
        # The release's order: all means, then all standard deviations.
        features |= {f"{name}_mean_{p}": mean.to(feature_map.dtype) for p, (mean, _) in patches.items()}
        features |= {f"{name}_std_{p}": std for p, (_, std) in patches.items()}
    return features


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 where it has fewer digits; statistics over many numbers need them."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _patch_statistics(feature_map: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over each patch, both ``[B, V, C]``."""
    b, c, h, w = feature_map.shape
    patches = feature_map.reshape(b, c, h // height, height, w // width, width)
    variance, mean = torch.var_mean(patches, (3, 5), correction=0)
    return mean.flatten(2).mT, (variance + LEAST_VARIANCE).sqrt().flatten(2).mT
