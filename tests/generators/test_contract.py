"""The contract of every image generator: inputs, noise, gradients, files, dtypes and compilation."""

import copy

import pytest
import torch

import driftgen as dg
from driftgen.generators import MLP, ConvDecoder, DiT, Generator, ImageMLP, Noise, UNet2D
from driftgen.generators.conditioning import Conditioning
from driftgen.model_io import load_model, save_model
from driftgen.ops.compile import compile_parts
from tests.support.helpers import fails

MAKE = {
    "DiT": lambda **o: DiT(
        **{
            "input_size": 8,
            "in_channels": 3,
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "context_tokens": 2,
            "num_classes": 10,
            "style_codebooks": 3,
        }
        | o
    ),
    "UNet2D": lambda **o: UNet2D(
        **{
            "input_size": 8,
            "widths": (16, 32),
            "blocks": (1, 1),
            "attention_levels": (1,),
            "head_size": 16,
            "groups": 8,
            "condition_size": 32,
            "style_codebooks": 3,
        }
        | o
    ),
    "ConvDecoder": lambda **o: ConvDecoder(
        **{"input_size": 8, "widths": (16, 8), "condition_size": 16, "style_codebooks": 3} | o
    ),
    "ImageMLP": lambda **o: ImageMLP(
        **{"in_channels": 3, "hidden_size": 32, "depth": 2, "condition_size": 16, "style_codebooks": 3} | o
    ),
}
LABELS, ALPHA = torch.tensor([1, 2, 7]), torch.tensor([1.0, 2.0, 3.0])
generators = pytest.mark.parametrize("name", MAKE)


