"""What a generator eats, and what the rest of the package asks of one."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["Generator", "Noise", "check_noise", "draw_noise"]


class Noise(NamedTuple):
    """Everything random that a generator takes: Gaussian noise ``[B, C, H, W]`` and style indices ``[B,
    K]``.
    """

    gaussian: Tensor
    style: Tensor

    def to(self, device: torch.device | str) -> Noise:
        """The same on another device."""
        return Noise(self.gaussian.to(device), self.style.to(device))


@runtime_checkable
class Generator(Protocol):
    """f(ε, c, α): any network with these two methods can be trained and sampled; nothing is to be
    inherited.
    """

    def __call__(self, noise: Noise, labels: Tensor, alpha: Tensor | float) -> Tensor:
        """Samples ``[B, C, H, W]``, one for each row of the noise."""
        ...

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """Everything random for n samples."""
        ...


def draw_noise(
    n: int,
    shape: tuple[int, int, int],
    codebooks: int,
    entries: int,
    generator: torch.Generator | None,
    device: torch.device,
) -> Noise:
    """ε ~ N(0, I) and uniform style indices for n samples.

    With a ``generator`` samples are drawn one after the other on its device: sample i of a seed is then the
    same in whatever batches it is drawn. Without one all are drawn at once where they are needed, which is
    what training wants.
    """
    if generator is None:
        style = torch.randint(entries, (n, codebooks), device=device)
        return Noise(torch.randn(n, *shape, device=device), style)
    at = generator.device
    pinned = device.type == "cuda" and at.type == "cpu"  # a copy from such memory does not wait for the GPU
    gaussian = torch.empty(n, *shape, device=at, pin_memory=pinned)
    style = torch.empty(n, codebooks, dtype=torch.int64, device=at, pin_memory=pinned)
    for i in range(n):
        gaussian[i].normal_(generator=generator)
        style[i].random_(entries, generator=generator)
    return Noise(gaussian.to(device, non_blocking=pinned), style.to(device, non_blocking=pinned))


def check_noise(gaussian: Tensor, shape: tuple[int, int, int]) -> None:
    """Refuses Gaussian noise that is not ``[B, *shape]``."""
    if gaussian.shape[1:] != shape:
        raise InputError(f"noise has shape {list(gaussian.shape)}, expected {['B', *shape]}")
