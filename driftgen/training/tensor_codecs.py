"""Lossy codecs for tensors of a training state. Each one maps float32 values to bytes and back.

A block is 256 consecutive values of the flattened tensor. Every codec returns as many bytes as the number of
values determines, so that nothing but the codec's name and the shape is needed to decode.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CODECS", "Codec"]

BLOCK = 256
SMALLEST = torch.finfo(torch.float32).tiny


class Codec(NamedTuple):
    """A codec, by name: ``kind`` says how values are stored, ``bits`` how precisely.

    - ``float``: each value rounded to the first ``bits`` bits of float32. 32 is exact, 16 is bfloat16.
    - ``linear``: each value as a multiple of the largest magnitude of its block, in ``bits`` bits.
    - ``log``: each value, not negative, on a logarithmic scale between the extremes of its block, in ``bits``
      bits. One code is reserved for 0: a positive value never becomes 0.
    - ``mean``: the mean of each block.
    - ``zero``: nothing; all values become 0.
    """

    kind: str
    bits: int

    def encode(self, values: Tensor) -> Tensor:
        """Return values of any shape, in float32 and finite, as uint8 ``[n]``."""
        flat = values.detach().float().cpu().flatten()
        if self.kind == "float":
            return _encode_float(flat, self.bits // 8)
        if self.kind == "linear":
            return _encode_linear(flat, self.bits)
        if self.kind == "log":
            return _encode_log(flat, self.bits)
        if self.kind == "mean":
            return _encode_float(_blocks(flat).sum(1) / _counts(len(flat)), 2)
        return torch.empty(0, dtype=torch.uint8)

    def decode(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the values that :meth:`encode` stored."""
        n = math.prod(shape)
        if self.kind == "float":
            flat = _from_planes(stored, n, self.bits // 8)
        elif self.kind == "linear":
            flat = _decode_linear(stored, n, self.bits)
        elif self.kind == "log":
            flat = _decode_log(stored, n, self.bits)
        elif self.kind == "mean":
            flat = _from_planes(stored, math.ceil(n / BLOCK), 2).repeat_interleave(BLOCK)[:n]
        else:
            flat = torch.zeros(n)
        return flat.view(shape)

    def length(self, n: int) -> int:
        """Return the number of bytes of n values."""
        blocks = math.ceil(n / BLOCK)
        if self.kind == "float":
            return n * self.bits // 8
        if self.kind == "linear":
            return 2 * blocks + _packed_length(n, self.bits)
        if self.kind == "log":
            return 8 * blocks + _packed_length(n, self.bits)
        return 2 * blocks if self.kind == "mean" else 0


CODECS = {
    name: Codec(name.rstrip("0123456789"), int("".join(c for c in name if c.isdigit()) or 0))
    for name in (
        *(
            "float32",
            "float24",
            "float16",
            "linear8",
            "linear7",
            "linear4",
            "linear3",
            "log16",
            "log8",
            "log4",
            "mean",
            "zero",
        ),
    )
}


def _encode_float(flat: Tensor, planes: int) -> Tensor:
    bits = flat.contiguous().view(torch.int32)
    if planes < 4:
        # Sign and magnitude: adding half of the last kept bit rounds the magnitude of both signs.
        bits = bits + (1 << (8 * (4 - planes) - 1))
    return _to_planes(bits.view(torch.float32), planes)


def _to_planes(flat: Tensor, planes: int) -> Tensor:
    """Return the first bytes of each float, all first bytes before all second ones: they compress better."""
    rows = flat.contiguous().view(torch.uint8).view(-1, 4).flip(1)  # little-endian in memory
    return rows[:, :planes].t().reshape(-1)


def _from_planes(stored: Tensor, n: int, planes: int) -> Tensor:
    rows = torch.zeros(n, 4, dtype=torch.uint8)
    rows[:, :planes] = stored.view(planes, n).t()
    return rows.flip(1).contiguous().view(torch.float32).flatten()


def _blocks(flat: Tensor) -> Tensor:
    """Return ``[blocks, 256]``; the last block is filled up."""
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _counts(n: int) -> Tensor:
    """Return the number of values in each block."""
    counts = torch.full((math.ceil(n / BLOCK),), float(BLOCK))
    if n % BLOCK:
        counts[-1] = n % BLOCK
    return counts


def _encode_linear(flat: Tensor, bits: int) -> Tensor:
    largest = 2 ** (bits - 1) - 1
    blocks = _blocks(flat)
    scales = _encode_float(blocks.abs().amax(1), 2)
    scale = _from_planes(scales, len(blocks), 2)[:, None]
    codes = torch.where(scale > 0, blocks / scale * largest, 0.0).round().clamp(-largest, largest)
    return torch.cat([scales, _pack((codes + largest).long().flatten()[: len(flat)], bits)])


def _decode_linear(stored: Tensor, n: int, bits: int) -> Tensor:
    largest, blocks = 2 ** (bits - 1) - 1, math.ceil(n / BLOCK)
    scale = _from_planes(stored[: 2 * blocks], blocks, 2)[:, None]
    codes = _blocks(_unpack(stored[2 * blocks :], n, bits).float() - largest)
    values: Tensor = codes / largest * scale
    return values.flatten()[:n]


def _encode_log(flat: Tensor, bits: int) -> Tensor:
    steps = 2**bits - 2  # between the codes 1 and 2**bits - 1
    blocks = _blocks(flat)
    positive = blocks > 0
    logs = blocks.clamp(min=SMALLEST).log2()
    low = torch.where(positive, logs, math.inf).amin(1)
    high = torch.where(positive, logs, -math.inf).amax(1)
    empty = ~positive.any(1)
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    width = (high - low).clamp(min=1e-6)[:, None]
    codes = torch.where(positive, 1 + ((logs - low[:, None]) / width * steps).round().clamp(0, steps), 0)
    extremes = _to_planes(torch.cat([low, high]), 4)
    return torch.cat([extremes, _pack(codes.long().flatten()[: len(flat)], bits)])


def _decode_log(stored: Tensor, n: int, bits: int) -> Tensor:
    steps, blocks = 2**bits - 2, math.ceil(n / BLOCK)
    low, high = _from_planes(stored[: 8 * blocks], 2 * blocks, 4).view(2, blocks, 1)
    width = (high - low).clamp(min=1e-6)
    codes = _blocks(_unpack(stored[8 * blocks :], n, bits).float())
    values = (low + (codes - 1) / steps * width).exp2().clamp(min=SMALLEST)
    return torch.where(codes > 0, values, 0.0).flatten()[:n]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes of 16 bits as two bytes, of 4 bits as half a byte, and of others as one byte each.

    The bytes are deflated later: a Huffman code of 3 bits takes no more than 3 bits.
    """
    if bits == 16:
        return torch.cat([codes >> 8, codes & 255]).to(torch.uint8)
    if bits == 4:
        pairs = F.pad(codes, (0, len(codes) % 2)).view(-1, 2)
        codes = pairs[:, 0] << 4 | pairs[:, 1]
    return codes.to(torch.uint8)


def _packed_length(n: int, bits: int) -> int:
    return 2 * n if bits == 16 else math.ceil(n / 2) if bits == 4 else n


def _unpack(stored: Tensor, n: int, bits: int) -> Tensor:
    codes = stored.long()
    if bits == 16:
        return codes[:n] << 8 | codes[n:]
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], 1).flatten()[:n]
    return codes
