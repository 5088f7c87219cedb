"""The Inception network of 2015-12-05 that defines FID: its layers, its input, and the files that hold it."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.support.untrusted_files import check_regular, read_tensors, reading

__all__ = ["FEATURES", "WEIGHTS_CHECKSUM", "FIDInception", "LoadedInception", "load_inception", "resize_tf1"]

FEATURES, CLASSES, SIDE = 2048, 1008, 299
EPSILON = 1e-3  # of the batch norms
# SHA-256 of weight, bias, mean and variance of all convolutions in float32, in the network's order.
WEIGHTS_CHECKSUM = "faa37c74cec4860f41dc8c4119526a526ca710982b3cdf79831003fc5f4382b4"
# SHA-256 prefix of pytorch-fid's and torch-fidelity's file, as its name has it.
KNOWN_FILES = ("6726825d",)
FILES = (
    "pytorch-fid's pt_inception-2015-12-05-6726825d.pth, torch-fidelity's "
    "weights-inception-2015-12-05-6726825d.pth or StyleGAN's inception-2015-12-05.pt"
)


class ConvReLU(nn.Conv2d):
    """Convolution with the batch norm folded in, then ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, pad: bool = True
    ):
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (size[0] // 2, size[1] // 2) if pad else (0, 0)
        super().__init__(inputs, outputs, size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class BlockA(nn.Module):
    """35×35 maps."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = ConvReLU(inputs, 64, 1)
        self.branch5x5_1, self.branch5x5_2 = ConvReLU(inputs, 48, 1), ConvReLU(48, 64, 5)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = ConvReLU(inputs, 64, 1), ConvReLU(64, 96, 3)
        self.branch3x3dbl_3 = ConvReLU(96, 96, 3)
        self.branch_pool = ConvReLU(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(_average(x))], dim=1)


class BlockB(nn.Module):
    """35×35 to 17×17 maps."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = ConvReLU(inputs, 384, 3, 2, pad=False)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = ConvReLU(inputs, 64, 1), ConvReLU(64, 96, 3)
        self.branch3x3dbl_3 = ConvReLU(96, 96, 3, 2, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), three, F.max_pool2d(x, 3, 2)], dim=1)


class BlockC(nn.Module):
    """17×17 maps, 7×7 kernels as 1×7 and 7×1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        row, column = (1, 7), (7, 1)
        self.branch1x1 = ConvReLU(768, 192, 1)
        self.branch7x7_1, self.branch7x7_2 = ConvReLU(768, width, 1), ConvReLU(width, width, row)
        self.branch7x7_3 = ConvReLU(width, 192, column)
        self.branch7x7dbl_1, self.branch7x7dbl_2 = ConvReLU(768, width, 1), ConvReLU(width, width, column)
        self.branch7x7dbl_3, self.branch7x7dbl_4 = ConvReLU(width, width, row), ConvReLU(width, width, column)
        self.branch7x7dbl_5 = ConvReLU(width, 192, row)
        self.branch_pool = ConvReLU(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        once = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), once, twice, self.branch_pool(_average(x))], dim=1)


class BlockD(nn.Module):
    """17×17 to 8×8 maps."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1, self.branch3x3_2 = ConvReLU(768, 192, 1), ConvReLU(192, 320, 3, 2, pad=False)
        self.branch7x7x3_1, self.branch7x7x3_2 = ConvReLU(768, 192, 1), ConvReLU(192, 192, (1, 7))
        self.branch7x7x3_3 = ConvReLU(192, 192, (7, 1))
        self.branch7x7x3_4 = ConvReLU(192, 192, 3, 2, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_2(self.branch7x7x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(seven))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), seven, F.max_pool2d(x, 3, 2)], dim=1)


