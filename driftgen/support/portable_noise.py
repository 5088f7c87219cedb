"""Noise from a seed that other languages reproduce bit for bit; ``studio/portable_noise.mjs`` is its twin.

Sample i of a seed depends on nothing but the seed, i and the layout of the noise. Words of 32 bits come from
Philox4x32-10 (Salmon et al., 2011), with the seed as key and the counter (block, tensor, sample mod 2³²,
⌊sample / 2³²⌋). Block b holds the elements 4b to 4b + 3 of a tensor in row-major order.

- normal: two words (w, v) give two elements, √(−2 ln u) cos 2πt and √(−2 ln u) sin 2πt, with
  u = (w + ½) / 2³² and t = v / 2³² (Box-Muller).
- integers: a word w gives ⌊w · entries / 2³²⌋.

Logarithm, sine and cosine are polynomials below: every step is a sum, product, quotient or square root in
float64, which IEEE 754 defines to the last bit. Those of a math library differ between machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError, unknown_name
from driftgen.support.checked_arguments import checked
from driftgen.support.whole_numbers import check_count

__all__ = ["NAME", "philox", "portable_noise"]

NAME = "philox4x32-10 box-muller 1"  # in the metadata of exported models; changes with any bit of the result
MOST_SEED = 2**53 - 1  # the largest exact integer of JavaScript
MOST_ENTRIES = 2**20  # products with a word stay exact in float64

MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85
LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
LN2, SQRT2, STEP = 0.6931471805599453, 1.4142135623730951, 6.283185307179586 / 2**32

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]


@checked
def portable_noise(
    tensors: Sequence[Mapping[str, Any]], n: int, seed: int, first: int = 0
) -> dict[str, NDArray[Any]]:
    """Draw the noise of n samples for an exported model.

    Example::

        metadata = json.loads(session.get_modelmeta().custom_metadata_map["driftgen"])
        noise = portable_noise(metadata["noise"]["tensors"], n=2, seed=0)

    Args:
        tensors: the noise layout of the metadata: ``input`` (its name), ``shape`` without the batch, and
            ``distribution``, ``"normal"`` or ``"integers"`` with ``entries``.
        n: number of samples.
        seed: 0 to 2⁵³ − 1.
        first: index of the first sample.

    Returns:
        Arrays ``[n, *shape]`` by name, float32 or int64.
    """
    check_count("n", n, 0)
    for argument, value in (("seed", seed), ("first", first)):
        if isinstance(value, bool) or not 0 <= value <= MOST_SEED - n:
            raise InputError(f"{argument}={value} must be an integer from 0 to 2^53 - 1")
    samples = np.arange(first, first + n, dtype=np.uint64)
    result: dict[str, NDArray[Any]] = {}
    for index, tensor in enumerate(tensors):
        size = math.prod(tensor["shape"])
        blocks = np.arange(-(-size // 4), dtype=np.uint64)
        counter = (blocks, np.uint64(index), (samples & LOW)[:, None], (samples >> SHIFT)[:, None])
        words = np.stack(philox(counter, seed), axis=-1).reshape(n, 4 * len(blocks))
        values: NDArray[Any]
        if tensor["distribution"] == "normal":
            values = _normal(words).astype(np.float32)
        elif tensor["distribution"] == "integers":
            values = _integers(words, tensor["entries"])
        else:
            raise unknown_name("distribution", tensor["distribution"], ("normal", "integers"))
        result[tensor["input"]] = values[:, :size].reshape(n, *tensor["shape"])
    return result


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Return the four words of Philox4x32-10 for counters of four words each, which broadcast."""
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    key, other = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        x, y = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (y >> SHIFT) ^ b ^ np.uint64(key), y & LOW
        c, d = (x >> SHIFT) ^ d ^ np.uint64(other), x & LOW
        key, other = (key + WEYL[0]) & 0xFFFFFFFF, (other + WEYL[1]) & 0xFFFFFFFF
    return a, b, c, d


def _normal(words: Words) -> Floats:
    """Turn pairs of words ``[..., 2k]`` into as many normal values."""
    radius = np.sqrt(-2.0 * _log(words[..., 0::2]))
    cosine, sine = _cos_sin(words[..., 1::2])
    return np.stack([radius * cosine, radius * sine], axis=-1).reshape(words.shape)


def _integers(words: Words, entries: int) -> NDArray[np.int64]:
    check_count("entries", entries)
    if entries > MOST_ENTRIES:
        raise InputError(f"entries={entries} is above {MOST_ENTRIES}")
    return ((words * np.uint64(entries)) >> SHIFT).astype(np.int64)


def _log(words: Words) -> Floats:
    """ln((w + ½) / 2³²) = (e − 33) ln 2 + ln f with 2w + 1 = 2ᵉ f and f from √½ to √2."""
    fraction, exponent = np.frexp((2 * words + np.uint64(1)).astype(np.float64))
    fraction, exponent = 2.0 * fraction, exponent - 34
    large = fraction > SQRT2
    fraction, exponent = np.where(large, 0.5 * fraction, fraction), exponent + large
    s = (fraction - 1.0) / (fraction + 1.0)
    z = s * s
    series = np.full_like(z, 1 / 21)  # ln f = 2 (s + s³/3 + s⁵/5 + ...)
    for denominator in range(19, 0, -2):
        series = series * z + 1 / denominator
    return exponent * LN2 + 2.0 * s * series


def _cos_sin(words: Words) -> tuple[Floats, Floats]:
    """Return cos and sin of 2πw / 2³²: Taylor series of the angle to the nearest quarter turn."""
    quarter = (words + np.uint64(2**29)) >> np.uint64(30)
    x = (words.astype(np.float64) - quarter.astype(np.float64) * 2.0**30) * STEP
    z = x * x
    cosine, sine = np.ones_like(z), np.ones_like(z)
    for k in range(8, 0, -1):
        cosine = 1.0 - z * cosine / ((2 * k - 1) * (2 * k))
        sine = 1.0 - z * sine / (2 * k * (2 * k + 1))
    sine = x * sine
    turn = (quarter & np.uint64(3)).astype(np.int64)
    return np.choose(turn, [cosine, -sine, -cosine, sine]), np.choose(turn, [sine, cosine, -sine, -cosine])
