"""Pretrained image encoders as φ, through transformers (appendix "Other Pretrained Feature Encoders")."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.features.backbone_loading import (
    CONVNEXT,
    RESNET,
    check_network,
    find_folder,
    import_transformers,
    load_backbone,
    read_normalization,
)
from driftgen.features.network_input import check_images, network_input
from driftgen.features.pyramid import at_least_float32, feature_pyramid
from driftgen.features.resnet50_checkpoints import IMAGENET, LAYOUTS, read_resnet50, resnet50_arguments
from driftgen.support.checked_arguments import checked

__all__ = ["Backbone"]

LOCATION_EPS = 1e-3  # added to the standard deviation over the channels of a location
LAYER_NORM_EPS = 1e-6  # as in the release; published configurations have 1e-12, an irrelevant difference


class Backbone(nn.Module):
    """A frozen pretrained encoder: always in evaluation mode, without parameter gradients.

    Images are ``[B, 3, H, W]`` or ``[B, 1, H, W]`` (repeated to three channels) in -1 ... 1 and are not
    clipped. The network sees ((x + 1) / 2 − mean) / std, resized to ``size`` by antialiased bilinear
    interpolation. For patch-based networks the size is rounded to a multiple of the patch size.

    - ConvNeXt-V2: the release's 13 features. The maps ``convenxt_stage_0`` (the release's spelling) ... are
      normalized over the channels of each location, (y − mean) / (std + 1e-3).
    - ResNet: ``layer1`` ... and ``layerN_blkK`` for every second block.
    - Anything else that ``transformers.AutoBackbone`` supports, such as DINOv2, under its own names,
      ``stage1`` ...

    Example::

        phi = Backbone("facebook/convnextv2-base-22k-224")
        phi.features(images)["convenxt_stage_1"]        # [B, 784, 256]

    Args:
        name_or_folder: a folder with ``config.json`` and weights, a repository on the Hugging Face Hub, or a
            transformers model (``ConvNextV2Model``, ``ResNetModel``, any backbone), which is frozen in place.
        size: side, or height and width, that images are resized to; None keeps their size.
        mean: mean of each channel for images in 0 ... 1; None for that of ``preprocessor_config.json``, or
            ImageNet's if there is none.
        std: standard deviation, with the same defaults.
        stages: feature maps of an AutoBackbone to return. None for all maps, or for four evenly spaced ones
            including the last if there are more than four.
        dtype: dtype of the network. Preprocessing is in float32.
    """

    @checked
    def __init__(
        self,
        name_or_folder: str | Path | nn.Module,
        *,
        size: int | tuple[int, int] | None = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        stages: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size = size if size is None or isinstance(size, tuple | list) else (int(size), int(size))
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise InputError(f"size={size} must be at least 1 pixel, or None to keep the size of the images")
        own_mean, own_std = IMAGENET
        # Any: the class comes from transformers, and its attributes differ between architectures.
        self.model: Any
        if isinstance(name_or_folder, nn.Module):
            if stages is not None:
                raise InputError(
                    f"stages={list(stages)} applies to folders only: set out_features of the model instead"
                )
            self.model = name_or_folder
        else:
            folder = find_folder(name_or_folder)
            own_mean, own_std = read_normalization(folder)
            self.model = load_backbone(folder, stages)
        self.kind: str = getattr(getattr(self.model, "config", None), "model_type", "")
        check_network(self.model, self.kind)
        self.mean = own_mean if mean is None else tuple(float(m) for m in mean)
        self.std = own_std if std is None else tuple(float(s) for s in std)
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(f"mean={self.mean} and std={self.std} must be three numbers each, std above 0")
        self.head: nn.Linear | None = None
        self.to(dtype).requires_grad_(False).eval()

    @classmethod
    def resnet50(
        cls,
        weights_file: str | Path,
        *,
        layout: str | None = None,
        size: int | tuple[int, int] | None = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Backbone:
        """Load a published ResNet-50: MoCo, SimCLR or torchvision.

        Nothing in the file is executed. SimCLR was trained on images in 0 ... 1, so its default is mean 0 and
        standard deviation 1. SimCLR's TensorFlow original pads max pooling on the far side only, torchvision
        and the converted networks on both, which shifts the windows by one pixel. This class pads both sides.

        Args:
            weights_file: ``.pth`` or ``.safetensors``.
            layout: ``"moco"``, ``"simclr"``, ``"simclr-v2"`` or ``"torchvision"``; None to detect it.
            size: as for the class.
            mean: None for the value that the network was trained with.
            std: None for the value that the network was trained with.
            dtype: as for the class.
        """
        state, layout = read_resnet50(Path(weights_file), layout)
        transformers = import_transformers()
        with torch.device("meta"):
            model = transformers.ResNetModel(transformers.ResNetConfig(**resnet50_arguments(state)))
        for name, expected in model.state_dict().items():
            if state[name].shape != expected.shape:
                shapes = f"shape {list(state[name].shape)}, expected {list(expected.shape)}"
                raise InputError(f"{weights_file} is not a ResNet-50: the tensor for {name} has {shapes}")
        model.load_state_dict(state, assign=True)
        own_mean, own_std = LAYOUTS[layout]
        mean, std = (own_mean if mean is None else mean), (own_std if std is None else std)
        return cls(model, size=size, mean=mean, std=std, dtype=dtype)

    @classmethod
    def from_convnext(
        cls,
        depths: Sequence[int],
        dims: Sequence[int],
        num_classes: int | None = None,
        *,
        size: int | tuple[int, int] | None = 224,
    ) -> Backbone:
        """Build an untrained ConvNeXt-V2 of this shape, to load weights into.

        ``num_classes`` adds the released classifier as ``head``; no feature uses it.
        """
        if len(depths) != len(dims) or len(depths) == 0 or min(*depths, *dims) < 1:
            raise InputError(
                f"depths={tuple(depths)} and dims={tuple(dims)} must have equal length and positive entries"
            )
        if num_classes is not None and num_classes < 1:
            raise InputError(f"num_classes={num_classes} must be at least 1")
        transformers = import_transformers()
        config = transformers.ConvNextV2Config(
            num_stages=len(depths),
            depths=list(depths),
            hidden_sizes=list(dims),
            layer_norm_eps=LAYER_NORM_EPS,
        )
        backbone = cls(transformers.ConvNextV2Model(config), size=size)
        if num_classes is not None:
            backbone.head = nn.Linear(dims[-1], num_classes).requires_grad_(False)
        return backbone

    def train(self, mode: bool = True) -> Backbone:
        """Stay in evaluation mode: batch statistics and dropout would change φ."""
        return super().train(False)

    def options(self) -> dict[str, Any]:
        """Return the arguments of :meth:`from_convnext` that rebuild this network."""
        if self.kind != CONVNEXT:
            raise InputError(
                f"a {self.kind} backbone cannot be saved: only ConvNeXt-V2 can; keep its transformers folder"
            )
        classes = None if self.head is None else self.head.out_features
        config = self.model.config
        return {"depths": list(config.depths), "dims": list(config.hidden_sizes), "num_classes": classes}

    def extra_repr(self) -> str:
        return f"{self.kind}, size={self.size}, mean={self.mean}, std={self.std}"

    def preprocess(self, x: Tensor) -> Tensor:
        """Normalize and resize images to the network's input ``[B, 3, *size]`` in the network's dtype."""
        weight = next(self.model.parameters())
        check_images(x, weight)
        return network_input(x, self.mean, self.std, self._target(x.shape[2], x.shape[3]), weight.dtype)

    def encode(self, x: Tensor, *, every_k_block: int = 2) -> dict[str, Tensor]:
        """Return the feature maps by name, each ``[B, C_i, H_i, W_i]``.

        ``every_k_block`` applies to a ResNet: every k-th block of a stage adds ``layerN_blkK``; 0 adds none.
        """
        return self._encode(x, every_k_block)[0]

    def compile_parts(self) -> None:
        """Compile the network, but not the feature pyramid."""
        self.model.compile()

    def features(
        self,
        x: Tensor,
        *,
        every_k_block: int = 2,
        vectors: bool = True,
        mean_std: bool = True,
        patch_sizes: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Return φ_j(x), each ``[B, V, D]`` (appendix "Multi-scale Features for Drifting Loss").

        Applies :func:`feature_pyramid` to the maps of :meth:`encode`. ConvNeXt-V2 has no vectors per location
        of its first stage. With ``mean_std`` it adds ``global_mean``, LayerNorm(mean of the last map before
        its normalization), and ``global_std``.

        Args:
            x: images.
            every_k_block: include the output of every k-th block of a ResNet's stage; 0 for none.
            vectors: include one vector per location of each map.
            mean_std: include the mean and standard deviation over each whole map.
            patch_sizes: sides of the patches for further means and standard deviations. None follows the
                release: no patches for ConvNeXt-V2, otherwise (2, 4).
        """
        if patch_sizes is None:
            patch_sizes = () if self.kind == CONVNEXT else (2, 4)
        maps, last = self._encode(x, every_k_block)
        features = feature_pyramid(maps, vectors=vectors, mean_std=mean_std, patch_sizes=patch_sizes)
        if self.kind == CONVNEXT:
            features.pop("convenxt_stage_0", None)
            if mean_std:
                features["global_mean"] = self._pooled(last)[:, None]
                features["global_std"] = features[f"convenxt_stage_{len(maps) - 1}_std"]
        return features

    # Wrappers such as DistributedDataParallel call ``forward``.
    forward = features

    def _target(self, height: int, width: int) -> tuple[int, int]:
        height, width = self.size or (height, width)
        if self.kind == CONVNEXT:
            least = self.model.config.patch_size * 2 ** (len(self.model.config.depths) - 1)
            if min(height, width) < least:
                raise InputError(f"size={height}x{width} is too small: it must be at least {least} pixels")
        patch = getattr(self.model.config, "patch_size", None)
        if self.kind in (CONVNEXT, RESNET) or patch is None:
            return height, width
        p, q = (patch, patch) if isinstance(patch, int) else patch
        return max(1, (height + p // 2) // p) * p, max(1, (width + q // 2) // q) * q

    def _encode(self, x: Tensor, every_k_block: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return the maps by name, and the last map before normalization."""
        if every_k_block < 0:
            raise InputError(f"every_k_block={every_k_block} must be at least 0 (0: no block outputs)")
        x = self.preprocess(x)
        maps: dict[str, Tensor] = {}
        if self.kind == CONVNEXT:
            x = self.model.embeddings(x)
            for i, stage in enumerate(self.model.encoder.stages):
                x = stage(x)
                maps[f"convenxt_stage_{i}"] = _normalize_locations(x)
        elif self.kind == RESNET:
            x, inner = self.model.embedder(x), {}
            for i, stage in enumerate(self.model.encoder.stages, start=1):
                for k, block in enumerate(stage.layers, start=1):
                    x = block(x)
                    if every_k_block and k % every_k_block == 0:
                        inner[f"layer{i}_blk{k}"] = x
                maps[f"layer{i}"] = x
            maps |= inner
        else:
            outputs = self.model(x, return_dict=True).feature_maps
            maps = dict(zip(self.model.out_features, outputs, strict=True))
            x = outputs[-1]
        return maps, x

    def _pooled(self, last: Tensor) -> Tensor:
        """LayerNorm of the mean over all locations, ``[B, C]``: the input of a classifier."""
        norm = self.model.layernorm
        pooled = at_least_float32(last).mean((2, 3))
        weight, bias = at_least_float32(norm.weight), at_least_float32(norm.bias)
        return F.layer_norm(pooled, pooled.shape[1:], weight, bias, LAYER_NORM_EPS).to(last.dtype)


def _normalize_locations(feature_map: Tensor) -> Tensor:
    """Compute (y − mean) / (std + 1e-3) over the channels of each location."""
    wide = at_least_float32(feature_map)
    # std_mean instead of the root of a variance: its gradient at equal channels is 0, not NaN.
    std, mean = torch.std_mean(wide, dim=1, correction=0, keepdim=True)
    return ((wide - mean) / (std + LOCATION_EPS)).to(feature_map.dtype)
