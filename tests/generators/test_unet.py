import pytest
import torch
import torch.nn.functional as F

import driftgen as dg
from driftgen.generators import unet
from driftgen.generators.unet import PRESETS, UNet2D, UNet2DConfig

TINY = {
    "input_size": 8,
    "widths": (32, 64),
    "blocks": (1, 2),
    "attention_levels": (1,),
    "head_size": 16,
    "groups": 8,
    "condition_size": 32,
    "style_codebooks": 3,
}
LABELS = torch.tensor([1, 2, 7])


def tiny(**options):
    torch.manual_seed(0)
    net = UNet2D(**TINY | options)
    for name, p in net.named_parameters():  # modulations and residual branches start at zero
        if "conditioning" in name and "alpha" not in name:
            torch.nn.init.normal_(p, std=0.3)
        elif not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return net


def narrow(preset):
    """Build the preset with a quarter of its width."""
    widths = tuple(w // 4 for w in UNet2DConfig(**PRESETS[preset]).widths)
    return UNet2D.preset(preset, widths=widths, groups=4, head_size=16, condition_size=32)


def noise_for(net, n=3):
    return net.sample_noise(n, torch.Generator().manual_seed(1))


# --- architecture ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "millions"), [("28px", 13.2), ("32px", 31.2), ("64px", 34.5)])
def test_parameter_counts(preset, millions):
    with torch.device("meta"):
        net = UNet2D.preset(preset)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(millions * 1e6, rel=5e-3)


@pytest.mark.parametrize(
    ("preset", "shape"), [("28px", (1, 28, 28)), ("32px", (3, 32, 32)), ("64px", (3, 64, 64))]
)
def test_shapes(preset, shape):
    net = narrow(preset)
    assert isinstance(net, dg.generators.Generator)
    samples = net(net.sample_noise(2), torch.tensor([0, 9]))
    assert samples.shape == (2, *shape)
    assert samples.isfinite().all()


def test_attention_levels():
    def attending(**options):
        return sum(isinstance(m, unet.Attention) for m in tiny(**options).modules())

    assert attending() == 5  # two blocks down, one between, two up
    assert attending(attention_levels=(0, 1)) == 7
    assert attending(attention_levels=()) == 0


def test_patches():
    """The same network on images whose patches are channels, with a quarter of the locations."""
    net = tiny(patch_size=2, input_size=16)
    plain = tiny(in_channels=12)
    plain.load_state_dict(net.state_dict())
    noise = noise_for(net)
    samples = net(noise, LABELS)
    assert samples.shape == (3, 3, 16, 16)
    channels = dg.generators.Noise(F.pixel_unshuffle(noise.gaussian, 2), noise.style)
    torch.testing.assert_close(F.pixel_unshuffle(samples, 2), plain(channels, LABELS), rtol=0, atol=0)
    with pytest.raises(dg.errors.InputError, match=r"in patches of 2 can be halved 0 times .* to 8"):
        tiny(patch_size=2, input_size=6)


@pytest.mark.cuda
def test_maps_stay_bfloat16_under_autocast():
    net = tiny().cuda()
    dtypes = set()
    for module in net.modules():
        if isinstance(module, unet.Block | unet.AdaptiveNorm):
            module.register_forward_hook(lambda module, args, out: dtypes.update((args[0].dtype, out.dtype)))
    with torch.autocast("cuda", torch.bfloat16):
        net(net.sample_noise(3), LABELS.cuda())
    assert dtypes == {torch.bfloat16}


# --- initialization -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_starts_with_samples_that_differ(preset):
    """Identical samples do not repel each other."""
    net = narrow(preset)
    with torch.no_grad():
        samples = net(net.sample_noise(64), torch.zeros(64, dtype=torch.int64))
    spread = samples.std(dim=0)
    assert spread.isfinite().all()
    assert spread.min() > 0.2
    assert 0.5 < spread.mean() < 1.1


def test_skips_carry_the_noise_of_every_pixel():
    net = UNet2D(**TINY)
    seen = []
    net.final_norm.register_forward_hook(lambda module, arguments, out: seen.append(arguments[0]))
    net(noise_for(net), LABELS)
    cells = seen[0].unflatten(3, (4, 2)).unflatten(2, (4, 2))  # without skips they would be constant
    assert cells.std(dim=(3, 5)).mean() > 0.2


# --- forward pass ---------------------------------------------------------------------------------------


def test_condition_is_the_sum_of_the_embeddings():
    net = tiny()
    style = noise_for(net).style
    total = net.conditioning.classes.weight[LABELS] + net.conditioning.alpha(torch.full((3,), 1.5))
    for i in range(3):
        total = total + net.conditioning.styles[i].weight[style[:, i]]
    torch.testing.assert_close(net.condition(LABELS, 1.5, style), total)


def test_adaptive_norm():
    norm = unet.AdaptiveNorm(UNet2DConfig(**TINY), 32)
    x, condition = 3 * torch.randn(2, 32, 4, 4) + 5, torch.randn(2, 32)
    scale, shift = norm.modulation(condition).chunk(2, dim=1)
    grouped = x.reshape(2, 8, -1)
    mean, deviation = grouped.mean(-1, keepdim=True), grouped.std(-1, correction=0, keepdim=True)
    scale, shift = scale[..., None, None], shift[..., None, None]
    z = ((grouped - mean) / deviation).reshape(x.shape) * (1 + scale) + shift
    torch.testing.assert_close(norm(x, condition), z * z.sigmoid(), rtol=1e-4, atol=1e-5)


# --- execution ------------------------------------------------------------------------------------------


def test_checkpointed_blocks_give_the_same_gradients(monkeypatch):
    calls = []

    def counting(*arguments, **options):
        calls.append(arguments[0])
        return checkpoint(*arguments, **options)

    checkpoint = unet.checkpoint
    monkeypatch.setattr(unet, "checkpoint", counting)
    gradients = []
    for checkpointed in (False, True):
        net = tiny()
        net.checkpoint_blocks = checkpointed
        net(noise_for(net), LABELS, 1.5).square().sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    assert len(calls) == sum(isinstance(m, unet.Block) for m in net.modules()) == 7
    assert UNet2D(checkpoint_blocks=True, **TINY).checkpoint_blocks
    assert UNet2D.preset("28px", checkpoint_blocks=True, **TINY).checkpoint_blocks


def test_bfloat16_with_norms_in_float32(monkeypatch):
    seen = []

    def watched(x, *arguments, **options):
        seen.append(x.dtype)
        return group_norm(x, *arguments, **options)

    group_norm = torch.nn.functional.group_norm
    monkeypatch.setattr(unet.F, "group_norm", watched)
    net = tiny()
    noise = noise_for(net)
    want = net(noise, LABELS, 1.5)
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = net(noise, LABELS, 1.5)
    converted = net.bfloat16()(noise, LABELS, 1.5)
    assert set(seen) == {torch.float32}
    for samples in (automatic, converted):
        assert samples.dtype == torch.bfloat16
        assert (samples - want).std() < 0.02 * want.std()


def test_channels_last():
    net = tiny()
    noise = noise_for(net)
    want = net(noise, LABELS)
    net = net.to(memory_format=torch.channels_last)
    noise = noise._replace(gaussian=noise.gaussian.contiguous(memory_format=torch.channels_last))
    samples = net(noise, LABELS)
    torch.testing.assert_close(samples, want, rtol=0, atol=1e-5)
    assert samples.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_upsampling_by_views(layout):
    x = torch.randn(2, 5, 3, 4).contiguous(memory_format=layout).requires_grad_()
    want, got = F.interpolate(x, scale_factor=2.0, mode="nearest"), unet.repeat_pixels(x)
    assert torch.equal(got, want)
    assert got.is_contiguous(memory_format=layout)
    upstream = torch.randn_like(want)
    gradients = [torch.autograd.grad(y, x, upstream)[0] for y in (got, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_compiles_whole_with_a_dynamic_batch():
    net = tiny(blocks=(1, 1), style_codebooks=1)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():  # tracing the gradients as well takes another ten seconds
        for n in (2, 5):
            noise, labels = net.sample_noise(n), torch.arange(n)
            want = net(noise, labels, 1.5)
            torch.testing.assert_close(compiled(noise, labels, torch.full((n,), 1.5)), want)


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"input_size": 7},
            "input_size=7 can be halved 0 times (pad the images to 8, or use fewer levels)",
        ),
        ({"widths": (32, 64, 64)}, "widths has 3 levels, blocks has 2"),
        ({"widths": (), "blocks": ()}, "widths is empty"),
        ({"blocks": (1, 0)}, "blocks=(1, 0) is too small"),
        ({"groups": 5}, "groups=5 does not divide"),
        ({"attention_levels": (2,)}, "widths has levels 0 to 1, attention_levels has 2"),
        ({"head_size": 24}, "widths has 64 at attention level 1, which head_size=24 does not divide"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(dg.InputError, match=r".") as error:
        UNet2D(**TINY | options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
