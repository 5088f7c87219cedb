"""Networks on a GPU: samples and features agree with the CPU, also in half precision and compiled."""

from pathlib import Path

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.features import ResNetMAE
from driftgen.generators import DiT, UNet2D
from tests.support.accuracy import error
from tests.support.golden_dit import CASES, GOLDEN, artifact, golden, noise_of

pytestmark = pytest.mark.cuda
ARTIFACTS = Path(__file__).parents[1] / "data" / "artifacts"


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("case", CASES)
def test_golden_samples(case):
    net = dg.load_official(artifact(case)).cuda()
    samples = net(noise_of(case).to("cuda"), golden(case, "c").cuda(), golden(case, "cfg").cuda())
    assert (samples.cpu() - golden(case, "samples")).abs().max() < 2e-5
    assert f"{case}/samples" in GOLDEN


def test_a_seed_gives_the_same_noise_on_both_devices():
    net = DiT(input_size=8, hidden_size=32, depth=1, num_heads=2, num_classes=4)
    cpu = net.sample_noise(5, torch.Generator().manual_seed(3))
    gpu = net.cuda().sample_noise(5, torch.Generator().manual_seed(3))
    assert gpu.gaussian.is_cuda
    assert torch.equal(gpu.gaussian.cpu(), cpu.gaussian)
    assert torch.equal(gpu.style.cpu(), cpu.style)
    own = [net.sample_noise(5, torch.Generator("cuda").manual_seed(3)) for _ in range(2)]
    assert torch.equal(own[0].gaussian, own[1].gaussian)
    assert torch.equal(
        own[0].gaussian[:2], net.sample_noise(2, torch.Generator("cuda").manual_seed(3)).gaussian
    )


@pytest.mark.parametrize("make", [lambda: UNet2D.preset("32px"), lambda: DiT.preset("S/2-32px", depth=2)])
def test_generators(make):
    net = make()
    for parameter in net.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    noise, labels = net.sample_noise(3, torch.Generator().manual_seed(0)), torch.tensor([0, 5, 9])
    want = net(noise, labels, 1.5).detach()
    net.cuda()
    gpu = [noise.to("cuda"), labels.cuda(), 1.5]
    assert error(net(*gpu).detach(), want) < 1e-4
    with torch.autocast("cuda", torch.bfloat16):
        half = net(*gpu)
    half.float().square().mean().backward()
    assert error(half.detach(), want) < 0.03
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert error(compiled(*gpu), want) < 1e-4


def test_encoders():
    images = torch.randn(2, 3, 32, 32).tanh()
    mae = ResNetMAE(3, 64, blocks=(2, 2, 2), decoder=False)
    convnext = dg.load_official(ARTIFACTS / "convnext_tiny")
    stack = dg.features.FeatureStack([mae, convnext])
    want = stack.features(images)
    leaf = images.cuda().requires_grad_()
    got = stack.cuda().features(leaf)
    for name, value in want.items():
        assert error(got[name].detach(), value) < 1e-3, name
    sum(v.square().mean() for v in got.values()).backward()
    assert leaf.grad.isfinite().all()


def test_pipeline():
    folder = ARTIFACTS / "ditgen_C_pixel_patch4"
    cpu, gpu = (dg.DriftPipeline.from_pretrained(folder, device=d) for d in ("cpu", "cuda"))
    a, b = (p([1, 2, 3], seed=0, output="numpy").astype(int) for p in (cpu, gpu))
    assert np.abs(a - b).max() <= 1
    half = dg.DriftPipeline.from_pretrained(folder, device="cuda", dtype=torch.bfloat16)
    c = half([1, 2, 3], seed=0, output="numpy").astype(int)
    assert np.abs(a - c).mean() < 3
