"""Several encoders side by side, the sample itself, and "decode first" for encoders that live in pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.ops.compile import compile_parts

__all__ = ["DecodeFirst", "Encoder", "FeatureStack"]


@runtime_checkable
class Encoder(Protocol):
    """φ: anything that turns samples ``[B, C, H, W]`` into sets of vectors; nothing is to be inherited."""

    def features(self, x: Tensor, **switches: Any) -> dict[str, Tensor]:
        """φ_j(x), ``[B, V_j, D_j]`` each, by name."""
        ...


class Decoder(Protocol):
    """What :class:`DecodeFirst` needs of a tokenizer."""

    def decode(self, latents: Tensor) -> Tensor:
        """Images in [-1, 1] of latents."""
        ...


Entry: TypeAlias = "Encoder | tuple[Encoder, Mapping[str, Any]]"


class Frozen(nn.Module):
    """Modules that are used, never trained: in eval mode whatever is asked, without parameter gradients.

    Gradients still reach the input.
    """

    def freeze(self) -> None:
        """Call once all parts are in place."""
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stays in eval mode."""
        super().train(False)
        return self


class DecodeFirst(Frozen):
    """φ(decode(z)): a pixel encoder for latents (appendix "Other Pretrained Feature Encoders").

    Gradients pass through the encoder and the tokenizer's decoder.
    """

    def __init__(self, encoder: Encoder, tokenizer: Decoder) -> None:
        super().__init__()
        _check_encoder(encoder)
        self.encoder, self.tokenizer = encoder, tokenizer
        self.freeze()

    def features(self, x: Tensor, **switches: Any) -> dict[str, Tensor]:
        """The features of the decoded latents."""
        return self.encoder.features(self.tokenizer.decode(x), **switches)


class FeatureStack(Frozen):
    """All features that a loss is summed over: those of each encoder, and the sample itself.

    Example::

        phi = FeatureStack([mae, (convnext, {"patch_sizes": ()})])
        phi.features(x)["layer4_mean"], phi.features(x)["global"]

    Args:
        encoders: encoders, each alone or with the switches its ``features`` is to be called with. In a list
            all features keep their names, which must differ; in a mapping each becomes ``name/feature``.
        vanilla: adds ``global``, the flattened sample ``[B, 1, H · W · C]``: the drifting loss without φ.
    """

    def __init__(self, encoders: Sequence[Entry] | Mapping[str, Entry] = (), *, vanilla: bool = True) -> None:
        super().__init__()
        named = encoders.items() if isinstance(encoders, Mapping) else ((None, e) for e in encoders)
        self.parts: list[tuple[str, Encoder, dict[str, Any]]] = []
        for name, entry in named:
            encoder, switches = entry if isinstance(entry, tuple) else (entry, {})
            _check_encoder(encoder)
            self.parts.append(("" if name is None else f"{name}/", encoder, dict(switches)))
        if not self.parts and not vanilla:
            raise InputError("encoders is empty and vanilla=False: nothing to measure the drift in")
        self.encoders = nn.ModuleList(e for _, e, _ in self.parts if isinstance(e, nn.Module))
        self.vanilla = vanilla
        self.freeze()

    @property
    def networks(self) -> list[nn.Module]:
        """The encoders that are modules, out of what decodes for them."""
        inner = [e.encoder if isinstance(e, DecodeFirst) else e for e in self.encoders]
        return [e for e in inner if isinstance(e, nn.Module)]

    def compile_parts(self) -> None:
        """Compiles every encoder, piece by piece."""
        for encoder in self.networks:
            compile_parts(encoder)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """φ_j(x) for every j, ``[B, V_j, D_j]`` each."""
        found: dict[str, Tensor] = {}
        if self.vanilla:
            # Channels innermost, as the release flattens; no distance depends on the order.
            found["global"] = x.permute(0, 2, 3, 1).flatten(1)[:, None]
        for prefix, encoder, switches in self.parts:
            for name, value in encoder.features(x, **switches).items():
                if prefix + name in found:
                    raise InputError(
                        f"two encoders have a feature {name!r}: give encoders as a mapping of names"
                    )
                found[prefix + name] = value
        return found


def _check_encoder(encoder: object) -> None:
    if not isinstance(encoder, Encoder):
        raise InputError(f"{type(encoder).__name__} is no encoder: it has no method features(x)")
