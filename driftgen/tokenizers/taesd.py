"""Tiny autoencoders of the TAESD family in their own layout: a state dict for each half, the structure in its
names."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.support.meta_init import on_meta_device

__all__ = ["TinyAutoencoder"]

CONVOLUTION, RESIZING = frozenset({"weight", "bias"}), frozenset({"weight"})
BLOCK = frozenset(f"conv.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias"))
SKIP = frozenset({"skip.weight"})
POOL = frozenset({"pool.0.weight", "pool.1.weight", "pool.1.bias", "pool.3.weight"})
BLOCKS = (BLOCK, BLOCK | SKIP, BLOCK | POOL, BLOCK | SKIP | POOL)
# Not to be read off the weights: found by reconstructing. With taef2 63 images of 64 pixels give 22.9 dB, and
# 22.5 with 8 groups, the next best; one photograph of 600x512 gives 30.7 dB, and 27.2.
POOL_GROUPS = 4


class TinyAutoencoder(nn.Module):
    """An encoder and a decoder, as built from their state dicts. Images are in [-1, 1] outside, [0, 1]
    inside.

    Attributes:
        image_channels, latent_channels, factor: what goes in, what comes out, by how much it shrinks.
    """

    def __init__(self, encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.encoder, down, ends = _half("encoder", encoder)
        self.decoder, up, other_ends = _half("decoder", decoder)
        if down != up or ends != other_ends[::-1]:
            raise InputError(
                f"encoder and decoder do not belong together: {ends[0]} -> {ends[1]} channels, {down}x down; "
                f"{other_ends[0]} -> {other_ends[1]} channels, {up}x up"
            )
        (self.image_channels, self.latent_channels), self.factor = ends, down

    @classmethod
    def from_files(cls, encoder: str | Path, decoder: str | Path) -> TinyAutoencoder:
        """From two files, ``.safetensors`` or ``.pth``; weights keep the type they are stored in."""
        return cls(_read(Path(encoder)), _read(Path(decoder)))

    def encode(self, images: Tensor) -> Tensor:
        """z = E((x + 1) / 2)."""
        latents: Tensor = self.encoder((images + 1) / 2)
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """x = 2 D(z) − 1."""
        images: Tensor = self.decoder(latents)
        return 2 * images - 1


class _Clamp(nn.Module):
    """3 tanh(x / 3)."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(x / 3)


class _Block(nn.Module):
    """x ← x + pool(x), then ReLU(conv(x) + skip(x)); ``pool`` and ``skip`` where they are named."""

    def __init__(self, inputs: int, outputs: int, skip: bool, pool: bool) -> None:
        super().__init__()
        widths = (inputs, outputs, outputs, outputs)
        convs = [nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths)]
        self.conv = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False) if skip else nn.Identity()
        self.pool: nn.Module | None = None
        if pool:
            # A group's statistics run over the whole map: the one place where far pixels meet.
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


def _half(what: str, state: Mapping[str, Tensor]) -> tuple[nn.Sequential, int, tuple[int, int]]:
    """The network of one state dict, how much it resizes, and its channels at both ends."""
    entries: dict[int, set[str]] = {}
    for name in state:
        match = re.fullmatch(r"(\d{1,3})\.(.+)", name)
        if match is None:
            raise _unexpected(what, [name for name in state if not re.match(r"\d{1,3}\.", name)])
        entries.setdefault(int(match[1]), set()).add(match[2])
    kinds = [frozenset(entries.get(i, ())) for i in range(max(entries, default=-1) + 1)]
    layers: list[nn.Module] = []
    ends: list[int] = []
    factor = 1
    with on_meta_device():
        for i, kind in enumerate(kinds):
            layer = _parameterless(what, kinds, i) if not kind else _layer(what, state, i, kind)
            if layer is None:
                raise _unexpected(what, [f"{i}.{name}" for name in sorted(kind)] or [f"nothing at {i}"])
            layers.append(layer)
            factor *= 2 if kind == RESIZING else 1
            if kind:
                first = state[f"{i}.conv.0.weight" if kind in BLOCKS else f"{i}.weight"]
                if ends and ends[-1] != first.shape[1]:
                    raise InputError(f"{what}: {i} takes {first.shape[1]} channels, but is given {ends[-1]}")
                ends = [*(ends[:1] or [first.shape[1]]), first.shape[0]]
        if len(ends) < 2:
            raise InputError(f"{what} holds no weights of a tiny autoencoder: the state dict is empty")
        network = nn.Sequential(*layers)
    wrong = [name for name, want in network.state_dict().items() if state[name].shape != want.shape]
    if wrong:
        raise InputError(
            f"{what}: unexpected shapes, {_listed(f'{n} {list(state[n].shape)}' for n in wrong)}"
        )
    network.load_state_dict(dict(state), assign=True)
    return network, factor, (ends[0], ends[-1])


def _layer(what: str, state: Mapping[str, Tensor], i: int, kind: frozenset[str]) -> nn.Module | None:
    """The layer of the entries at index i; None if they are not known."""
    if kind in BLOCKS:
        outputs, inputs = _channels(what, f"{i}.conv.0.weight", state)
        return _Block(inputs, outputs, skip=kind >= SKIP, pool=kind >= POOL)
    if kind not in (CONVOLUTION, RESIZING):
        return None
    outputs, inputs = _channels(what, f"{i}.weight", state)
    stride = 2 if kind == RESIZING and what == "encoder" else 1
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=kind == CONVOLUTION)


def _parameterless(what: str, kinds: Sequence[frozenset[str]], i: int) -> nn.Module | None:
    """The layer of an index without entries; the decoder alone has some."""
    if what == "encoder":
        return None
    if i == 0:
        return _Clamp()
    if kinds[i + 1] == RESIZING:
        return nn.Upsample(scale_factor=2)
    return nn.ReLU() if kinds[i - 1] == CONVOLUTION else None


def _channels(what: str, name: str, state: Mapping[str, Tensor]) -> tuple[int, int]:
    weight = state[name]
    if weight.ndim != 4:
        raise InputError(f"{what}: unexpected shapes, {name} {list(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def _read(path: Path) -> dict[str, Tensor]:
    """The state dict of a file. Nothing in it is run."""
    if not path.is_file():
        raise InputError(f"{path} is not a file: give a .safetensors or .pth state dict")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(f"{path} is no state dict: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise InputError(f"{path} is no state dict: save the network's state_dict() alone")
    return dict(state)


def _unexpected(what: str, names: Iterable[str]) -> InputError:
    return InputError(f"{what} is not in the layout of TAESD, unexpected: {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
