"""Seeded weights for the FID Inception, in the layouts of the files people have."""

import torch
from torch import nn

from driftgen.evaluation import inception


def convolutions():
    """Yield name and weight shape of every convolution, in the network's order."""
    with torch.device("meta"):
        network = inception.FIDInception()
    for name, module in network.named_modules():
        if isinstance(module, inception.ConvReLU):
            yield name, tuple(module.weight.shape)


def seeded_weights():
    """Weight, bias, mean and variance of each convolution: large enough that no map dies."""
    for i, (name, shape) in enumerate(convolutions()):
        g = torch.Generator().manual_seed(i)
        fan = shape[1] * shape[2] * shape[3]
        weight = torch.randn(shape, generator=g) * (2 / fan) ** 0.5
        bias, mean = (0.1 * torch.randn(shape[0], generator=g) for _ in range(2))
        yield name, (weight, bias, mean, 0.5 + torch.rand(shape[0], generator=g))


def pytorch_fid_state(classifier=True):
    """State dict in pytorch-fid's layout."""
    state = {}
    for name, (weight, bias, mean, variance) in seeded_weights():
        state |= {
            f"{name}.conv.weight": weight,
            f"{name}.bn.bias": bias,
            f"{name}.bn.weight": torch.ones(len(bias)),
        }
        state |= {f"{name}.bn.running_mean": mean, f"{name}.bn.running_var": variance}
    if classifier:
        g = torch.Generator().manual_seed(1000)
        state |= {"fc.weight": 0.02 * torch.randn(1008, 2048, generator=g), "fc.bias": torch.zeros(1008)}
    return state


class _Layer(nn.Module):
    def __init__(self, weight, bias, mean, variance):
        super().__init__()
        for name, value in (("weight", weight), ("beta", bias), ("mean", mean), ("var", variance)):
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def torchscript():
    """Script module in StyleGAN's layout."""
    return torch.jit.script(nn.Sequential(*(_Layer(*values) for _, values in seeded_weights())))