class BlockE(nn.Module):
    """8×8 maps; the last block pools by maximum, as the network of 2015 does."""

    def __init__(self, inputs: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        row, column = (1, 3), (3, 1)
        self.pool = pool
        self.branch1x1, self.branch3x3_1 = ConvReLU(inputs, 320, 1), ConvReLU(inputs, 384, 1)
        self.branch3x3_2a, self.branch3x3_2b = ConvReLU(384, 384, row), ConvReLU(384, 384, column)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = ConvReLU(inputs, 448, 1), ConvReLU(448, 384, 3)
        self.branch3x3dbl_3a, self.branch3x3dbl_3b = ConvReLU(384, 384, row), ConvReLU(384, 384, column)
        self.branch_pool = ConvReLU(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        once, twice = self.branch3x3_1(x), self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        parts = [self.branch1x1(x), self.branch3x3_2a(once), self.branch3x3_2b(once)]
        parts += [self.branch3x3dbl_3a(twice), self.branch3x3dbl_3b(twice)]
        return torch.cat([*parts, self.branch_pool(self.pool(x))], dim=1)


class FIDInception(nn.Module):
    """Inception v3 as TensorFlow released it on 2015-12-05: images in, 2048 features out.

    Modules have pytorch-fid's names. The classifier is None if the file has none.
    """

    def __init__(self, classifier: bool = False) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvReLU(3, 32, 3, 2, pad=False)
        self.Conv2d_2a_3x3, self.Conv2d_2b_3x3 = ConvReLU(32, 32, 3, pad=False), ConvReLU(32, 64, 3)
        self.Conv2d_3b_1x1, self.Conv2d_4a_3x3 = ConvReLU(64, 80, 1), ConvReLU(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = BlockA(192, 32), BlockA(256, 64), BlockA(288, 64)
        self.Mixed_6a, self.Mixed_6b, self.Mixed_6c = BlockB(288), BlockC(128), BlockC(160)
        self.Mixed_6d, self.Mixed_6e, self.Mixed_7a = BlockC(160), BlockC(192), BlockD()
        self.Mixed_7b, self.Mixed_7c = BlockE(1280, _average), BlockE(FEATURES, _maximum)
        self.fc = nn.Linear(FEATURES, CLASSES, bias=False) if classifier else None

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return features ``[B, 2048]`` of uint8 images ``[B, 3, H, W]``, and logits for the Inception score.

        Logits are those without bias ``[B, 1008]``, as torch-fidelity and StyleGAN use them; None without a
        classifier.
        """
        weight = self.Conv2d_1a_3x3.weight
        with torch.autocast(images.device.type, enabled=False):  # bfloat16 would round pixels
            x = (resize_tf1(images.float()) - 128) / 128
        x = x.to(weight.dtype, memory_format=torch.channels_last)
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, 2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features = x.float().mean(dim=(2, 3))
        return features, None if self.fc is None else self.fc(features)


class LoadedInception(NamedTuple):
    """The network, and the checksum of its weights."""

    network: FIDInception
    checksum: str


def load_inception(path: str | Path, *, force: bool = False) -> LoadedInception:
    """Load the network from a local file, in pytorch-fid's, torch-fidelity's or StyleGAN's layout.

    Weights other than those of 2015-12-05 are refused: a distance with them is no FID. ``force`` accepts
    them.
    """
    place = Path(path)
    if not place.is_file():
        raise InputError(f"{place} is not a file: give {FILES}", topic="fid-inception")
    tensors = _read(place)
    names = [name for name, module in _meta().named_modules() if isinstance(module, ConvReLU)]
    raw = _pytorch_fid(tensors, names) or _stylegan(tensors, names)
    if raw is None:
        raise InputError(f"{place} does not hold the FID Inception: give {FILES}", topic="fid-inception")
    checksum = _checksum(raw)
    if checksum != WEIGHTS_CHECKSUM and not force and not _file_digest(place).startswith(KNOWN_FILES):
        raise InputError(
            f"{place} holds other weights than the FID Inception of 2015-12-05 (checksum {checksum[:12]}, "
            f"expected {WEIGHTS_CHECKSUM[:12]}): a distance with them is no FID; give {FILES}, or force it",
            topic="fid-inception",
        )
    classifier = tensors.get("fc.weight", tensors.get("output.weight"))
    network = FIDInception(classifier is not None)
    state = {}
    for name, (weight, bias, mean, variance) in raw.items():
        # Folded in float64: y = (conv(x) − mean) / √(variance + ε) + bias.
        scale = (variance.double() + EPSILON).rsqrt()
        state[f"{name}.weight"] = (weight.double() * scale[:, None, None, None]).float()
        state[f"{name}.bias"] = (bias.double() - mean.double() * scale).float()
    if classifier is not None:
        state["fc.weight"] = classifier.float()
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"{place} does not fit the FID Inception: {str(error).splitlines()[1].strip()}"
        ) from None
    network.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return LoadedInception(network, checksum)


def resize_tf1(images: Tensor, side: int = SIDE) -> Tensor:
    """Resize ``[B, C, H, W]`` bilinearly as TensorFlow 1 does: source coordinate = target · H / side.

    There is no half-pixel shift and no antialiasing, unlike in ``F.interpolate``.
    """
    rows, columns = (_resize_matrix(n, side, images.device, images.dtype) for n in images.shape[2:])
    return rows @ images @ columns.T


@cache
def _resize_matrix(n: int, side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix ``[side, n]`` that interpolates one axis."""
    position = torch.arange(side, dtype=torch.float64) * n / side
    low = position.floor().long()
    high, share = (low + 1).clamp(max=n - 1), position - low
    rows = torch.arange(side)
    matrix = torch.zeros(side, n, dtype=torch.float64)
    matrix.index_put_((rows, low), 1 - share, accumulate=True)
    matrix.index_put_((rows, high), share, accumulate=True)
    return matrix.to(device, dtype)


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _maximum(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 1, 1)


@cache
def _meta() -> FIDInception:
    with torch.device("meta"):
        return FIDInception()


Raw = dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]  # weight, bias, mean, variance


def _read(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict, or the state dict of a TorchScript archive, on the CPU."""
    with reading(path, "weights of Inception", "download it again"):
        if _is_torchscript(check_regular(path)):  # parsed by PyTorch's own reader; none of its code is run
            tensors: Mapping[str, Tensor] = torch.jit.load(str(path), map_location="cpu").state_dict()
        else:
            tensors = read_tensors(path, "download it again")
    return {str(name): value for name, value in tensors.items() if isinstance(value, Tensor)}


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _pytorch_fid(tensors: Mapping[str, Tensor], names: list[str]) -> Raw | None:
    parts = ("conv.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    if not all(f"{name}.{part}" in tensors for name in names for part in parts):
        return None
    raw: Raw = {}
    for name in names:
        weight, bias, mean, variance = (tensors[f"{name}.{part}"] for part in parts)
        gamma = tensors.get(f"{name}.bn.weight")
        if gamma is not None and not bool((gamma == 1).all()):
            return None  # the network of 2015 has no scale
        raw[name] = (weight, bias, mean, variance)
    return raw


def _stylegan(tensors: Mapping[str, Tensor], names: list[str]) -> Raw | None:
    """Convert the TorchScript layout, whose convolutions come in the same order under other names."""
    prefixes = [name.removesuffix(".beta") for name in tensors if name.endswith(".beta")]
    parts = ("weight", "beta", "mean", "var")
    if len(prefixes) != len(names) or not all(f"{p}.{part}" in tensors for p in prefixes for part in parts):
        return None
    raw: Raw = {}
    for name, prefix in zip(names, prefixes, strict=True):
        weight, bias, mean, variance = (tensors[f"{prefix}.{part}"] for part in parts)
        raw[name] = (weight, bias, mean, variance)
    return raw


def _checksum(raw: Raw) -> str:
    digest = hashlib.sha256()
    for values in raw.values():
        for value in values:
            digest.update(value.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
