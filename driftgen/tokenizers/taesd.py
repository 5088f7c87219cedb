"""Tiny autoencoders in TAESD's own layout: one state dict per half, whose keys define the structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.support.meta_init import on_meta_device
from driftgen.support.untrusted_files import read_tensors, reading

__all__ = ["TinyAutoencoder"]

CONVOLUTION, RESIZING = frozenset({"weight", "bias"}), frozenset({"weight"})
BLOCK = frozenset(f"conv.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias"))
SKIP = frozenset({"skip.weight"})
POOL = frozenset({"pool.0.weight", "pool.1.weight", "pool.1.bias", "pool.3.weight"})
BLOCKS = (BLOCK, BLOCK | SKIP, BLOCK | POOL, BLOCK | SKIP | POOL)
# The weights do not determine the number of groups, so it was chosen by reconstruction quality. taef2
# reconstructs 63 images of 64 pixels at 22.9 dB with 4 groups and 22.5 dB with 8, the next best; one
# photograph of 600x512 pixels at 30.7 and 27.2 dB.
POOL_GROUPS = 4


class TinyAutoencoder(nn.Module):
    """An encoder and a decoder built from their state dicts.

    Callers use images in [-1, 1]; the networks use [0, 1].

    Attributes:
        image_channels: channels of an image.
        latent_channels: channels of a latent.
        factor: downsampling factor of each side.
    """

    def __init__(self, encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.encoder, down, ends = _half("encoder", encoder)
        self.decoder, up, other_ends = _half("decoder", decoder)
        if down != up or ends != other_ends[::-1]:
            raise InputError(
                f"encoder and decoder do not belong together: the encoder maps {ends[0]} to {ends[1]} "
                f"channels, {down}x down, the decoder {other_ends[0]} to {other_ends[1]} channels, {up}x up"
            )
        (self.image_channels, self.latent_channels), self.factor = ends, down

    @classmethod
    def from_files(cls, encoder: str | Path, decoder: str | Path) -> TinyAutoencoder:
        """Load two ``.safetensors`` or ``.pth`` files. Weights keep their stored dtype."""
        states = _read(Path(encoder)), _read(Path(decoder))
        try:
            with reading(decoder, "one half of an autoencoder"):
                return cls(*states)
        except InputError as error:
            raise InputError(f"{encoder} and {decoder}: {error}") from None

    def encode(self, images: Tensor) -> Tensor:
        """Compute z = E((x + 1) / 2)."""
        latents: Tensor = self.encoder((images + 1) / 2)
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Compute x = 2 D(z) − 1."""
        images: Tensor = self.decoder(latents)
        return 2 * images - 1


class _Clamp(nn.Module):
    """3 tanh(x / 3)."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(x / 3)


class _Block(nn.Module):
    """Residual block: x ← x + pool(x), then ReLU(conv(x) + skip(x)); ``pool`` and ``skip`` are optional."""

    def __init__(self, inputs: int, outputs: int, skip: bool, pool: bool) -> None:
        super().__init__()
        widths = (inputs, outputs, outputs, outputs)
        convs = [nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths)]
        self.conv = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False) if skip else nn.Identity()
        self.pool: nn.Module | None = None
        if pool:
            # The group norm's statistics cover the whole map: the only exchange between distant pixels.
            self.pool = nn.Sequential(
                nn.Conv2d(inputs, 4 * inputs, 1, bias=False),
                nn.GroupNorm(POOL_GROUPS, 4 * inputs),
                nn.ReLU(),
                nn.Conv2d(4 * inputs, inputs, 1, bias=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return torch.relu(self.conv(x) + self.skip(x))


def _half(half: str, state: Mapping[str, Tensor]) -> tuple[nn.Sequential, int, tuple[int, int]]:
    """Build the encoder or decoder; return it with its resize factor and its input and output channels."""
    entries: dict[int, set[str]] = {}
    for name in state:
        match = re.fullmatch(r"(\d{1,3})\.(.+)", name)
        if match is None:
            raise _unexpected(half, [name for name in state if not re.match(r"\d{1,3}\.", name)])
        entries.setdefault(int(match[1]), set()).add(match[2])
    kinds = [frozenset(entries.get(i, ())) for i in range(max(entries, default=-1) + 1)]
    layers: list[nn.Module] = []
    ends: list[int] = []
    factor = 1
    with on_meta_device():
        for i, kind in enumerate(kinds):
            layer = _parameterless(half, kinds, i) if not kind else _layer(half, state, i, kind)
            if layer is None:
                raise _unexpected(half, [f"{i}.{name}" for name in sorted(kind)] or [f"nothing at {i}"])
            layers.append(layer)
            factor *= 2 if kind == RESIZING else 1
            if kind:
                first = state[f"{i}.conv.0.weight" if kind in BLOCKS else f"{i}.weight"]
                if ends and ends[-1] != first.shape[1]:
                    raise InputError(
                        f"{half}: layer {i} takes {first.shape[1]} channels, but its input has {ends[-1]}"
                    )
                ends = [*(ends[:1] or [first.shape[1]]), first.shape[0]]
        if len(ends) < 2:
            raise InputError(f"{half} holds no weights of a tiny autoencoder: the state dict is empty")
        network = nn.Sequential(*layers)
    wrong = [name for name, own in network.state_dict().items() if state[name].shape != own.shape]
    if wrong:
        raise InputError(
            f"{half}: unexpected shapes, {_listed(f'{n} {list(state[n].shape)}' for n in wrong)}"
        )
    network.load_state_dict(dict(state), assign=True)
    return network, factor, (ends[0], ends[-1])


def _layer(half: str, state: Mapping[str, Tensor], i: int, kind: frozenset[str]) -> nn.Module | None:
    """Build the layer whose keys start with index i; return None if the keys match no known layer."""
    if kind in BLOCKS:
        outputs, inputs = _channels(half, f"{i}.conv.0.weight", state)
        return _Block(inputs, outputs, skip=kind >= SKIP, pool=kind >= POOL)
    if kind not in (CONVOLUTION, RESIZING):
        return None
    outputs, inputs = _channels(half, f"{i}.weight", state)
    stride = 2 if kind == RESIZING and half == "encoder" else 1
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=kind == CONVOLUTION)


def _parameterless(half: str, kinds: Sequence[frozenset[str]], i: int) -> nn.Module | None:
    """Build the layer of an index without keys. Only decoders have such layers."""
    if half == "encoder":
        return None
    if i == 0:
        return _Clamp()
    if kinds[i + 1] == RESIZING:
        return nn.Upsample(scale_factor=2)
    return nn.ReLU() if kinds[i - 1] == CONVOLUTION else None


def _channels(half: str, name: str, state: Mapping[str, Tensor]) -> tuple[int, int]:
    weight = state[name]
    if weight.ndim != 4:
        raise InputError(f"{half}: unexpected shapes, {name} {list(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def _read(path: Path) -> dict[str, Tensor]:
    """Read a state dict without executing any code in the file."""
    if not path.is_file():
        raise InputError(f"{path} is not a file: give a .safetensors or .pth state dict")
    state = read_tensors(path)
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()):
        raise InputError(f"{path} is not a state dict: save only the network's state_dict()")
    return dict(state)


def _unexpected(half: str, names: Iterable[str]) -> InputError:
    return InputError(f"{half} is not in TAESD's layout; unexpected: {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    items = list(names)
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
