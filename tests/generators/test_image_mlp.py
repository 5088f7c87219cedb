import pytest
import torch

import driftgen as dg
from driftgen.generators import Noise
from driftgen.generators.image_mlp import PRESETS, ImageMLP, ImageMLPConfig

LABELS = torch.tensor([1, 2, 7])


def tiny(**options):
    torch.manual_seed(0)
    return ImageMLP(**{"hidden_size": 32, "depth": 2, "condition_size": 16, "style_codebooks": 3} | options)


def noise_for(net, n=3):
    return net.sample_noise(n, torch.Generator().manual_seed(1))


# --- what it is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "millions"), [("8px", 0.225), ("16px", 1.009)])
def test_parameter_counts(preset, millions):
    net = ImageMLP.preset(preset)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(millions * 1e6, rel=5e-3)
    assert ImageMLP.preset(preset, depth=2).config == ImageMLPConfig(**PRESETS[preset] | {"depth": 2})


def test_shapes():
    for net in (ImageMLP(), tiny(input_size=5, in_channels=3, style_codebooks=0, num_classes=2)):
        assert isinstance(net, dg.generators.Generator)
        c = net.config
        samples = net(net.sample_noise(2), torch.tensor([0, 1]))
        assert samples.shape == (2, c.in_channels, c.input_size, c.input_size)
        assert net.sample_noise(2).style.shape == (2, c.style_codebooks)


# --- how it starts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [2, 4])
def test_starts_with_samples_that_differ(preset, depth):
    """Samples that are all alike do not repel each other."""
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


def test_training_reaches_every_parameter_and_the_noise():
    net = tiny()
    noise = noise_for(net)
    noise.gaussian.requires_grad_()
    net(noise, LABELS, torch.tensor([1.0, 2.0, 3.0])).square().sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 1e-6, name
    assert (noise.gaussian.grad.flatten(1).norm(dim=1) > 1e-3).all()


# --- what it computes -----------------------------------------------------------------------------------


def test_every_input_matters():
    net = tiny()
    noise = noise_for(net)
    base = net(noise, LABELS, 1.0)
    for other in (
        net(noise, LABELS, 2.0),
        net(noise, LABELS + 1, 1.0),
        net(noise._replace(style=(noise.style + 1) % 64), LABELS, 1.0),
        net(noise._replace(gaussian=noise.gaussian.flip(3)), LABELS, 1.0),
    ):
        assert (other - base).flatten(1).std(dim=1).min() > 1e-3
    assert torch.equal(net(noise, LABELS), base)
    torch.testing.assert_close(net(noise, LABELS, torch.ones(3)), base)


def test_layers_are_modulated():
    net = tiny(depth=1)
    noise, condition = noise_for(net), torch.randn(3, 16)
    normed = condition / condition.square().mean(dim=1, keepdim=True).sqrt()
    scale, shift = (normed @ net.modulation.weight.T).chunk(2, dim=1)
    h = (noise.gaussian.flatten(1) @ net.layers[0].weight.T) * (1 + scale) + shift
    want = (h * h.sigmoid()) @ net.output.weight.T
    got = net.generate(noise.gaussian, condition)
    torch.testing.assert_close(got.flatten(1), want, rtol=1e-4, atol=1e-5)


def test_samples_do_not_depend_on_their_batch():
    net = tiny()
    noise, alpha = noise_for(net), torch.tensor([1.0, 2.0, 3.0])
    whole = net(noise, LABELS, alpha)
    for i in range(3):
        one = slice(i, i + 1)
        alone = net(Noise(noise.gaussian[one], noise.style[one]), LABELS[one], alpha[one])
        torch.testing.assert_close(alone, whole[one], rtol=0, atol=1e-5)


def test_noise_does_not_depend_on_the_batch():
    net = tiny()
    whole = net.sample_noise(10, torch.Generator().manual_seed(3))
    rng = torch.Generator().manual_seed(3)
    parts = [net.sample_noise(n, rng) for n in (1, 4, 5)]
    assert torch.equal(whole.gaussian, torch.cat([p.gaussian for p in parts]))
    assert torch.equal(whole.style, torch.cat([p.style for p in parts]))


def test_bfloat16():
    net = tiny()
    noise = noise_for(net)
    want = net(noise, LABELS, 1.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = net(noise, LABELS, 1.5)
    for samples in (automatic, net.bfloat16()(noise, LABELS, 1.5)):
        assert samples.dtype == torch.bfloat16
        assert (samples - want).std() < 0.03 * want.std()


# --- what it refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth=0 is too small"),
        ({"style_codebooks": -1}, "style_codebooks=-1 is too small"),
        ({"hiden_size": 8}, "option='hiden_size' is not known: did you mean 'hidden_size'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(dg.InputError) as error:
        ImageMLP(**options)
    assert message in str(error.value)


def test_wrong_preset_and_noise():
    with pytest.raises(dg.InputError, match="preset='9px' is not known"):
        ImageMLP.preset("9px")
    net = tiny()
    with pytest.raises(dg.InputError, match=r"noise has shape \[2, 1, 4, 4\], expected \['B', 1, 8, 8\]"):
        net(Noise(torch.randn(2, 1, 4, 4), torch.zeros(2, 3, dtype=torch.long)), LABELS[:2])
