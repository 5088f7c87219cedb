"""Samplers: how the chunks of a trained network are drawn, by the method that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from driftgen.errors import InputError, unknown_name
from driftgen.support.whole_numbers import check_count

__all__ = ["TRAINING_STEPS", "ChunkSampler", "DiffusionSampler", "OneStep", "Regression", "make_sampler"]

TRAINING_STEPS = 100  # time steps of a diffusion model in training, as in Diffusion Policy
SCHEDULERS = {"ddpm": 100, "ddim": 10}  # and their network calls per chunk


class ChunkSampler(Protocol):
    """Draws normalized chunks ``[B, T, A]`` from noise of that shape and observations of B or B / N rows."""

    @property
    def calls(self) -> int:
        """Network calls per chunk."""
        ...

    def __call__(self, network: nn.Module, noise: Tensor, observations: Mapping[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class OneStep:
    """a = f(ε, o): one network call."""

    calls: int = 1

    def __call__(self, network: nn.Module, noise: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        chunks: Tensor = network(noise, observations)
        return chunks


@dataclass(frozen=True)
class Regression:
    """a = f(0, o): one chunk per observation, whatever the noise."""

    calls: int = 1

    def __call__(self, network: nn.Module, noise: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        chunks: Tensor = network(torch.zeros_like(noise), observations)
        return chunks


class DiffusionSampler:
    """Reverse diffusion with a scheduler of diffusers: DDPM with 100 calls or DDIM with 10.

    Args:
        scheduler: ``"ddpm"`` or ``"ddim"``.
        calls: network calls per chunk; the usual number of the scheduler if None.
    """

    def __init__(self, scheduler: str = "ddim", calls: int | None = None) -> None:
        if scheduler not in SCHEDULERS:
            raise unknown_name("scheduler", scheduler, SCHEDULERS)
        if calls is not None:
            check_count("calls", calls, most=TRAINING_STEPS)
        self.name, self.calls = scheduler, SCHEDULERS[scheduler] if calls is None else calls
        self.scheduler = make_scheduler(scheduler)

    def __call__(self, network: nn.Module, noise: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        scheduler = self.scheduler
        scheduler.set_timesteps(self.calls)  # on the CPU: the scheduler reads each of them on the host
        options: dict[str, Any] = {}
        if self.name == "ddpm":
            # The variance noise of a chunk follows from its first noise: it depends on no other chunk.
            seeds = noise.flatten(1)[:, 0].float().contiguous().view(torch.int32).tolist()
            options["generator"] = [
                torch.Generator(noise.device).manual_seed(seed & 0x7FFFFFFF) for seed in seeds
            ]
        # Images are encoded once, as in Diffusion Policy, not at every time step.
        tokens = network.encode(observations)  # type: ignore[operator]
        chunks = noise
        times = scheduler.timesteps[:, None].expand(-1, len(chunks)).to(noise.device)
        for index, time in enumerate(scheduler.timesteps):
            predicted = network(chunks, tokens, times[index])
            chunks = scheduler.step(predicted.float(), time, chunks, **options).prev_sample
        return chunks


def make_scheduler(name: str) -> Any:
    """Build a scheduler of diffusers with the settings of Diffusion Policy: ε prediction, squared cosine."""
    try:
        from diffusers import DDIMScheduler, DDPMScheduler
    except ImportError:
        raise InputError(
            "diffusers is not installed, which the diffusion baseline needs: pip install 'driftgen[latent]'",
            topic="missing-extra",
        ) from None
    settings: dict[str, Any] = {
        "num_train_timesteps": TRAINING_STEPS,
        "beta_schedule": "squaredcos_cap_v2",
        "clip_sample": True,
        "prediction_type": "epsilon",
    }
    return (DDIMScheduler if name == "ddim" else DDPMScheduler)(**settings)


def make_sampler(method: str, scheduler: str | None = None, calls: int | None = None) -> ChunkSampler:
    """Return the sampler of a training method; ``scheduler`` and ``calls`` apply to diffusion."""
    if method == "diffusion":
        return DiffusionSampler(scheduler or "ddim", calls)
    if scheduler is not None or calls is not None:
        raise InputError(f"scheduler and calls are for policies of method diffusion, this one is {method}")
    samplers: dict[str, ChunkSampler] = {"drifting": OneStep(), "regression": Regression()}
    if method not in samplers:
        raise unknown_name("method", method, (*samplers, "diffusion"))
    return samplers[method]
