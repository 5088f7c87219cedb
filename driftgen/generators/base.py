"""The generator interface and its noise input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.ops.dispatch import is_tracing
from driftgen.support.checked_arguments import show_value
from driftgen.support.dense_tensors import check_dense, check_tensor
from driftgen.support.peak_memory import check_fits
from driftgen.support.whole_numbers import check_count

__all__ = [
    "Generator",
    "Noise",
    "check_draw",
    "check_guidance",
    "check_inputs",
    "check_noise",
    "draw_noise",
]


class Noise(NamedTuple):
    """The random input of a generator: Gaussian noise ``[B, C, H, W]`` and style indices ``[B, K]``."""

    gaussian: Tensor
    style: Tensor

    def to(self, device: torch.device | str) -> Noise:
        """Copy both tensors to a device."""
        return Noise(self.gaussian.to(device), self.style.to(device))


@runtime_checkable
class Generator(Protocol):
    """f(ε, c, α). Any network with these two methods can be trained and sampled; no base class is needed."""

    def __call__(self, noise: Noise, labels: Tensor, alpha: Tensor | float) -> Tensor:
        """Return samples ``[B, C, H, W]``, one for each row of the noise.

        Args:
            noise: what :meth:`sample_noise` returns.
            labels: class indices ``[B]``.
            alpha: guidance strength, a number or ``[B]``.
        """
        ...

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """Draw all random inputs of n samples."""
        ...


def draw_noise(
    n: int,
    shape: tuple[int, int, int],
    codebooks: int,
    entries: int,
    generator: torch.Generator | None,
    device: torch.device,
) -> Noise:
    """Draw ε ~ N(0, I) and uniform style indices for n samples.

    With a ``generator``, samples are drawn one by one on its device, so sample i of a seed does not depend on
    the batch size. Without one, all samples are drawn at once on ``device``, as training does.
    """
    check_draw(n, shape, generator, device)
    if generator is None:
        style = torch.randint(entries, (n, codebooks), device=device)
        return Noise(torch.randn(n, *shape, device=device), style)
    source = generator.device
    pinned = device.type == "cuda" and source.type == "cpu"  # copies from pinned memory do not block the host
    gaussian = torch.empty(n, *shape, device=source, pin_memory=pinned)
    style = torch.empty(n, codebooks, dtype=torch.int64, device=source, pin_memory=pinned)
    # One thread: several would wait for the interpreter lock at every row, and took twice as long.
    for normal, indices in zip(gaussian, style, strict=True):
        normal.normal_(generator=generator)
        indices.random_(entries, generator=generator)
    return Noise(gaussian.to(device, non_blocking=pinned), style.to(device, non_blocking=pinned))


def check_guidance(alpha: float) -> float:
    """Return the guidance strength α of an image; raise InputError unless it is from 1 (none) to 1e6."""
    if not isinstance(alpha, Real) or not 1 <= alpha <= 1e6:
        raise InputError(f"guidance={show_value(alpha)} must be 1 (none) or more, at most 1e6")
    return float(alpha)


def check_draw(n: int, shape: Sequence[int], generator: torch.Generator | None, device: torch.device) -> None:
    """Raise InputError unless noise ``[n, *shape]`` fits into the memory and ``generator`` is one."""
    check_count("n", n, 0)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"generator={show_value(generator)} must be a torch.Generator or None")
    check_fits(f"noise of n={n} samples", 4 * n * math.prod(shape), device, "lower n")


def check_noise(gaussian: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise InputError unless the Gaussian noise has shape ``[B, *shape]``."""
    if gaussian.shape[1:] != shape:
        expected = ", ".join(map(str, ("B", *shape)))
        raise InputError(
            f"noise has shape {list(gaussian.shape)}, expected [{expected}]: use the generator's sample_noise"
        )


def check_inputs(
    noise: Noise, labels: Tensor, alpha: Tensor | float, weight: Tensor, codebooks: int, entries: int
) -> None:
    """Raise InputError unless labels, style indices and alpha fit the batch of the noise.

    ``weight`` is the embedding of the classes. The ranges of labels and styles are checked on the CPU only:
    reading them on a GPU would synchronize.
    """
    if not isinstance(noise, Noise):
        raise InputError(f"noise={show_value(noise)} must be a Noise: use the generator's sample_noise")
    check_tensor("noise.gaussian", noise.gaussian, weight, floating=True)
    check_tensor("noise.style", noise.style, weight, floating=False)
    check_tensor("labels", labels, weight)
    if noise.gaussian.ndim == 0:
        raise InputError("noise.gaussian is a single number: use the generator's sample_noise")
    n = noise.gaussian.shape[0]  # torch.export would specialize len() to a constant
    if labels.shape != (n,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels have shape {list(labels.shape)} and dtype {labels.dtype}, expected class indices [{n}] "
            "of an integer dtype"
        )
    if noise.style.shape != (n, codebooks):
        raise InputError(
            f"noise.style has shape {list(noise.style.shape)}, expected [{n}, {codebooks}]: use the "
            "generator's sample_noise"
        )
    if isinstance(alpha, Tensor):
        check_dense("alpha", alpha)
        if alpha.shape not in ((), (1,), (n,)):
            raise InputError(f"alpha has shape {list(alpha.shape)}, expected a number or [{n}]")
    elif not isinstance(alpha, Real):
        raise InputError(f"alpha={show_value(alpha)} must be a number or a tensor [{n}]")
    if labels.device.type == "cpu" and n and not is_tracing():
        _check_range("labels contain", labels, len(weight))
        if codebooks:
            _check_range("noise.style contains", noise.style, entries)


def _check_range(subject: str, indices: Tensor, count: int) -> None:
    low, high = (int(index) for index in indices.aminmax())
    if low < 0 or high >= count:
        raise InputError(f"{subject} {low if low < 0 else high}, expected 0 to {count - 1}")
