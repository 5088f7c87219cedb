"""Layers of the ResNet-style masked autoencoder (appendix "Implementation of ResNet-style MAE")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.ops.frozen_conv import frozen_conv
from driftgen.ops.group_norm import group_norm

__all__ = [
    "Block",
    "Conv",
    "ConvNormReLU",
    "Decoder",
    "Encoder",
    "Norm",
    "Up",
    "count_dead_stages",
    "norm_groups",
    "upsample",
]


def norm_groups(channels: int) -> int:
    """Number of normalization groups: the release's 32, or one per channel below 32 channels."""
    # The release fails if 32 does not divide the channels; we take the greatest common divisor.
    return channels if channels < 32 else math.gcd(32, channels)


def count_dead_stages(base_channels: int, stages: int) -> int:
    """Number of stages with one normalization group per channel.

    Over the whole map, the mean and standard deviation of such a channel are the parameters of the norm,
    whatever the image: ``layerN_mean`` and ``layerN_std`` of these stages are constant.
    """
    widths = [base_channels * 2**i for i in range(stages)]
    return sum(norm_groups(width) == width for width in widths)


class Norm(nn.GroupNorm):
    """GroupNorm with float32 statistics; the output keeps the input's dtype and memory format."""

    def __init__(self, channels: int) -> None:
        super().__init__(norm_groups(channels), channels, eps=1e-6)

    def forward(self, x: Tensor, other: Tensor | None = None, relu: bool = False) -> Tensor:
        """Return the normalized map, plus ``other`` if given, through a ReLU if ``relu``."""
        y = group_norm(x, self.num_groups, self.weight, self.bias, self.eps, other, relu)
        # F.group_norm returns a contiguous map on a GPU, whatever the memory format of its input.
        return y.contiguous(memory_format=torch.channels_last) if _is_channels_last(x) else y


class Conv(nn.Conv2d):
    """Convolution without bias, padded by half its kernel: the output has ⌈size / stride⌉ pixels a side."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.sizes = (stride, stride), (kernel // 2, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return frozen_conv(x, self.weight, *self.sizes)


class Block(nn.Module):
    """Basic residual block: two 3×3 convolutions, and a projection if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.gn1 = Conv(inputs, outputs, stride=stride), Norm(outputs)
        self.conv2, self.gn2 = Conv(outputs, outputs), Norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(Conv(inputs, outputs, 1, stride), Norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.gn1(self.conv1(x), relu=True)
        out: Tensor = self.gn2(self.conv2(y), self.shortcut(x), relu=True)
        return out


class Encoder(nn.Module):
    """ResNet encoder: maps the (patchified) input to the maps of all stages and of every k-th block."""

    def __init__(self, channels: int, widths: Sequence[int], blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1, self.gn1 = Conv(channels, widths[0]), Norm(widths[0])
        self.stages = nn.ModuleList()
        inputs = widths[0]
        for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            first = Block(inputs, width, stride=1 if i == 0 else 2)
            self.stages.append(nn.ModuleList([first, *(Block(width, width, 1) for _ in range(count - 1))]))
            inputs = width
        self.norms = nn.ModuleList(Norm(width) for width in widths)

    def forward(self, x: Tensor, every_k_block: int) -> dict[str, Tensor]:
        x = self.gn1(self.conv1(x), relu=True)
        maps, inner = {"conv1": x}, {}
        for i, (stage, norm) in enumerate(zip(self.stages, self.norms, strict=True), start=1):
            assert isinstance(stage, nn.ModuleList)
            for k, block in enumerate(stage, start=1):
                x = block(x)
                if every_k_block and k % every_k_block == 0:
                    inner[f"layer{i}_blk{k}"] = x
            # The normalized map, not the block's output, also feeds the next stage and the decoder.
            maps[f"layer{i}"] = x = norm(x)
        return maps | inner


class ConvNormReLU(nn.Module):
    """3×3 convolution, GN, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.gn = Conv(inputs, outputs), Norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gn(self.conv(x), relu=True)
        return out


class _ChannelsLast(torch.autograd.Function):
    """Identity that puts its input and the gradient of its output into channels-last memory format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous(memory_format=torch.channels_last)


def upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear upsampling; on a GPU the forward and the backward pass use channels-last memory format."""
    if x.device.type == "cuda":
        return _upsample_channels_last(x, size)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def _upsample_channels_last(x: Tensor, size: tuple[int, int]) -> Tensor:
    # PyTorch's kernel for contiguous maps has one thread per output location, which loops over samples and
    # channels. For small maps most of the GPU is idle: 146 of 188 ms of a step of mae-cifar10 on an H200.
    x = x.contiguous(memory_format=torch.channels_last)
    x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    result: Tensor = _ChannelsLast.apply(x)  # type: ignore[no-untyped-call]
    return result


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


class Up(nn.Module):
    """Bilinear upsampling to the size of the skip connection, concatenation, GN, two convolutions."""

    def __init__(self, inputs: int, skip: int) -> None:
        super().__init__()
        self.norm = Norm(inputs + skip)
        self.proj, self.refine = ConvNormReLU(inputs + skip, skip), ConvNormReLU(skip, skip)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if x.shape[-2:] != skip.shape[-2:]:
            x = upsample(x, (skip.shape[-2], skip.shape[-1]))
        x = self.norm(torch.cat([x, skip], dim=1))
        result: Tensor = self.refine(self.proj(x))
        return result


class Decoder(nn.Module):
    """Decoder: from the last stage's map, with all earlier maps as skips, to the (patchified) input."""

    def __init__(self, widths: Sequence[int], channels: int) -> None:
        super().__init__()
        skips = [widths[0], *widths]
        self.bridge = ConvNormReLU(skips[-1], skips[-1])
        self.ups = nn.ModuleList(Up(i, s) for i, s in zip(skips[:0:-1], skips[-2::-1], strict=True))
        self.head = nn.Conv2d(widths[0], channels, 1)

    def forward(self, skips: Sequence[Tensor]) -> Tensor:
        x = self.bridge(skips[-1])
        for up, skip in zip(self.ups, reversed(skips[:-1]), strict=True):
            x = up(x, skip)
        result: Tensor = self.head(x)
        return result
