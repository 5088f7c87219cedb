"""Small generators for pipeline tests."""

import torch

from driftgen.generators import DiT, Noise


def lively(network):
    """Add noise to all weights, so that zero-initialized layers have an effect."""
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network


def small(**options):
    return lively(
        DiT(
            input_size=8,
            in_channels=3,
            hidden_size=32,
            depth=1,
            num_heads=2,
            num_classes=4,
            context_tokens=2,
            style_codebooks=2,
            **options,
        )
    )


class Own(torch.nn.Module):
    """A user's generator without a base class or a config."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, noise, labels, alpha):
        return (noise.gaussian * self.scale).tanh() * (labels[:, None, None, None] + 1) / 8

    def sample_noise(self, n, generator=None):
        style = torch.zeros(n, 0, dtype=torch.long)
        return Noise(torch.stack([torch.randn(3, 4, 4, generator=generator) for _ in range(n)]), style)
