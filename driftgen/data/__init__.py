"""Real samples: toy distributions, images, latents, and the draws of a training step."""

from driftgen.data import toy

__all__ = ["toy"]
