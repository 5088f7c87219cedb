"""Tensors of a training state in few bits: which codec each part gets, and what it is stored relative to."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftgen.training.checkpoint import DTYPES
from driftgen.training.tensor_codecs import CODECS

__all__ = ["LEVELS", "Level", "StateEncoder", "decode_tensor", "from_bytes"]


class Level(NamedTuple):
    """Codecs of the parts of a state; see :class:`~driftgen.training.tensor_codecs.Codec`.

    First moments are stored as m / √v, the direction of Adam's update, so that their error is small against
    the update of each single weight. Averages are stored as differences to the decoded weights, or to the
    decoded average before. Biases and other vectors are few: they are stored as float32, and their averages
    in 16 bits.
    """

    bits: int  # per weight
    weights: str
    first_moments: str
    second_moments: str
    averages: str


# Adam forgets its moments within 1 / (1 - beta) steps, 10 and 20 by default: they take the fewest bits.
LEVELS = (
    Level(32, "float32", "float16", "log16", "float16"),
    Level(24, "float24", "linear8", "log8", "linear8"),
    Level(16, "float16", "linear4", "log4", "linear8"),
    Level(8, "linear8", "zero", "mean", "linear4"),
    Level(7, "linear7", "zero", "mean", "linear3"),
)


class StateEncoder:
    """Encodes the tensors of a checkpoint one after the other."""

    def __init__(self, tensors: Mapping[str, Tensor], level: Level) -> None:
        self.tensors, self.level = tensors, level
        self.entries: list[dict[str, Any]] = []
        self.payload = bytearray()
        self.decoded: dict[str, Tensor] = {}
        self.parts: dict[str, int] = {}
        self.squares: dict[str, list[float]] = {}

    def run(self) -> None:
        """Encode everything: bases before what is stored relative to them."""
        names = list(self.tensors)
        weights = {_weight(name, 1): name for name in names if name.startswith("model/")}
        averages = [name for name in names if name.startswith("ema/")]
        # Buffers and frozen weights are equal to their averages. They are not trained: no step would repair
        # an error.
        fixed = {
            _weight(name, 2)
            for name in averages
            if torch.equal(self.tensors[name], self.tensors[weights[_weight(name, 2)]])
        }
        for weight, name in weights.items():
            codec = "float32" if self.tensors[name].ndim < 2 else self.level.weights
            self.add("weights", name, None if weight in fixed else codec)
        bases = dict(weights)
        for name in averages:
            weight = _weight(name, 2)
            codec = "float16" if self.tensors[name].ndim < 2 else self.level.averages
            self.add("averages", name, None if weight in fixed else codec, bases[weight], "difference")
            bases[weight] = name
        for name in (n for n in names if n.endswith("/exp_avg_sq")):
            self.add("moments", name, self.level.second_moments)
        for name in (n for n in names if n.endswith("/exp_avg")):
            # Muon has no second moments: its momentum is stored as it is.
            squares = f"{name}_sq" if f"{name}_sq" in self.tensors else None
            self.add("moments", name, self.level.first_moments, squares, "ratio" if squares else "value")
        known = {entry["name"] for entry in self.entries}
        for name in (n for n in names if n not in known):
            self.add("other", name, None)

    def add(
        self, part: str, name: str, codec: str | None, base: str | None = None, role: str = "value"
    ) -> None:
        """Encode a tensor, exactly if the codec does not apply to it."""
        tensor = self.tensors[name].detach().cpu()
        values = tensor
        if role == "difference" and base in self.decoded:
            values = tensor - self.decoded[base]
        elif role == "ratio" and base in self.decoded:
            root = self.tensors[base].detach().cpu().float().sqrt()
            values = torch.where(root > 0, tensor / root, 0.0)
        elif role != "value":
            codec = None
        if tensor.dtype != torch.float32 or not bool(values.isfinite().all()):
            codec = None
        if codec is None:
            raw, base, role = _bytes(tensor), None, "value"
        else:
            raw = CODECS[codec].encode(values).numpy().tobytes()
            self.decoded[name] = _restored(
                CODECS[codec].decode(from_bytes(raw), tuple(tensor.shape)),
                self.decoded.get(base or ""),
                role,
            )
            self._measure(part, tensor, self.decoded[name])
        packed = _deflate(raw, exact=codec is None)
        self.entries.append(
            {
                "name": name,
                "codec": codec or "exact",
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "bytes": len(packed),
            }
            | ({} if role == "value" else {"role": role, "base": base})
        )
        self.payload += packed
        self.parts[part] = self.parts.get(part, 0) + len(packed)

    def errors(self) -> dict[str, float]:
        """Return the relative errors of weights and averages."""
        return {
            part: math.sqrt(error / square) if square else 0.0
            for part, (error, square) in self.squares.items()
            if part in ("weights", "averages")
        }

    def _measure(self, part: str, tensor: Tensor, decoded: Tensor) -> None:
        sums = self.squares.setdefault(part, [0.0, 0.0])
        sums[0] += float((tensor - decoded).double().square().sum())
        sums[1] += float(tensor.double().square().sum())


def _weight(name: str, parts: int) -> str:
    """Return the name of a weight without the parts of the checkpoint before it, compiled or not."""
    return name.split("/", parts)[parts].replace("_orig_mod.", "")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _deflate(raw: bytes, *, exact: bool) -> bytes:
    # Codes are noise of an uneven distribution, without repetitions: Huffman codes alone are faster.
    strategy = zlib.Z_DEFAULT_STRATEGY if exact else zlib.Z_HUFFMAN_ONLY
    packer = zlib.compressobj(6, zlib.DEFLATED, 15, 9, strategy)
    return packer.compress(raw) + packer.flush()


def _restored(values: Tensor, base: Tensor | None, role: str) -> Tensor:
    if role == "difference" and base is not None:
        return base + values
    if role == "ratio" and base is not None:
        return values * base.sqrt()
    return values


def decode_tensor(entry: Mapping[str, Any], packed: bytes, known: Mapping[str, Tensor]) -> Tensor:
    shape = tuple(int(n) for n in entry["shape"])
    dtype = {name: dtype for dtype, name in DTYPES.items()}[entry["dtype"]]
    codec = None if entry["codec"] == "exact" else CODECS[entry["codec"]]
    count = math.prod(shape)
    length = count * dtype.itemsize if codec is None else codec.length(count)
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(packed, max(length, 1))  # never more than the shape allows
    if len(raw) != length:
        raise ValueError(f"{entry['name']} has {len(raw)} bytes, expected {length}")
    if codec is None:
        return from_bytes(raw).view(dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    role = entry.get("role", "value")
    return _restored(
        codec.decode(from_bytes(raw), shape), known[entry["base"]] if "base" in entry else None, role
    )
