"""Train a network of your own on arrays in memory: python examples/train_own_network.py"""

import torch
from torch import nn

import driftgen as dg
from driftgen.data.images import digits


class TinyNet(nn.Module):
    """A generator is any module with forward(noise, labels, alpha) and sample_noise(n, generator)."""

    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.layers = nn.Sequential(
            nn.Linear(128, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        )
        for layer in self.layers[::2]:  # samples that start too much alike do not repel each other
            nn.init.orthogonal_(layer.weight, gain=1.5)

    def forward(self, noise, labels, alpha):
        condition = 0.5 * self.embed(labels) * torch.as_tensor(alpha).reshape(-1, 1)
        x = torch.cat([noise.gaussian.flatten(1), condition], dim=1)
        return self.layers(x).reshape(-1, 1, 8, 8)

    def sample_noise(self, n, generator=None):
        return dg.generators.Noise(torch.randn(n, 1, 8, 8, generator=generator), torch.zeros(n, 0).long())


if __name__ == "__main__":
    images, labels = digits("train")  # any arrays: uint8 or float images [n, 1, 8, 8], integer labels [n]
    run = dg.train("digits", data=(images, labels), generator=TinyNet(), optim={"steps": 900, "warmup": 200})
    print(run.report, run.metrics[-1]["drift"], run.evaluate(500))
    run.pipeline()(labels=range(10), seed=0)[3].resize((256, 256)).save(run.folder / "three.png")
