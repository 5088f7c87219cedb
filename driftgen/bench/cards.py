"""What is known of cards: their peaks, and the speed of the authors' JAX code on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["Card", "Release", "card_of", "find_card"]

GIB = 2**30


@dataclass(frozen=True)
class Release:
    """The authors' code, measured: seconds, and peak memory where it was read."""

    seconds: float
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Card:
    """Peak rates of a card, and what the authors' code takes on it.

    Attributes:
        operations: floating-point operations a second, bfloat16 with float32 sums.
        bytes: of its memory, a second.
        fp8_operations: the same in products of 8-bit numbers, if it has them.
        loss: by groups, generated, positives, negatives, width; bfloat16, forward and gradient.
        step: by preset, width of the encoder, classes, generated, positives, unconditional.
        sampling: by preset and batch.
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
        # The vendor's peaks, 8 bits over 16, times the rate that 16 bits were measured at.
        fp8_operations=1979 / 989.5 * 790e12,
    )
}


def find_card(name: str | None) -> Card | None:
    """What is known of a card of this name ("NVIDIA H200"), if anything."""
    for key, card in CARDS.items():
        if name is not None and re.search(rf"\b{key}\b", name):  # a GH200 is another card
            return card
    return None


def card_of(device: torch.device) -> Card | None:
    """What is known of the card that a device is."""
    return find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
