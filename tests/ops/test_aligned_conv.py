"""Convolutions with padded channels against PyTorch's."""

import pytest
import torch
from torch import nn

from driftgen.generators import UNet2D
from driftgen.ops.aligned_conv import aligned_conv, pad_channels, supports_aligned_conv


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs", "stride"), [(12, 32, 1), (3, 16, 2), (32, 12, 1), (16, 3, 1), (5, 7, 1)]
)
def test_padded_channels_change_nothing(inputs, outputs, stride, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, stride=stride, bias=bias).double()
    x = torch.randn(2, inputs, 6, 4, dtype=torch.float64, requires_grad=True)
    expected = conv(x)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *conv.parameters()], upstream)
    result = pad_channels(conv, x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for value, target in zip(
        torch.autograd.grad(result, [x, *conv.parameters()], upstream), wanted, strict=True
    ):
        torch.testing.assert_close(value, target, rtol=1e-12, atol=1e-12)


def test_the_cpu_pads_nothing():
    conv, x = nn.Conv2d(12, 16, 1), torch.randn(1, 12, 2, 2)
    assert not supports_aligned_conv(conv, x)
    torch.testing.assert_close(aligned_conv(conv, x), conv(x), rtol=0, atol=0)


@pytest.mark.cuda
def test_a_unet_on_a_gpu_pads_its_first_and_last_convolution():
    torch.manual_seed(0)
    network = UNet2D(patch_size=2, widths=(32, 64), blocks=(1, 1), attention_levels=(1,)).cuda()
    assert supports_aligned_conv(network.input, torch.ones(1, device="cuda", dtype=torch.bfloat16))
    assert not supports_aligned_conv(network.input, torch.ones(1, device="cuda"))
    noise, labels, alpha = (
        network.sample_noise(8),
        torch.arange(8, device="cuda"),
        torch.ones(8, device="cuda"),
    )
    plain = network(noise, labels, alpha)
    with torch.autocast("cuda", torch.bfloat16):
        assert supports_aligned_conv(network.output, torch.ones(1, device="cuda"))
        padded = network(noise, labels, alpha)
    assert padded.shape == plain.shape
    assert (padded.float() - plain).norm() < 0.03 * plain.norm()