def make(name, **options):
    """Build a generator without layers at zero, which would hide the layers before them."""
    torch.manual_seed(0)
    net = MAKE[name](**options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def noise_for(net, n=3):
    return net.sample_noise(n, torch.Generator().manual_seed(1))


@generators
def test_a_call_returns_samples_of_the_shape_of_the_noise(name):
    net = make(name)
    assert isinstance(net, Generator)
    noise = noise_for(net)
    assert noise.style.shape == (3, 3)
    samples = net(noise, LABELS, ALPHA)
    assert samples.shape == noise.gaussian.shape == (3, 3, 8, 8)
    assert samples.isfinite().all()
    assert torch.equal(net(noise, LABELS), net(noise, LABELS, 1.0))
    torch.testing.assert_close(net(noise, LABELS, torch.ones(3)), net(noise, LABELS))


@generators
def test_other_sizes(name):
    net = make(name, input_size=12, in_channels=5, style_codebooks=0, num_classes=2)
    assert net.sample_noise(2).style.shape == (2, 0)
    assert net(net.sample_noise(2), torch.tensor([0, 1])).shape == (2, 5, 12, 12)


def test_a_user_class_satisfies_the_protocol():
    class Mine:
        def __call__(self, noise, labels, alpha):
            return noise.gaussian

        def sample_noise(self, n, generator=None):
            return Noise(torch.randn(n, 3, 4, 4), torch.zeros(n, 0, dtype=torch.int64))

    assert isinstance(Mine(), Generator)
    assert not isinstance(torch.nn.Linear(2, 2), Generator)


@generators
def test_noise_does_not_depend_on_the_batch_size(name):
    net = make(name)
    whole = net.sample_noise(10, torch.Generator().manual_seed(3))
    rng = torch.Generator().manual_seed(3)
    parts = [net.sample_noise(n, rng) for n in (1, 4, 5)]
    assert torch.equal(whole.gaussian, torch.cat([p.gaussian for p in parts]))
    assert torch.equal(whole.style, torch.cat([p.style for p in parts]))
    assert whole.style.min() >= 0
    assert whole.style.max() < net.config.style_entries
    assert abs(float(net.sample_noise(200).gaussian.std()) - 1) < 0.02


def test_noise_of_the_toy_generator_does_not_depend_on_the_batch_size():
    net, rng = MLP(), torch.Generator().manual_seed(3)
    whole = net.sample_noise(32, torch.Generator().manual_seed(3))
    assert torch.equal(whole, torch.cat([net.sample_noise(16, rng) for _ in range(2)]))
    assert net(whole).shape == (32, 2)


@generators
def test_the_noise_determines_the_sample(name):
    """Global RNG state and other samples of the batch have no effect."""
    net = make(name)
    noise = noise_for(net)
    whole = net(noise, LABELS, ALPHA)
    torch.manual_seed(99)
    assert torch.equal(net(noise, LABELS, ALPHA), whole)
    for i in range(3):
        one = slice(i, i + 1)
        alone = net(Noise(noise.gaussian[one], noise.style[one]), LABELS[one], ALPHA[one])
        torch.testing.assert_close(alone, whole[one], rtol=0, atol=1e-5)


@generators
def test_every_input_matters(name):
    net = make(name)
    noise = noise_for(net)
    base = net(noise, LABELS, 1.0)
    for other in (
        net(noise, LABELS, 2.0),
        net(noise, LABELS + 1, 1.0),
        net(noise._replace(style=(noise.style + 1) % 64), LABELS, 1.0),
        net(noise._replace(gaussian=noise.gaussian.flip(3)), LABELS, 1.0),
    ):
        assert (other - base).flatten(1).std(dim=1).min() > 1e-4


@generators
def test_training_reaches_every_parameter_and_the_noise(name):
    torch.manual_seed(0)
    net = MAKE[name]()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    noise, target = noise_for(net), torch.randn(3, 3, 8, 8)
    noise.gaussian.requires_grad_()
    for _ in range(4):  # the first steps move the layers that start at zero
        optimizer.zero_grad()
        (net(noise, LABELS, ALPHA) - target).square().sum().backward()
        optimizer.step()
    for parameter_name, p in net.named_parameters():
        assert p.grad is not None, parameter_name
        assert p.grad.abs().max() > 1e-6, parameter_name
    assert (noise.gaussian.grad.flatten(1).norm(dim=1) > 1e-3).all()


@generators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_round_trip_bit_exact(name, dtype, tmp_path):
    net = make(name).to(dtype)
    noise = noise_for(net)
    loaded = load_model(save_model(net, tmp_path))
    assert type(loaded) is type(net)
    assert loaded.config == net.config
    for key, value in net.state_dict().items():
        assert loaded.state_dict()[key].dtype == dtype
        assert torch.equal(loaded.state_dict()[key], value), key
    with torch.no_grad():
        assert torch.equal(loaded(noise, LABELS, ALPHA), net(noise, LABELS, ALPHA))


@generators
def test_bfloat16(name):
    net = make(name)
    noise = noise_for(net)
    want = net(noise, LABELS, 1.5)
    assert want.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = net(noise, LABELS, 1.5)
    for samples in (automatic, net.bfloat16()(noise, LABELS, 1.5)):
        assert samples.dtype == torch.bfloat16
        assert (samples - want).std() < 0.03 * want.std()


@pytest.mark.slow
@generators
def test_compiled_parts_keep_samples_and_gradients(name, monkeypatch):
    real = torch.compile  # traced as always, but without minutes of code generation
    monkeypatch.setattr(
        torch, "compile", lambda f, **o: real(f, backend="aot_eager", dynamic=o.get("dynamic"))
    )
    torch._dynamo.reset()
    plain = make(name)
    compiled = copy.deepcopy(plain)
    compile_parts(compiled)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    noise, results = noise_for(plain), []
    for net in (plain, compiled):
        samples = net(noise, LABELS, 1.5)
        samples.square().sum().backward()
        results.append((samples, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@generators
def test_wrong_inputs(name):
    net = make(name)
    noise = noise_for(net)
    wrong = noise._replace(gaussian=torch.randn(3, 3, 16, 16))
    fails(lambda: net(wrong, LABELS), r"noise has shape \[3, 3, 16, 16\], expected \[B, 3, 8, 8\]")
    wrong = noise._replace(style=noise.style[:, :2])
    fails(lambda: net(wrong, LABELS), r"noise.style has shape \[3, 2\], expected \[3, 3\]")
    fails(
        lambda: net(noise, LABELS[:2]), r"labels have shape \[2\] and dtype torch.int64, expected class .*3"
    )
    fails(lambda: net(noise, LABELS.float()), r"labels have .* dtype torch.float32, .* an integer dtype")
    fails(lambda: net(noise, LABELS + 3), "labels contain 10, expected 0 to 9")
    fails(lambda: net(noise, LABELS - 3), "labels contain -2, expected 0 to 9")
    outside = Noise(noise.gaussian, noise.style + net.config.style_entries)
    fails(lambda: net(outside, LABELS), r"noise.style contains \d+, expected 0 to \d+")
    fails(lambda: net(noise, LABELS, ALPHA[:2]), r"alpha has shape \[2\], expected a number or \[3\]")


@generators
def test_wrong_options_and_presets(name):
    fails(lambda: MAKE[name](num_clases=8), "option='num_clases' is not known: did you mean 'num_classes'")
    fails(lambda: MAKE[name](style_codebooks=-1), "style_codebooks=-1 is too small: it must be at least 0")
    fails(lambda: MAKE[name](num_classes=0), "num_classes=0 is too small: it must be at least 1")
    fails(lambda: type(MAKE[name]()).preset("9px"), "preset='9px' is not known")


@generators
def test_options_replace_those_of_a_config(name):
    net = MAKE[name]()
    assert type(net)(net.config, num_classes=3).config == dg.generators.__dict__[f"{name}Config"](
        **{**vars(net.config), "num_classes": 3}
    )


def test_styles_are_the_sum_of_one_row_of_each_codebook():
    conditioning = Conditioning(4, codebooks=3, entries=5, size=6)
    labels, alpha = torch.tensor([1, 3]), torch.tensor([1.0, 2.0])
    style = torch.tensor([[0, 4, 2], [3, 3, 1]])
    rows = sum(table(style[:, i]) for i, table in enumerate(conditioning.styles))
    expected = conditioning.classes(labels) + conditioning.alpha(alpha) + rows
    found = conditioning(labels, alpha, style)
    torch.testing.assert_close(found, expected)
    weights = list(conditioning.parameters())
    gradients = (torch.autograd.grad(out.square().sum(), weights) for out in (found, expected))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)
