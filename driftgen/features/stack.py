"""Combine encoders: a stack of several, the raw sample, and decoding before a pixel encoder."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from driftgen.errors import InputError, unknown_name
from driftgen.features.resnet_layers import Conv
from driftgen.ops.compile import compile_parts
from driftgen.support.checked_arguments import checked
from driftgen.support.dense_tensors import check_tensor

__all__ = ["DecodeFirst", "Encoder", "FeatureStack"]


@runtime_checkable
class Encoder(Protocol):
    """φ: maps samples ``[B, C, H, W]`` to sets of vectors. Any object with ``features`` qualifies."""

    def features(self, x: Tensor, **switches: Any) -> dict[str, Tensor]:
        """Return φ_j(x) by name, each ``[B, V_j, D_j]``."""
        ...


class Decoder(Protocol):
    """The part of a tokenizer that :class:`DecodeFirst` uses."""

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents into images in [-1, 1]."""
        ...


Entry: TypeAlias = "Encoder | tuple[Encoder, Mapping[str, Any]]"


class Frozen(nn.Module):
    """A module that is never trained: always in evaluation mode, without parameter gradients.

    Gradients still reach the input.
    """

    def freeze(self) -> None:
        """Freeze all submodules. Call this after they are assigned."""
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        super().train(False)
        return self


class DecodeFirst(Frozen):
    """φ(decode(z)): a pixel encoder applied to latents (appendix "Other Pretrained Feature Encoders").

    Gradients flow through the encoder and the tokenizer's decoder.
    """

    def __init__(self, encoder: Encoder, tokenizer: Decoder) -> None:
        super().__init__()
        _check_encoder(encoder)
        self.encoder, self.tokenizer = encoder, tokenizer
        self.freeze()

    def features(self, x: Tensor, **switches: Any) -> dict[str, Tensor]:
        """Return the features of the decoded latents."""
        return self.encoder.features(self.tokenizer.decode(x), **switches)


class FeatureStack(Frozen):
    """All features that a loss sums over: those of each encoder, and the sample itself.

    Example::

        phi = FeatureStack([mae, (convnext, {"patch_sizes": ()})])
        phi.features(x)["layer4_mean"], phi.features(x)["global"]

    Args:
        encoders: encoders, or pairs of an encoder and the keyword arguments for its ``features``. In a
            sequence all features keep their names, which must be unique. In a mapping a feature is named
            ``name/feature``.
        vanilla: add ``global``, the flattened sample ``[B, 1, H · W · C]``: the drifting loss without φ.
    """

    @checked
    def __init__(self, encoders: Sequence[Entry] | Mapping[str, Entry] = (), *, vanilla: bool = True) -> None:
        super().__init__()
        named = encoders.items() if isinstance(encoders, Mapping) else ((None, e) for e in encoders)
        self.parts: list[tuple[str, Encoder, dict[str, Any]]] = []
        for name, entry in named:
            if isinstance(entry, tuple) and (len(entry) != 2 or not isinstance(entry[1], Mapping)):
                raise InputError("encoders: an entry is an encoder, or a pair (encoder, switches)")
            encoder, switches = entry if isinstance(entry, tuple) else (entry, {})
            _check_encoder(encoder)
            _check_switches(encoder, switches)
            self.parts.append(("" if name is None else f"{name}/", encoder, dict(switches)))
        if not self.parts and not vanilla:
            raise InputError("encoders is empty and vanilla=False: add an encoder or set vanilla=True")
        self.encoders = nn.ModuleList(e for _, e, _ in self.parts if isinstance(e, nn.Module))
        self.vanilla = vanilla
        self.freeze()

    @property
    def networks(self) -> list[nn.Module]:
        """Return the encoders that are modules, without their :class:`DecodeFirst` wrappers."""
        inner = [e.encoder if isinstance(e, DecodeFirst) else e for e in self.encoders]
        return [e for e in inner if isinstance(e, nn.Module)]

    def compile_parts(self) -> None:
        """Compile every encoder, module by module."""
        for encoder in self.networks:
            compile_parts(encoder)

    def cast_convolutions(self, dtype: torch.dtype) -> None:
        """Cast the convolution weights of MAEs once, as autocast to ``dtype`` would at every call."""
        for module in self.modules():
            if isinstance(module, Conv):
                module.to(dtype)

    def features(self, x: Tensor, *, only: Collection[int] | None = None) -> dict[str, Tensor]:
        """Return φ_j(x) for every j, each ``[B, V_j, D_j]``; ``only`` gives the positions of the encoders to
        use, None all of them.
        """
        check_tensor("x", x, x)
        if x.ndim != 4:
            raise InputError(f"x has shape {list(x.shape)}, expected [B, C, H, W]")
        features: dict[str, Tensor] = {}
        if self.vanilla:
            # Channels last, as in the release; distances do not depend on the order.
            features["global"] = x.permute(0, 2, 3, 1).flatten(1)[:, None]
        for position, (prefix, encoder, switches) in enumerate(self.parts):
            if only is not None and position not in only:
                continue
            for name, value in encoder.features(x, **switches).items():
                if prefix + name in features:
                    raise InputError(
                        f"two encoders have a feature {name!r}: give encoders as a mapping of names"
                    )
                features[prefix + name] = value
        return features


def _check_encoder(encoder: object) -> None:
    if not isinstance(encoder, Encoder):
        raise InputError(f"{type(encoder).__name__} is not an encoder: it has no method features(x)")


def _check_switches(encoder: Encoder, switches: Mapping[str, Any]) -> None:
    """Raise InputError for keyword arguments that the encoder's ``features`` does not take."""
    _, *known = inspect.signature(encoder.features).parameters.values()  # the first one is x
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        names = [parameter.name for parameter in known]
        for name in switches:
            if name not in names:
                raise unknown_name(f"switch of {type(encoder).__name__}.features", name, names)
