"""The ResNet-style masked autoencoder: encoder, decoder, objective (appendix "Implementation of ResNet-style
MAE").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError, OptionError, unknown_name
from driftgen.features.pyramid import at_least_float32, feature_pyramid, patch_statistics
from driftgen.features.resnet_layers import Block, ConvNormReLU, Decoder, Encoder, Norm, norm_groups
from driftgen.ops.compile import compile_blocks
from driftgen.ops.dispatch import has_kernels
from driftgen.support.checked_arguments import checked, show_value
from driftgen.support.dense_tensors import check_dense, check_tensor

__all__ = ["MAEOutput", "ResNetMAE"]

MOST_BLOCKS = 1000
PRESETS: dict[str, dict[str, Any]] = {
    "latent-256": {"in_channels": 4, "base_channels": 256, "patchify": 1, "num_classes": 1000},
    "latent-640": {"in_channels": 4, "base_channels": 640, "patchify": 1, "num_classes": 1000},
    "pixel-640": {"in_channels": 3, "base_channels": 640, "patchify": 8, "num_classes": 1000},
}


@dataclass(frozen=True)
class MAEOutput:
    """Result of :meth:`ResNetMAE.loss`; all tensors are float32.

    Attributes:
        loss: scalar to call ``backward()`` on, the mean of ``per_sample``.
        per_sample: ``[B]``, λ · classification loss + (1 − λ) · reconstruction loss.
        recon_loss: ``[B]``, squared error per masked location, **summed** over channels.
        mask_ratio: ``[B]``, fraction of locations that were masked.
        cls_loss: ``[B]``, cross entropy of the linear classifier; None without labels.
        accuracy: ``[B]``, 1 if the classifier is right, else 0; None without labels.
    """

    loss: Tensor
    per_sample: Tensor
    recon_loss: Tensor
    mask_ratio: Tensor
    cls_loss: Tensor | None = None
    accuracy: Tensor | None = None


class ResNetMAE(nn.Module):
    """Convolutional masked autoencoder whose encoder is the paper's φ.

    The network is fully convolutional. It accepts images ``[B, C, H, W]`` of any height and width that
    ``patchify`` divides and that leave every stage at least one pixel. Under autocast to bfloat16 maps and
    means are bfloat16; group statistics, standard deviations and the objective stay float32.

    Example::

        mae = ResNetMAE(in_channels=3, base_channels=64, num_classes=10)
        mae.loss(images, labels=labels, cls_weight=0.1).loss.backward()
        mae.features(images)["layer1_blk2_mean_4"]      # [B, V, D]

    Args:
        in_channels: channels of the images, before ``patchify``.
        base_channels: C, the width of the first stage; stage i has 2^(i-1) · C channels.
        blocks: basic blocks of each stage. Each stage after the first halves the map.
        patchify: side of the patches that become channels of the input: 1 for latents, 8 for 256 pixels.
        mask_ratio: probability that a patch is masked.
        mask_patch: side of the masked patches, in locations after ``patchify``.
        decoder: build the decoder; :meth:`loss` needs it, features do not.
        num_classes: classes of the linear head for classification fine-tuning; None for no head.
    """

    @checked
    def __init__(
        self,
        in_channels: int = 4,
        base_channels: int = 256,
        blocks: Sequence[int] = (3, 4, 6, 3),
        patchify: int = 1,
        mask_ratio: float = 0.5,
        mask_patch: int = 2,
        decoder: bool = True,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        self._statistics: Callable[..., list[tuple[Tensor, Tensor]]] = patch_statistics
        sizes = {
            "in_channels": in_channels,
            "base_channels": base_channels,
            "patchify": patchify,
            "mask_patch": mask_patch,
        }
        if num_classes is not None:
            sizes["num_classes"] = num_classes
        for argument, size in sizes.items():
            if size < 1:
                raise InputError(f"{argument}={size} must be at least 1")
        if len(blocks) == 0 or min(blocks) < 1 or sum(blocks) > MOST_BLOCKS:
            raise InputError(
                f"blocks={tuple(blocks)} must name at least one block for each stage, {MOST_BLOCKS:,} in all"
            )
        if not 0 < mask_ratio <= 1:
            raise InputError(f"mask_ratio={mask_ratio} must be above 0 and at most 1")
        self.in_channels, self.base_channels, self.blocks = in_channels, base_channels, tuple(blocks)
        self.patchify, self.mask_ratio, self.mask_patch = patchify, float(mask_ratio), mask_patch
        self.num_classes = num_classes
        channels = in_channels * patchify**2
        widths = [base_channels * 2**i for i in range(len(blocks))]
        self.encoder = Encoder(channels, widths, self.blocks)
        self.decoder = Decoder(widths, channels) if decoder else None
        self.classifier = None if num_classes is None else nn.Linear(widths[-1], num_classes)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str) -> ResNetMAE:
        """Build one of the paper's encoders: ``"latent-256"``, ``"latent-640"`` or ``"pixel-640"``."""
        return cls(**cls.preset_options(name))

    @staticmethod
    def preset_options(name: str) -> dict[str, Any]:
        """Return the arguments of a preset."""
        if name not in PRESETS:
            raise unknown_name("name", name, PRESETS)
        return dict(PRESETS[name])

    def reset_parameters(self) -> None:
        """He initialization, which keeps the variance through ReLUs; the classifier starts small."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def options(self) -> dict[str, Any]:
        """Return the arguments that rebuild this model."""
        return {
            "in_channels": self.in_channels,
            "base_channels": self.base_channels,
            "blocks": list(self.blocks),
            "patchify": self.patchify,
            "mask_ratio": self.mask_ratio,
            "mask_patch": self.mask_patch,
            "decoder": self.decoder is not None,
            "num_classes": self.num_classes,
        }

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}, patchify={self.patchify}, mask_ratio={self.mask_ratio}"

    def patches(self, x: Tensor) -> Tensor:
        """Return x with patches as channels, ``[B, C · p², H / p, W / p]``, in the network's dtype.

        The order of channels is the release's: row in the patch, column in the patch, channel of the image.
        """
        p = self.patchify
        check_tensor("x", x, self.encoder.conv1.weight)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise InputError(
                f"x has shape {list(x.shape)}, expected [B, in_channels={self.in_channels}, H, W]"
            )
        if not x.is_floating_point():
            raise InputError(f"x is {x.dtype}: convert it to floating point, scaled to about -1 ... 1")
        b, c, h, w = x.shape
        if h % p or w % p:
            problem = f"x is {h}x{w} pixels: patchify={p} must divide both"
            raise OptionError(problem, self._fitting(h, w))
        least = 2 ** (len(self.blocks) - 1)
        if min(h, w) < least * p:
            side = least * p
            problem = f"x is {h}x{w} pixels: {len(self.blocks)} stages with patchify={p} need {side}x{side}"
            raise OptionError(problem, self._fitting(h, w))
        groups = norm_groups(least * self.base_channels)
        if least * self.base_channels == groups and max(h, w) <= least * p:
            problem = (
                f"x is {h}x{w} pixels: with base_channels={self.base_channels} every group of the last stage "
                "would be a single number"
            )
            raise OptionError(problem, {"base_channels": 40})
        kind = x.device.type
        working = self.encoder.conv1.weight.dtype
        if kind != "meta" and torch.is_autocast_enabled(kind):
            working = torch.get_autocast_dtype(kind)
        x = x.to(working)
        if p == 1:
            return x
        x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(b, p * p * c, h // p, w // p)

    def _fitting(self, height: int, width: int) -> dict[str, Any]:
        """Return the options to change for images of this size, with the closest values that fit."""
        p = max(n for n in range(1, self.patchify + 1) if math.gcd(height, width) % n == 0)
        stages = min(len(self.blocks), (min(height, width) // p).bit_length())
        fitting = {"patchify": p, "blocks": self.blocks[:stages]}
        return {name: value for name, value in fitting.items() if value != getattr(self, name)}

    def encode(self, x: Tensor, *, every_k_block: int = 2) -> dict[str, Tensor]:
        """Return the feature maps f_i by name, each ``[B, C_i, H_i, W_i]`` (appendix "MAE Encoder").

        ``conv1``, then ``layer1``, ``layer2``, ... (the normalized output of each stage), then
        ``layerN_blkK`` for every ``every_k_block``-th block, before normalization; 0 for no block outputs.
        """
        _check_every(every_k_block)
        maps: dict[str, Tensor] = self.encoder(self.patches(x), every_k_block)
        return maps

    def features(
        self,
        x: Tensor,
        *,
        every_k_block: int = 2,
        vectors: bool = True,
        mean_std: bool = True,
        patch_sizes: Sequence[int] = (2, 4),
        norm_x: bool = True,
    ) -> dict[str, Tensor]:
        """Return φ_j(x), each ``[B, V, D]``, under the release's names (appendix "Multi-scale Features ...").

        Features are :func:`feature_pyramid` of the maps of :meth:`encode`, and ``norm_x``.

        Args:
            x: images.
            every_k_block: include the output of every k-th block of a stage; 0 for none.
            vectors: include one vector per location of each map.
            mean_std: include the mean and standard deviation over each whole map.
            patch_sizes: sides of the patches for further means and standard deviations.
            norm_x: include √(mean x² + 1e-6) of each channel of the patchified input.
        """
        _check_every(every_k_block)
        patches = self.patches(x)
        features: dict[str, Tensor] = {}
        if not isinstance(norm_x, bool):
            raise InputError("norm_x must be True or False")
        if norm_x:
            features["norm_x"] = ((patches * patches).mean((2, 3)) + 1e-6).sqrt()[:, None]
        maps = self.encoder(patches, every_k_block)
        return features | feature_pyramid(
            maps,
            vectors=vectors,
            mean_std=mean_std,
            patch_sizes=patch_sizes,
            statistics=self._statistics,
        )

    def compile_parts(self) -> None:
        """Compile the repeated blocks, each kind and shape once, in a tenth of the time of the whole network.

        A frozen encoder on a GPU is not compiled: it uses Triton kernels beside the convolutions.
        """
        trained = any(p.requires_grad for p in self.encoder.parameters())
        if trained or not has_kernels(self.encoder.conv1.weight.device):
            compile_blocks(self, Block, Norm, ConvNormReLU)
        self._statistics = torch.compile(patch_statistics)

    @checked
    def sample_mask(
        self,
        n: int,
        generator: torch.Generator | None = None,
        *,
        size: tuple[int, int] = (32, 32),
        device: torch.device | None = None,
    ) -> Tensor:
        """Draw a mask ``[n, 1, *size]`` of 0 and 1 (masked) for patchified maps (appendix "Masking").

        Each patch is masked independently. The CPU draws it, so a seed gives the same mask on every device.
        The mask is on ``device``, by default that of the model.
        """
        if n < 1 or min(size) < 1:
            raise InputError(f"n={n} and size={tuple(size)} must be at least 1")
        (h, w), p = size, self.mask_patch
        uniform = torch.rand(n, 1, math.ceil(h / p), math.ceil(w / p), generator=generator)
        mask = (uniform < self.mask_ratio).float()
        mask = mask.repeat_interleave(p, dim=2).repeat_interleave(p, dim=3)[:, :, :h, :w]
        return mask.to(self.encoder.conv1.weight.device if device is None else device)

    def reconstruct(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the decoder's output for the masked input, patchified: ``[B, C · p², H / p, W / p]``."""
        return self._reconstruct(self.patches(x), mask)[0]

    def unpatchify(self, patches: Tensor) -> Tensor:
        """Invert :meth:`patches`: return ``[B, C, H, W]`` (the last step of the paper's decoder)."""
        p = self.patchify
        b, _, h, w = patches.shape
        x = patches.reshape(b, p, p, self.in_channels, h, w).permute(0, 3, 4, 1, 5, 2)
        return x.reshape(b, self.in_channels, h * p, w * p)

    def loss(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        cls_weight: float | Tensor = 0.0,
        *,
        generator: torch.Generator | None = None,
    ) -> MAEOutput:
        """λ L_cls + (1 − λ) L_recon (appendix "Classification fine-tuning"); λ = 0 is pretraining.

        Args:
            x: images.
            mask: ``[B, 1, H / patchify, W / patchify]``, 1 for masked locations. None draws one by
                :meth:`sample_mask`.
            labels: ``[B]`` classes, required unless λ is 0.
            cls_weight: λ.
            generator: RNG of the mask.
        """
        target = self.patches(x)
        if mask is None:
            mask = self.sample_mask(len(x), generator, size=(target.shape[2], target.shape[3]))
        if isinstance(cls_weight, Tensor):
            check_dense("cls_weight", cls_weight)
            if cls_weight.shape not in ((), (1,), (len(x),)):
                raise InputError(f"cls_weight has shape {list(cls_weight.shape)}, expected a number")
        elif not isinstance(cls_weight, int | float) or not 0 <= cls_weight <= 1:
            raise InputError(f"cls_weight={show_value(cls_weight)} must be a number from 0 to 1")
        if labels is None and not (isinstance(cls_weight, int | float) and cls_weight == 0):
            raise InputError("labels is None: cls_weight other than 0 needs them")
        if labels is not None:
            self._check_labels(labels, len(x))
        prediction, last = self._reconstruct(target, mask)
        mask = at_least_float32(mask)
        error = (at_least_float32(prediction) - at_least_float32(target)).square()
        # The mask has one channel, so this is a sum over channels (the release's scale). A mask without
        # masked locations gives 0, not 0/0.
        recon = (error * mask).sum((1, 2, 3)) / mask.sum((1, 2, 3)).clamp(min=1)
        ratio = mask.mean((1, 2, 3))
        if labels is None:
            return MAEOutput(recon.mean(), recon, recon, ratio)
        assert self.classifier is not None
        logits = at_least_float32(self.classifier(last.mean((2, 3))))
        cls = F.cross_entropy(logits, labels.long(), reduction="none")
        accuracy = (logits.argmax(1) == labels).float()
        per_sample = cls_weight * cls + (1 - cls_weight) * recon
        return MAEOutput(per_sample.mean(), per_sample, recon, ratio, cls, accuracy)

    # Wrappers such as DistributedDataParallel call ``forward``.
    forward = loss

    def _reconstruct(self, patches: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reconstruction and the last stage's map of the masked input."""
        if self.decoder is None:
            raise InputError("decoder=False was chosen: build the model with decoder=True to reconstruct")
        expected = [len(patches), 1, *patches.shape[2:]]
        check_tensor("mask", mask, patches)
        if list(mask.shape) != expected:
            raise InputError(f"mask has shape {list(mask.shape)}, expected {expected}")
        masked = patches * (1 - mask.to(patches.dtype))
        if masked.device.type == "cuda":  # all maps then keep the memory format in which cuDNN is fastest
            masked = masked.contiguous(memory_format=torch.channels_last)
        maps = self.encoder(masked, 0)
        skips = [maps["conv1"], *(maps[f"layer{i + 1}"] for i in range(len(self.blocks)))]
        prediction: Tensor = self.decoder(skips)
        return prediction, skips[-1]

    def _check_labels(self, labels: Tensor, n: int) -> None:
        if self.num_classes is None:
            raise InputError("labels is given, but the model has no classifier: build it with num_classes")
        check_tensor("labels", labels, self.encoder.conv1.weight)
        if labels.shape != (n,) or labels.is_floating_point() or labels.dtype == torch.bool:
            raise InputError(f"labels is {labels.dtype} {list(labels.shape)}, expected {n} integers")
        # On a GPU this check would synchronize; in a compiled graph it would be a graph break.
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = labels[(labels < 0) | (labels >= self.num_classes)]
            if len(wrong):
                raise InputError(f"labels holds {int(wrong[0])}: num_classes={self.num_classes}")


def _check_every(every_k_block: int) -> None:
    if not isinstance(every_k_block, int) or every_k_block < 0:
        raise InputError(f"every_k_block={every_k_block} must be at least 0 (0: no block outputs)")
