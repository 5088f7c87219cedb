import pytest
import torch
import torch.nn.functional as F

from driftgen.errors import InputError
from driftgen.generators.conv_decoder import PRESETS, ConvDecoder, ConvDecoderConfig


@pytest.mark.parametrize(("preset", "millions"), [("32px", 6.443), ("64px", 50.81)])
def test_parameter_counts(preset, millions):
    with torch.device("meta"):
        net = ConvDecoder.preset(preset)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(millions * 1e6, rel=5e-3)
    assert net.config == ConvDecoderConfig(**PRESETS[preset])


def test_starts_with_samples_that_differ():
    """Identical samples do not repel each other."""
    net = ConvDecoder(num_classes=3)
    with torch.no_grad():
        samples = net(net.sample_noise(256), torch.zeros(256, dtype=torch.int64))
    assert samples.std(dim=0).min() > 0.05
    assert 0.4 < samples.std(dim=0).mean() < 1.1


def test_classes_differ_from_the_start():
    net = ConvDecoder(input_size=16, widths=(32, 16))
    noise = net.sample_noise(1, torch.Generator().manual_seed(1))
    samples = [net(noise, torch.tensor([label])) for label in range(10)]
    assert torch.pdist(torch.cat(samples).flatten(1)).min() > 1


def test_levels_are_upsampled_convolved_normalized_and_modulated():
    net = ConvDecoder(input_size=8, in_channels=1, widths=(16, 8), groups=4, condition_size=16)
    gaussian, condition = torch.randn(3, 1, 8, 8), torch.randn(3, 16)
    normed = condition / condition.square().mean(dim=1, keepdim=True).sqrt()
    first, second = (normed @ net.modulation.weight.T).split([32, 16], dim=1)

    def modulate(x, part):
        scale, shift = (half[:, :, None, None] for half in part.chunk(2, dim=1))
        return F.silu(F.group_norm(x, 4, eps=1e-6) * (1 + scale) + shift)

    x = modulate((gaussian.flatten(1) @ net.input.weight.T).reshape(3, 16, 4, 4), first)
    x = torch.cat([F.interpolate(x, (8, 8), mode="bilinear"), gaussian], dim=1)
    x = modulate(F.conv2d(x, net.levels[0].weight, padding=1), second)
    want = F.conv2d(x, net.output.weight, padding=1)
    torch.testing.assert_close(net.generate(gaussian, condition), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widths": ()}, "widths is empty"),
        ({"widths": 8}, "widths=8 must be a list of whole numbers"),
        ({"groups": 0}, "groups=0 is too small"),
        ({"widht": (8,)}, "widht"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(InputError, match=words):
        ConvDecoder(**options)
