"""Known GPUs: their peak rates, and the speed of the authors' JAX code on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["Card", "Release", "card_of", "find_card"]

GIB = 2**30


@dataclass(frozen=True)
class Release:
    """Measured time, and peak memory if known, of the authors' code."""

    seconds: float
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU and measurements of the authors' code on it.

    Attributes:
        operations: floating-point operations per second, bfloat16 with float32 accumulation.
        bytes: memory bandwidth, bytes per second.
        fp8_operations: floating-point operations per second in fp8, if supported.
        loss: by (groups, generated, positives, negatives, width); bfloat16, forward and gradient.
        step: by (preset, encoder width, classes, generated, positives, unconditional).
        sampling: by (preset, batch).
    """

    operations: float
    bytes: float
    loss: Mapping[tuple[int, int, int, int, int], Release] = field(default_factory=dict)
    step: Mapping[tuple[str, int, int, int, int, int], Release] = field(default_factory=dict)
    sampling: Mapping[tuple[str, int], Release] = field(default_factory=dict)
    fp8_operations: float | None = None


# JAX 0.11.2, random weights, bfloat16 as the release configures it; November 2026.
CARDS = {
    "H200": Card(
        operations=790e12,
        bytes=4.3e12,
        loss={
            (65_536, 64, 64, 16, 256): Release(66e-3, 30 * GIB),
            (16_384, 64, 64, 16, 256): Release(15.5e-3, 7.6 * GIB),
            (1_024, 64, 64, 16, 512): Release(1.9e-3),
        },
        step={("B/2", 256, 8, 64, 64, 16): Release(0.560, 127 * GIB)},
        sampling={("B/2", 64): Release(64 / 4924), ("B/2", 256): Release(256 / 5469)},
        # The measured bfloat16 rate times the vendor's ratio of fp8 to bfloat16 peaks.
        fp8_operations=1979 / 989.5 * 790e12,
    )
}


def find_card(name: str | None) -> Card | None:
    """Return the card of this name ("NVIDIA H200"), None if it is not known."""
    for key, card in CARDS.items():
        if name is not None and re.search(rf"\b{key}\b", name):  # a GH200 is a different card
            return card
    return None


def card_of(device: torch.device) -> Card | None:
    """Return the card of a device, None if it is not known."""
    return find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
