"""Images <-> latents: what a latent generator is trained on, and how its samples become images."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from driftgen.errors import InputError, unknown_name
from driftgen.support.atomic_write import atomic_write
from driftgen.support.download import download, first_line, is_repository
from driftgen.tokenizers.taesd import TinyAutoencoder

__all__ = ["SDVAE", "Identity", "TinyVAE", "Tokenizer", "build_tokenizer"]

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
ENCODER, DECODER = "encoder.safetensors", "decoder.safetensors"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


@runtime_checkable
class Tokenizer(Protocol):
    """Any object with these members serves; nothing is to be inherited. ``factor`` pixels of an image's side
    become one of a latent's.
    """

    latent_channels: int
    factor: int

    def encode(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``[B, 3, H, W]`` in [-1, 1] -> ``[B, latent_channels, H / factor, W / factor]``."""

    def decode(self, latents: Tensor) -> Tensor:
        """Back again; values may lie a little outside [-1, 1], so that gradients are not cut off."""

    def options(self) -> dict[str, Any]:
        """What :func:`build_tokenizer` needs, as JSON, next to the weights."""

    def save(self, folder: Path) -> None:
        """Writes the weights into the folder, for :func:`build_tokenizer`."""


class _Frozen(nn.Module):
    """Checks, batching and a network that never changes: no parameter has a gradient, ``train()`` does
    nothing. Gradients flow to what is encoded or decoded.

    Work is done in the number type and on the device of the weights, ``batch_size`` images at a time.
    """

    kind: ClassVar[str]
    known: ClassVar[tuple[str, ...]] = ("scale", "batch_size", "dtype")
    network: Any
    _encode: Callable[..., Tensor]
    _decode: Callable[[Tensor], Tensor]

    def __init__(
        self,
        network: nn.Module | None,
        channels: tuple[int, int],
        factor: int,
        source: str | None = None,
        scale: float = 1.0,
        batch_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise InputError(f"scale={scale} must be above 0")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size} must be at least 1")
        if dtype not in DTYPES.values():
            raise InputError(f"dtype={dtype} must be one of {', '.join(DTYPES)}")
        self.image_channels, self.latent_channels = channels
        self.factor, self.source = factor, source
        self.scale, self.batch_size = float(scale), batch_size
        self.network = None if network is None else network.to(dtype)
        self.requires_grad_(False)
        self.train(False)

    def encode(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Latents ``[B, latent_channels, H / factor, W / factor]`` of images ``[B, C, H, W]`` in [-1, 1].

        With a ``generator`` image i of a seed has the same latent in whatever batches it is encoded.
        """
        _check("images", images, self.image_channels)
        (n, _, h, w), f = images.shape, self.factor
        if h % f or w % f or not h * w:
            raise InputError(f"images are {h}x{w} pixels: crop or resize them to multiples of {f}")
        noise = self._noise((n, self.latent_channels, h // f, w // f), generator)
        return self._batched(self._encode, images, noise)

    def decode(self, latents: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` of latents, about in [-1, 1]: not clipped, which would stop gradients."""
        _check("latents", latents, self.latent_channels)
        return self._batched(self._decode, latents)

    def options(self) -> dict[str, Any]:
        """What :func:`build_tokenizer` needs, as JSON. ``source`` is a name on the Hub, or None for weights
        from a folder of this machine, which :meth:`save` is there to carry to another.
        """
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        record = {"kind": self.kind, "source": self.source, "scale": self.scale}
        return {**record, "batch_size": self.batch_size, "dtype": dtype}

    def save(self, folder: str | Path) -> None:
        """Writes the weights as safetensors, in their present number type."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Else the path they were loaded from would travel with them.
        self.network.register_to_config(_name_or_path=self.source or "")
        self.network.save_pretrained(folder, safe_serialization=True)

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor | None:
        return None

    def _batched(self, call: Callable[..., Tensor], x: Tensor, noise: Tensor | None = None) -> Tensor:
        like = next(self.parameters())
        parts = []
        for start in range(0, max(len(x), 1), self.batch_size):
            rows = slice(start, start + self.batch_size)
            extra = () if noise is None else (noise[rows].to(like),)
            parts.append(call(x[rows].to(like), *extra))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SDVAE(_Frozen):
    """Stable Diffusion's autoencoder: z = s (μ(x) + σ(x) ε), x = D(z / s), without a shift.

    Args:
        name_or_folder: a name on the Hugging Face Hub, or a folder of ``diffusers.AutoencoderKL``.
        sample: whether latents are samples of the posterior, as in the paper's release, or its mean μ.
        scale: s.
        batch_size: images that are encoded or decoded at a time.
        dtype: number type to work in.
    """

    kind = "sd-vae"
    known = (*_Frozen.known, "sample")

    def __init__(
        self,
        name_or_folder: str | Path = "stabilityai/sd-vae-ft-mse",
        *,
        sample: bool = True,
        scale: float = 0.18215,
        batch_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _need_diffusers("SDVAE")
        folder, source = _local(name_or_folder)
        network = _from_diffusers("AutoencoderKL", folder)
        channels = (network.config.in_channels, network.config.latent_channels)
        factor = 2 ** (len(network.config.block_out_channels) - 1)
        super().__init__(network, channels, factor, source, scale, batch_size, dtype)
        self.sample = bool(sample)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "sample": self.sample}

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor | None:
        if not self.sample:
            return None
        if generator is None:
            return torch.randn(shape, device=next(self.parameters()).device)
        noise = torch.empty(shape, device=generator.device)
        # One after the other: a seed's image i is then the same in whatever batches it is drawn.
        for image in noise:
            image.normal_(generator=generator)
        return noise

    def _encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        posterior = self.network.encode(images).latent_dist
        latents: Tensor = posterior.mean if noise is None else posterior.mean + posterior.std * noise
        return self.scale * latents

    def _decode(self, latents: Tensor) -> Tensor:
        images: Tensor = self.network.decode(latents / self.scale).sample
        return images


class TinyVAE(_Frozen):
    """A tiny autoencoder of the TAESD family: z = s E(x), x = D(z / s), without randomness.

    Args:
        name_or_folder: a name on the Hugging Face Hub or a folder in the form of
            ``diffusers.AutoencoderTiny``, a folder that :meth:`save` wrote, or a pair of files as in
            :meth:`from_files`.
        scale: s; 1 keeps the latents of the network, which have a spread of about 1.
        batch_size: images that are encoded or decoded at a time.
        dtype: number type to work in.
    """

    kind = "tiny"

    def __init__(
        self,
        name_or_folder: str | Path | tuple[str | Path, str | Path],
        *,
        scale: float = 1.0,
        batch_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        place, source = name_or_folder, None
        if not isinstance(place, tuple) and (Path(place) / ENCODER).is_file():
            place = (Path(place) / ENCODER, Path(place) / DECODER)
        network: Any
        if isinstance(place, tuple):
            network = TinyAutoencoder.from_files(*place)
            channels, factor = (network.image_channels, network.latent_channels), network.factor
        else:
            _need_diffusers("TinyVAE")
            folder, source = _local(place)
            network = _from_diffusers("AutoencoderTiny", folder)
            channels = (network.config.in_channels, network.config.latent_channels)
            factor = 2 ** (len(network.config.encoder_block_out_channels) - 1)
        super().__init__(network, channels, factor, source, scale, batch_size, dtype)

    @classmethod
    def from_files(cls, encoder: str | Path, decoder: str | Path, **options: Any) -> TinyVAE:
        """From two state dicts as TAESD's author publishes them, ``.pth`` or ``.safetensors``."""
        return cls((encoder, decoder), **options)

    def save(self, folder: str | Path) -> None:
        if not isinstance(self.network, TinyAutoencoder):
            return super().save(folder)
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name, half in ((ENCODER, self.network.encoder), (DECODER, self.network.decoder)):
            state = {key: tensor.contiguous() for key, tensor in half.state_dict().items()}
            with atomic_write(place / name) as scratch:
                save_file(state, scratch)

    def _encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        found = self.network.encode(images)
        latents: Tensor = found if isinstance(found, Tensor) else found.latents
        return self.scale * latents

    def _decode(self, latents: Tensor) -> Tensor:
        found = self.network.decode(latents / self.scale)
        images: Tensor = found if isinstance(found, Tensor) else found.sample
        return images


class Identity(_Frozen):
    """Pixels: latents are the images themselves, in their own number type and on their own device."""

    kind = "identity"

    def __init__(self, channels: int = 3) -> None:
        if channels < 1:
            raise InputError(f"channels={channels} must be at least 1")
        super().__init__(None, (channels, channels), 1)

    def options(self) -> dict[str, Any]:
        return {"kind": self.kind, "channels": self.image_channels}

    def save(self, folder: str | Path) -> None:
        """There is nothing to write."""

    def _batched(self, call: Callable[..., Tensor], x: Tensor, noise: Tensor | None = None) -> Tensor:
        return x

    def _decode(self, latents: Tensor) -> Tensor:
        return latents

    _encode = _decode


def build_tokenizer(options: Mapping[str, Any], folder: str | Path | None = None) -> Tokenizer:
    """The tokenizer that ``options()`` describes.

    Args:
        options: ``kind`` ("identity", "sd-vae" or "tiny") and the arguments of its class; ``source`` is a
            name on the Hub or a folder.
        folder: where ``save`` wrote the weights; if it does not exist, they come from ``source``.
    """
    arguments = dict(options)
    kind, source = str(arguments.pop("kind", None)), arguments.pop("source", None)
    classes: dict[str, type[SDVAE] | type[TinyVAE]] = {"sd-vae": SDVAE, "tiny": TinyVAE}
    if kind != "identity" and kind not in classes:
        raise unknown_name("the tokenizer's kind", kind, ["identity", *classes])
    known = ("channels",) if kind == "identity" else classes[kind].known
    for name in arguments:
        if name not in known:
            raise unknown_name("the tokenizer's option", name, known)
    try:
        if "dtype" in arguments:
            # A wrong name stays as it is, and the class refuses it.
            arguments["dtype"] = DTYPES.get(arguments["dtype"], arguments["dtype"])
        if kind == "identity":
            return Identity(**arguments)
        carried = folder if folder is not None and Path(folder).is_dir() else None
        if carried is None and source is None:
            raise InputError(
                f"the tokenizer's weights are missing: name the folder that holds them, not {folder}"
            )
        found = classes[kind](source if carried is None else carried, **arguments)
    except TypeError as error:
        raise InputError(f"the tokenizer's options {dict(options)} are wrong: {error}") from None
    if carried is not None and isinstance(source, str) and is_repository(source):
        found.source = source
    return found


def _check(argument: str, x: Tensor, channels: int) -> None:
    if x.ndim != 4 or x.shape[1] != channels:
        raise InputError(f"{argument} has shape {list(x.shape)}, expected [B, {channels}, H, W]")
    if not x.is_floating_point():
        hint = "convert to floating point in [-1, 1], x / 127.5 - 1" if argument == "images" else "convert it"
        raise InputError(f"{argument} is {x.dtype}, not floating point: {hint}")


def _local(source: str | Path) -> tuple[Path, str | None]:
    """The folder of an autoencoder, fetched from the Hub if need be, and its name there."""
    place, name = Path(source), str(source)
    if place.is_dir():
        return place, None
    if place.exists() or not is_repository(name):
        raise InputError(f"{name} is neither a folder nor a name on the Hugging Face Hub (owner/repository)")
    return download(name, [CONFIG, WEIGHTS]), name


def _need_diffusers(what: str) -> None:
    if importlib.util.find_spec("diffusers") is None:
        raise InputError(f"{what} needs diffusers: pip install 'driftgen[latent]'")


def _from_diffusers(kind: str, folder: Path) -> Any:
    """The network of a folder in diffusers' form; weights are read from safetensors alone."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} holds no autoencoder: {CONFIG} and {WEIGHTS} are expected in it")
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle, which can run code: convert it to safetensors" if pickled else ""
        raise InputError(f"{folder} holds no {WEIGHTS}{hint}")
    # Importing it takes seconds: not before it is known to be needed.
    library: Any = importlib.import_module("diffusers")
    try:
        # low_cpu_mem_usage wants a further package; output_loading_info tells of weights that stay random.
        network, info = getattr(library, kind).from_pretrained(
            folder, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True
        )
    except Exception as error:
        raise InputError(f"{folder} cannot be loaded as {kind}: {first_line(error)}") from None
    problems = [
        f"{what}: {', '.join(sorted(info[key])[:5])}"
        for what, key in (("missing", "missing_keys"), ("unknown", "unexpected_keys"))
        if info[key]
    ]
    if problems:
        raise InputError(f"{folder} does not fit {kind}; {'; '.join(problems)}")
    return network
