import pytest
import torch

from driftgen.generators.image_mlp import PRESETS, ImageMLP, ImageMLPConfig

LABELS = torch.tensor([1, 2, 7])


def tiny(**options):
    torch.manual_seed(0)
    return ImageMLP(**{"hidden_size": 32, "depth": 2, "condition_size": 16, "style_codebooks": 3} | options)


def noise_for(net, n=3):
    return net.sample_noise(n, torch.Generator().manual_seed(1))


# --- architecture ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "millions"), [("8px", 0.225), ("16px", 1.009)])
def test_parameter_counts(preset, millions):
    net = ImageMLP.preset(preset)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(millions * 1e6, rel=5e-3)
    assert ImageMLP.preset(preset, depth=2).config == ImageMLPConfig(**PRESETS[preset] | {"depth": 2})


# --- initialization -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [2, 4])
def test_starts_with_samples_that_differ(preset, depth):
    """Identical samples do not repel each other."""
    net = ImageMLP.preset(preset, depth=depth)
    with torch.no_grad():
        samples = net(net.sample_noise(256), torch.zeros(256, dtype=torch.int64))
    assert samples.std(dim=0).min() > 0.2
    assert 0.4 < samples.std(dim=0).mean() < 1.1


def test_classes_differ_from_the_start():
    net = ImageMLP()
    noise = noise_for(net, 1)
    samples = [net(noise, torch.tensor([label])) for label in range(10)]
    assert torch.pdist(torch.cat(samples).flatten(1)).min() > 1


# --- forward pass ---------------------------------------------------------------------------------------


def test_layers_are_modulated():
    net = tiny(depth=1)
    noise, condition = noise_for(net), torch.randn(3, 16)
    normed = condition / condition.square().mean(dim=1, keepdim=True).sqrt()
    scale, shift = (normed @ net.modulation.weight.T).chunk(2, dim=1)
    h = (noise.gaussian.flatten(1) @ net.layers[0].weight.T) * (1 + scale) + shift
    want = (h * h.sigmoid()) @ net.output.weight.T
    got = net.generate(noise.gaussian, condition)
    torch.testing.assert_close(got.flatten(1), want, rtol=1e-4, atol=1e-5)
