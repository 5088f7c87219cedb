"""Pretrained encoders of images as φ, through transformers (appendix "Other Pretrained Feature Encoders")."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.features.pyramid import at_least_float32, feature_pyramid
from driftgen.features.resnet50_checkpoints import (
    IMAGENET,
    LAYOUTS,
    listed,
    read_resnet50,
    resnet50_arguments,
)
from driftgen.support.download import download, is_repository

__all__ = ["Backbone"]

CONVNEXT, RESNET = "convnextv2", "resnet"
LOCATION_EPS = 1e-3  # added to the standard deviation over the channels of a location
LAYER_NORM_EPS = 1e-6  # the release's; published configurations say 1e-12, which no trained network notices


class Backbone(nn.Module):
    """A pretrained encoder, frozen: in evaluation mode always, without gradients to its parameters.

    Images are ``[B, 3, H, W]`` or ``[B, 1, H, W]`` (repeated to three channels) in -1 ... 1 and are not
    clipped. They become ((x + 1) / 2 − mean) / std, resized to ``size`` by antialiased bilinear
    interpolation. Networks that cut images into patches get the nearest multiple of the patch size.

    - ConvNeXt-V2: the release's 13 features. Maps ``convenxt_stage_0`` (spelled so) ... are normalised at
      each location over the channels, (y − mean) / (std + 1e-3).
    - ResNet: ``layer1`` ... and ``layerN_blkK`` for every second block.
    - all else that ``transformers.AutoBackbone`` knows, such as DINOv2: its own names, ``stage1`` ...

    Example::

        phi = Backbone("facebook/convnextv2-base-22k-224")
        phi.features(images)["convenxt_stage_1"]        # [B, 784, 256]

    Args:
        name_or_folder: a folder with ``config.json`` and weights, a name on the Hugging Face hub, or a model
            of transformers (``ConvNextV2Model``, ``ResNetModel`` or any backbone), which is frozen in place.
        size: pixels (or height and width) that images are resized to; None keeps theirs.
        mean: of images in 0 ... 1, one for each channel; None for those in ``preprocessor_config.json``, else
            ImageNet's.
        std: likewise.
        stages: which maps of an AutoBackbone to give. None for all of them, or four evenly spaced ones that
            end with the last where there are more.
        dtype: of the network. Images are converted in float32 before.
    """

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
        self.size = (size, size) if isinstance(size, int) else size
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise InputError(f"size={size} must be at least 1 pixel, or None to keep the size of the images")
        own_mean, own_std = IMAGENET
        # Of a class that only transformers knows, and with attributes that differ from one to the next.
        self.model: Any
        if isinstance(name_or_folder, nn.Module):
            if stages is not None:
                raise InputError(
                    f"stages={list(stages)} is for a folder: set out_features of the model instead"
                )
            self.model = name_or_folder
        else:
            folder = _find(name_or_folder)
            own_mean, own_std = _read_normalisation(folder)
            self.model = _load(folder, stages)
        self.kind: str = getattr(getattr(self.model, "config", None), "model_type", "")
        _check_model(self.model, self.kind)
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
        """A ResNet-50 from a published file: MoCo, SimCLR or torchvision.

        Nothing in the file is executed. SimCLR was trained on images in 0 ... 1 without mean and standard
        deviation, and gets such. Its original (TensorFlow) pads max pooling at the far side only, torchvision
        and the converted networks on both, which shifts the windows by one pixel; theirs is what runs here.

        Args:
            weights_file: ``.pth`` or ``.safetensors``.
            layout: ``"moco"``, ``"simclr"``, ``"simclr-v2"`` or ``"torchvision"``; None to recognise it.
            size: as for the class.
            mean: None for what the network was trained with.
            std: likewise.
            dtype: as for the class.
        """
        state, layout = read_resnet50(Path(weights_file), layout)
        transformers = _transformers()
        with torch.device("meta"):
            model = transformers.ResNetModel(transformers.ResNetConfig(**resnet50_arguments(state)))
        for name, expected in model.state_dict().items():
            if state[name].shape != expected.shape:
                shapes = f"shape {list(state[name].shape)}, expected {list(expected.shape)}"
                raise InputError(f"{weights_file} is no ResNet-50: the tensor for {name} has {shapes}")
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
        """A ConvNeXt-V2 of this shape without trained weights, to load some into.

        ``num_classes`` adds the released classifier as ``head``; no feature uses it.
        """
        if len(depths) != len(dims) or len(depths) == 0 or min(*depths, *dims) < 1:
            raise InputError(f"depths={tuple(depths)} and dims={tuple(dims)} must be as many, all at least 1")
        if num_classes is not None and num_classes < 1:
            raise InputError(f"num_classes={num_classes} must be at least 1")
        transformers = _transformers()
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
        """Stays in evaluation mode: batch statistics and dropout would change what φ means."""
        return super().train(False)

    def options(self) -> dict[str, Any]:
        """The arguments of :meth:`from_convnext` that build this network again."""
        if self.kind != "convnextv2":
            raise InputError(
                f"a backbone of kind {self.kind} keeps its own folder; only ConvNeXt-V2 has a form here"
            )
        classes = None if self.head is None else self.head.out_features
        config = self.model.config
        return {"depths": list(config.depths), "dims": list(config.hidden_sizes), "num_classes": classes}

    def extra_repr(self) -> str:
        return f"{self.kind}, size={self.size}, mean={self.mean}, std={self.std}"

    def preprocess(self, x: Tensor) -> Tensor:
        """What the network sees of the images, ``[B, 3, *size]``, in its own type."""
        if x.ndim != 4 or x.shape[1] not in (1, 3) or 0 in x.shape:
            raise InputError(f"x has shape {list(x.shape)}, expected [B, 3, H, W] or [B, 1, H, W]")
        if not x.is_floating_point():
            raise InputError(f"x is {x.dtype}: convert it to floating point, scaled to -1 ... 1")
        x = (at_least_float32(x).expand(-1, 3, -1, -1) + 1) / 2
        # Numbers rather than tensors: no copy to the device, and no buffer to be rounded with the weights.
        channels = zip(x.unbind(1), self.mean, self.std, strict=True)
        x = torch.stack([(channel - mean) / std for channel, mean, std in channels], dim=1)
        size = self._target(x.shape[2], x.shape[3])
        if size != x.shape[2:]:
            x = F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False)
        return x.to(next(self.model.parameters()).dtype)

    def encode(self, x: Tensor, *, every_k_block: int = 2) -> dict[str, Tensor]:
        """The feature maps by name, each ``[B, C_i, H_i, W_i]``.

        ``every_k_block`` is for a ResNet: it gives ``layerN_blkK`` for every such block; 0 gives none.
        """
        return self._encode(x, every_k_block)[0]

    def compile_parts(self) -> None:
        """Compiles the network, but not what is made of its maps."""
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
        """φ_j(x), ``[B, V, D]`` each, from :meth:`encode` through :func:`feature_pyramid`, whose switches
        these are (appendix "Multi-scale Features for Drifting Loss").

        ConvNeXt-V2 has no vectors per location of its first stage, and with ``mean_std`` also
        ``global_mean``, LayerNorm(mean of the last map before its normalisation), and ``global_std``.
        ``patch_sizes=None`` is what the release has: none for ConvNeXt-V2, else (2, 4).
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

    # Wrappers such as DistributedDataParallel only know ``forward``.
    forward = features

    def _target(self, height: int, width: int) -> tuple[int, int]:
        height, width = self.size or (height, width)
        if self.kind == CONVNEXT:
            least = self.model.config.patch_size * 2 ** (len(self.model.config.depths) - 1)
            if min(height, width) < least:
                raise InputError(f"{height}x{width} pixels are too few: size must be at least {least}")
        patch = getattr(self.model.config, "patch_size", None)
        if self.kind in (CONVNEXT, RESNET) or patch is None:
            return height, width
        p, q = (patch, patch) if isinstance(patch, int) else patch
        return max(1, (height + p // 2) // p) * p, max(1, (width + q // 2) // q) * q

    def _encode(self, x: Tensor, every_k_block: int) -> tuple[dict[str, Tensor], Tensor]:
        """The maps by name, and the last one as the network leaves it."""
        if every_k_block < 0:
            raise InputError(f"every_k_block={every_k_block} must be at least 0 (0: no block outputs)")
        x = self.preprocess(x)
        maps: dict[str, Tensor] = {}
        if self.kind == CONVNEXT:
            x = self.model.embeddings(x)
            for i, stage in enumerate(self.model.encoder.stages):
                x = stage(x)
                maps[f"convenxt_stage_{i}"] = _normalise_locations(x)
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
            found = self.model(x, return_dict=True).feature_maps
            maps = dict(zip(self.model.out_features, found, strict=True))
            x = found[-1]
        return maps, x

    def _pooled(self, last: Tensor) -> Tensor:
        """LayerNorm of the mean over all locations, ``[B, C]``; what a classifier would see."""
        norm = self.model.layernorm
        pooled = at_least_float32(last).mean((2, 3))
        weight, bias = at_least_float32(norm.weight), at_least_float32(norm.bias)
        return F.layer_norm(pooled, pooled.shape[1:], weight, bias, LAYER_NORM_EPS).to(last.dtype)


def _normalise_locations(feature_map: Tensor) -> Tensor:
    """(y − mean) / (std + 1e-3) over the channels of each location."""
    wide = at_least_float32(feature_map)
    # std_mean, not the root of a variance: where all channels are equal its gradient is 0, not NaN.
    std, mean = torch.std_mean(wide, dim=1, correction=0, keepdim=True)
    return ((wide - mean) / (std + LOCATION_EPS)).to(feature_map.dtype)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise InputError("Backbone needs transformers: pip install 'driftgen[encoders]'") from None


def _check_model(model: Any, kind: str) -> None:
    parts = {CONVNEXT: ("embeddings", "encoder", "layernorm"), RESNET: ("embedder", "encoder")}
    for part in ("config", *parts.get(kind, ("out_features",))):
        if not hasattr(model, part):
            raise InputError(
                f"{type(model).__name__} gives no feature maps: choose ConvNextV2Model, ResNetModel or a "
                "backbone of transformers"
            )
    channels = getattr(model.config, "num_channels", 3)
    if channels != 3:
        raise InputError(f"{type(model).__name__} takes images of {channels} channels: only 3 are supported")


def _find(name_or_folder: str | Path) -> Path:
    """The folder itself, or the one that a name on the hub was downloaded to."""
    folder = Path(name_or_folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} holds no config.json: it is no published model of transformers")
        return folder
    if folder.exists():
        raise InputError(f"{folder} is a file: give a folder, or Backbone.resnet50 a file of weights")
    name = str(name_or_folder)
    if isinstance(name_or_folder, Path) or not is_repository(name):
        raise InputError(f"{name} does not exist")
    _transformers()
    place = download(name, ["*.json", "*.safetensors"])
    if not any(place.glob("*.safetensors")):
        place = download(name, ["*.json", "pytorch_model*.bin"])
    return place


def _read_normalisation(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of images in 0 ... 1 that the network expects."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return IMAGENET
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        mean, std = record.get("image_mean", IMAGENET[0]), record.get("image_std", IMAGENET[1])
        if not record.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        factor = float(record.get("rescale_factor", 1 / 255)) if record.get("do_rescale", True) else 1.0
        scale = 255 * factor
        # In units of images in 0 ... 1, whatever the folder rescales them to.
        return tuple(float(m) / scale for m in mean), tuple(float(s) / scale for s in std)
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _load(folder: Path, stages: Sequence[str] | None) -> Any:
    """The network with every one of its weights."""
    transformers = _transformers()
    try:
        with _quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            known = {CONVNEXT: "ConvNextV2Model", RESNET: "ResNetModel"}
            if config.model_type in known:
                if stages is not None:
                    raise InputError(f"stages={list(stages)} is not for a {config.model_type}: it gives all")
                kind = getattr(transformers, known[config.model_type])
            else:
                config.out_features = _choose_stages(config, stages)
                # AutoBackbone.from_pretrained of transformers 5 asks the hub, even for a folder.
                with torch.device("meta"):
                    kind = type(transformers.AutoBackbone.from_config(config))
            model, found = kind.from_pretrained(
                folder, config=config, local_files_only=True, output_loading_info=True
            )
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{folder} cannot be read as a backbone ({type(error).__name__}: {reason})"
        ) from error
    # Backbones of transformers add norms of their own to networks that were trained without: they start as
    # the plain normalisation and stay so.
    missing = sorted(name for name in found["missing_keys"] if "hidden_states_norms" not in name)
    if missing:
        raise InputError(f"{folder} lacks weights of a {config.model_type}; {listed('missing', missing)}")
    return model


def _choose_stages(config: Any, stages: Sequence[str] | None) -> list[str]:
    names = [name for name in getattr(config, "stage_names", []) if name != "stem"]
    if not names:
        raise InputError(f"a {config.model_type} is no backbone of transformers: it gives no feature maps")
    if stages is None:
        count = min(4, len(names))
        return [names[len(names) * (i + 1) // count - 1] for i in range(count)]
    unknown = [name for name in stages if name not in names]
    if unknown or not stages:
        raise InputError(f"stages={list(stages)} must be some of {', '.join(names)}")
    return [name for name in names if name in stages]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bar, and without the report of weights left over, such as the classifier's."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
