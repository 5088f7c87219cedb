"""float8 layers: results, the layers they replace, and devices that lack them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import driftgen as dg
from driftgen.bench import sampling_bench as sampling
from driftgen.generators import DiT, UNet2D, fp8
from driftgen.generators.fp8 import Fp8Linear, Fp8SwiGLU, check_fp8, has_fp8, quantize, use_fp8
from driftgen.ops.compile import compile_parts
from tests.support.accuracy import error
from tests.support.helpers import fails
from tests.support.pipelines import lively

SIZES = {"input_size": 8, "hidden_size": 64, "depth": 2, "num_heads": 2, "num_classes": 4}
SMALL = {**SIZES, "context_tokens": 2, "style_codebooks": 2}


def reference(rows, weight, scale, weight_scale, *, bias, out_dtype, use_fast_accum):
    """Compute the product of a GPU in float32, from the same float8 operands."""
    return ((rows.float() * scale) @ (weight.float() * weight_scale) + bias.float()).to(out_dtype)


@pytest.fixture
def anywhere(monkeypatch):
    """Allow float8 layers on the CPU, where older PyTorch has no such product."""
    monkeypatch.setattr(fp8, "DEVICES", {"cpu", "cuda"})
    rows, scale = quantize(torch.ones(2, 16))
    try:
        torch._scaled_mm(rows, rows.t(), scale, scale.t().contiguous(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        monkeypatch.setattr(torch, "_scaled_mm", reference)


def sampled(network, n=3):
    noise = network.sample_noise(n, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return network(noise, torch.arange(n), 1.5)


def test_quantized_rows():
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 1.0])[:, None]
    x[4] = torch.linspace(-1, 1, 64)
    rows, scale = quantize(x)
    assert rows.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 1)
    assert torch.equal(rows.float().abs().amax(1), torch.tensor([448.0, 448, 448, 0, 448]))
    back = rows.float() * scale
    # Three bits of mantissa, and steps of 2^-9 among subnormals.
    assert ((back - x).abs() <= x.abs() / 16 + scale * 2**-10).all()
    assert torch.equal(back[3], x[3])
    half, of_half = quantize(x.bfloat16())
    again, of_float = quantize(x.bfloat16().float())
    assert torch.equal(half.float(), again.float())
    assert torch.equal(of_half, of_float)


def test_a_layer_multiplies_quantized_operands(anywhere):
    first, second = nn.Linear(32, 48), nn.Linear(32, 16)
    layer = Fp8Linear(first, second)
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        got = layer(x)
    weight, scales = quantize(torch.cat([first.weight, second.weight]).detach())
    rows, scale = quantize(x.reshape(10, 32))
    bias = torch.cat([first.bias, second.bias]).detach().bfloat16()
    want = (rows.float() * scale) @ (weight.float() * scales).t() + bias.float()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.reshape(2, 5, 64), rtol=1e-2, atol=1e-2)
    assert error(got, torch.cat([first(x), second(x)], -1).detach()) < 0.05
    with torch.inference_mode():
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"mlp": "gelu", "norm": "layer", "qk_norm": "none"}])
def test_the_large_layers_of_a_network(anywhere, options):
    network = lively(DiT(**SMALL, **options))
    want = sampled(network)
    rounded = copy.deepcopy(network)
    assert use_fp8(rounded) == 2 * (4 if options else 5)
    assert has_fp8(rounded)
    assert not has_fp8(network)
    kept = {name for name, module in rounded.named_modules() if isinstance(module, nn.Linear)}
    assert {name.split(".")[-1] for name in kept if name.startswith("blocks")} == {"modulation"}
    assert {"patch_embedding", "context_projection", "final.modulation", "final.output"} <= kept
    assert isinstance(rounded.blocks[0].mlp, Fp8SwiGLU) != bool(options)
    assert 1e-4 < error(sampled(rounded), want) < 0.05


def test_dtype_conversions_skip_the_layers(anywhere):
    network = lively(DiT(**SMALL))
    use_fp8(network)
    before = {name: value.clone() for name, value in network.blocks[0].mlp.state_dict().items()}
    network.bfloat16().float().bfloat16()
    after = network.blocks[0].mlp.state_dict()
    assert {str(value.dtype) for value in after.values()} == {
        "torch.float8_e4m3fn",
        "torch.float32",
        "torch.bfloat16",
    }
    assert all(torch.equal(after[name].float(), value.float()) for name, value in before.items())
    assert network.blocks[0].modulation.weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_compiled(anywhere, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager"))
    torch._dynamo.reset()
    network = lively(DiT(**SMALL))
    use_fp8(network)
    want = sampled(network)
    compile_parts(network)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(sampled(network), want, rtol=1e-3, atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # condition, block, last layer
    assert not torch._dynamo.utils.counters["graph_break"]
    fails(lambda: network(network.sample_noise(1), torch.tensor([0])), "fp8 layers have no gradient")
    torch._dynamo.reset()


def test_no_gradient(anywhere):
    fails(lambda: Fp8Linear(nn.Linear(16, 16))(torch.randn(1, 16)), "fp8 layers have no gradient")


def test_networks_without_fp8_layers(anywhere):
    fails(lambda: use_fp8(UNet2D.preset("28px")), "fp8: UNet2D has no layers for it")
    narrow = DiT(**{**SMALL, "hidden_size": 24, "num_heads": 2, "mlp": "gelu"})
    fails(lambda: use_fp8(narrow), "fp8: DiT has no layers for it")
    twice = DiT(**SMALL)
    use_fp8(twice)
    fails(lambda: use_fp8(twice), "fp8: DiT has no layers for it")


def test_devices_without_fp8(monkeypatch):
    needed = "fp8 needs an NVIDIA GPU of compute capability 8.9 or more"
    for device in (None, "cpu", torch.device("mps")):
        fails(lambda device=device: check_fp8(device), f"{needed} .*, the device is ")
    fails(lambda: check_fp8("warp"), "device=warp: ")
    fails(lambda: use_fp8(DiT(**SMALL)), f"{needed} .*, the device is cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    card = SimpleNamespace(capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    fails(lambda: check_fp8("cuda"), f"{needed} .*, NVIDIA A100 has 8.0")
    for capability in ((8, 9), (9, 0), (10, 0)):
        card.capability = capability
        check_fp8("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", None)  # another maker's
    fails(lambda: check_fp8("cuda"), f"{needed} .*, and PyTorch finds none here")


def test_a_pipeline(anywhere, tmp_path):
    network = lively(DiT(**SMALL))
    plain = dg.DriftPipeline(network)
    plain.save_pretrained(tmp_path / "m")
    pipe = dg.DriftPipeline.from_pretrained(tmp_path / "m", fp8=True)
    assert has_fp8(pipe.generator)
    assert pipe.generator.positions.dtype == torch.bfloat16
    want = plain([0, 1, 2], seed=0, output="latent")
    assert 1e-4 < error(pipe([0, 1, 2], seed=0, output="latent"), want) < 0.05
    fails(lambda: pipe.save_pretrained(tmp_path / "n"), "a pipeline with fp8 cannot be saved")
    assert not (tmp_path / "n").exists()
    wide = dg.DriftPipeline.from_pretrained(tmp_path / "m", fp8=True, dtype=torch.float32)
    assert wide.generator.positions.dtype == torch.float32


def test_errors_in_the_benchmark(anywhere, monkeypatch):
    monkeypatch.setattr(sampling, "make_generator", lambda preset: DiT(**SMALL))
    found = sampling.fp8_errors("", torch.float32, torch.device("cpu"), count=2)
    assert [row["std"] for row in found] == [0.02, 0.3]
    for row in found:
        assert row["against_eager"] == row["against_float32"]
        assert row["eager_against_float32"] == 0
    small, large = (row["against_eager"] for row in found)
    assert 1e-4 < small < large < 0.1  # in blocks that weigh more, so do their errors
