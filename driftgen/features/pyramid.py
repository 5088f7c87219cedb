"""Feature maps to feature vectors (a) to (d) (appendix "Multi-scale Features for Drifting Loss")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.ops.patch_statistics import LEAST_VARIANCE, fused_patch_statistics, supports_patch_statistics
from driftgen.support.dense_tensors import check_tensor

__all__ = ["at_least_float32", "feature_pyramid", "patch_statistics"]


def feature_pyramid(
    maps: Mapping[str, Tensor],
    *,
    vectors: bool = True,
    mean_std: bool = True,
    patch_sizes: Sequence[int] = (2, 4),
    statistics: Callable[..., list[tuple[Tensor, Tensor]]] | None = None,
) -> dict[str, Tensor]:
    """Compute the vectors of each feature map (appendix "Multi-scale Features for Drifting Loss").

    A map ``name`` of shape ``[B, C, H, W]`` yields these features ``[B, V, C]``:

    - (a) ``name``: one vector per location, V = H·W in row-major order;
    - (b) ``name_mean`` and ``name_std``: V = 1;
    - (c, d) ``name_mean_p`` and ``name_std_p`` for each patch size p that divides H and W: V = H·W / p².

    The paper's study of feature sets corresponds to ``patch_sizes=()`` for (a,b), ``(2,)`` for (a-c) and
    ``(2, 4)`` for (a-d). Standard deviations are √(biased variance + 1e-6), in float32 for 16-bit maps. All
    other features have the dtype of their map.

    Args:
        maps: feature maps by name.
        vectors: include the vectors per location.
        mean_std: include the mean and standard deviation over the whole map.
        patch_sizes: sides of the patches for means and standard deviations.
        statistics: :func:`patch_statistics`, or a compiled version of it, for maps without a fused kernel.
    """
    statistics = statistics or patch_statistics
    if not isinstance(maps, Mapping) or not isinstance(patch_sizes, Sequence) or isinstance(patch_sizes, str):
        raise InputError("maps must be a dict of tensors, and patch_sizes a sequence of whole numbers")
    if not isinstance(vectors, bool) or not isinstance(mean_std, bool):
        raise InputError("vectors and mean_std must be True or False")
    for size in patch_sizes:
        if not isinstance(size, int) or size < 1:
            raise InputError(f"patch_sizes={tuple(patch_sizes)} holds {size}: every size must be at least 1")
    if len(set(patch_sizes)) < len(patch_sizes):
        raise InputError(f"patch_sizes={tuple(patch_sizes)} holds a size twice: remove it")
    features: dict[str, Tensor] = {}
    for name, feature_map in maps.items():
        check_tensor(f"maps[{name!r}]", feature_map, feature_map, floating=True)
        if feature_map.ndim != 4 or 0 in feature_map.shape[1:]:
            shape = list(feature_map.shape)
            raise InputError(f"maps[{name!r}] has shape {shape}, expected [B, C, H, W], all but B above 0")
        height, width = feature_map.shape[-2:]
        fitting = [p for p in patch_sizes if height % p == 0 and width % p == 0]
        suffixes = ([("", (height, width))] if mean_std else []) + [(f"_{p}", (p, p)) for p in fitting]
        sizes = [size for _, size in suffixes]
        if supports_patch_statistics(feature_map, sizes):
            locations, mean_std_pairs = fused_patch_statistics(feature_map, sizes)
        else:
            locations, mean_std_pairs = feature_map.flatten(2).mT, statistics(feature_map, sizes)
        if vectors:
            features[name] = locations
        pairs = {suffix: pair for (suffix, _), pair in zip(suffixes, mean_std_pairs, strict=True)}
        if mean_std:
            features[f"{name}_mean"], features[f"{name}_std"] = pairs.pop("")
        # In the release's order: all means, then all standard deviations.
        features |= {f"{name}_mean{suffix}": mean for suffix, (mean, _) in pairs.items()}
        features |= {f"{name}_std{suffix}": std for suffix, (_, std) in pairs.items()}
    return features


def patch_statistics(feature_map: Tensor, sizes: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Return the mean and standard deviation over the patches of each size, both ``[B, V, C]``."""
    wide = at_least_float32(feature_map)  # converted once, so that autograd saves a single copy
    b, c, h, w = feature_map.shape
    # Keeping the channels-last memory format makes the results contiguous.
    channels_last = b > 0 and feature_map.is_contiguous(memory_format=torch.channels_last)
    pairs = []
    for height, width in sizes:
        if channels_last:
            patches = wide.permute(0, 2, 3, 1).reshape(b, h // height, height, w // width, width, c)
            variance, mean = torch.var_mean(patches, (2, 4), correction=0)
            variance, mean = variance.flatten(1, 2), mean.flatten(1, 2)
        elif wide.device.type == "cpu" or b == 0:
            # Locations of a patch first: var_mean is a scalar loop on a CPU, up to 20 times as slow. It also
            # warns of too few values if there are no images.
            patches = wide.reshape(b, c, h // height, height, w // width, width).permute(3, 5, 0, 1, 2, 4)
            patches = patches.reshape(height * width, b, c, (h // height) * (w // width))
            mean = patches.mean(0)
            variance = (patches - mean).square().mean(0)
            variance, mean = variance.mT, mean.mT
        else:
            patches = wide.reshape(b, c, h // height, height, w // width, width)
            variance, mean = torch.var_mean(patches, (3, 5), correction=0)
            variance, mean = variance.flatten(2).mT, mean.flatten(2).mT
        pairs.append((mean.to(feature_map.dtype), (variance + LEAST_VARIANCE).sqrt()))
    return pairs


def at_least_float32(x: Tensor) -> Tensor:
    """Convert 16-bit x to float32, which statistics over many values need; leave float64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
