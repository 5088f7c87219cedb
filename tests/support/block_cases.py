"""Inputs, networks and tolerances that the tests of Transformer kernels share."""

import torch

from driftgen.generators import DiT
from driftgen.generators.conditioning import RMSNorm
from tests.support.interpreter import DEVICE

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# Relative errors of elements, which are rounded once or twice, and of sums, which are not rounded.
ALLOWED = {FLOAT32: 1e-6, BFLOAT16: 3e-3, FLOAT16: 4e-4}
SUMMED = 1e-5
TINY = {
    "input_size": 8,
    "patch_size": 4,
    "hidden_size": 48,
    "num_heads": 3,
    "depth": 1,
    "context_tokens": 2,
    "num_classes": 4,
    "style_codebooks": 1,
}


def draw(*shape, dtype=FLOAT32, scale=1.0):
    return (scale * torch.randn(*shape)).to(dtype).to(DEVICE)


def leaf(tensor, dtype=None):
    return tensor.detach().to(dtype or tensor.dtype).requires_grad_()


def gradients(function, inputs, upstream):
    """Return the outputs of a function and the gradients of its inputs."""
    inputs = [leaf(t) for t in inputs]
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    grads = torch.autograd.grad(outputs, inputs, [g.to(o) for g, o in zip(upstream, outputs, strict=True)])
    return list(outputs), list(grads)


def poison(monkeypatch):
    """Fill all memory that an operator allocates with NaN, which no result may contain."""
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: real(*a, **k).fill_(torch.nan))


def tiny(**options):
    torch.manual_seed(0)
    net = DiT(**TINY | options).to(DEVICE)
    for p in net.parameters():  # adaLN and the output start at zero
        torch.nn.init.normal_(p, std=0.1)
    for module in net.modules():
        if isinstance(module, RMSNorm):
            torch.nn.init.normal_(module.weight, mean=1, std=0.1)
    return net


def step(net, dtype=None):
    """Return samples and parameter gradients."""
    net.zero_grad()
    noise = net.sample_noise(2, torch.Generator(DEVICE).manual_seed(1))
    labels = torch.tensor([1, 2], device=DEVICE)
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        samples = net(noise, labels, 1.5)
    samples.float().square().sum().backward()
    return samples, [p.grad.clone() for p in net.parameters()]


def flat(gradients):
    return torch.cat([g.double().flatten() for g in gradients])
