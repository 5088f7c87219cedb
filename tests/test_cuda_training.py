"""Training on a GPU: the release's step, parts of it, a run with resume, and memory that falls."""

import pytest
import torch

import driftgen as dg
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators import DiT
from driftgen.training.processes import Processes
from driftgen.training.step import Drawn, DriftStep
from driftgen.training.trainer import train
from tests.test_step import CASE, golden_drawn, golden_step, gradients, relative, small, small_drawn
from tests.test_trainer import Silent, config

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = True


def on_gpu(drawn):
    return Drawn(
        drawn.labels.cuda(),
        drawn.alpha.cuda(),
        drawn.noise.to("cuda"),
        drawn.positives.cuda(),
        drawn.unconditional.cuda(),
    )


@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_is_that_of_the_release(micro):
    generator, step = golden_step(micro=micro)
    generator.cuda()
    step.phi.cuda()
    out = step(on_gpu(golden_drawn()))
    assert out.loss.item() == pytest.approx(CASE["loss"], rel=1e-4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in generator.parameters()])
    assert norm.item() == pytest.approx(CASE["g_norm"], rel=1e-3)


def test_exact_parts_give_the_gradient_of_the_whole():
    found = []
    for micro in (1, 3):
        net, step = small(micro=micro)
        drawn = small_drawn(net)
        net.cuda()
        step.phi.cuda()
        step(on_gpu(drawn))
        found.append(gradients(net).cpu())
    assert relative(found[1], found[0]) < 1e-4


def test_parts_need_less_memory():
    """Large enough for activations to outweigh weights, and what cuBLAS takes for itself."""
    net = DiT(input_size=32, in_channels=3, hidden_size=256, depth=4, num_heads=4, num_classes=6).cuda()
    phi = FeatureStack([ResNetMAE(3, 64, blocks=(1, 1), decoder=False)]).cuda()
    r = torch.Generator().manual_seed(0)
    drawn = Drawn(
        torch.arange(6),
        torch.ones(6),
        net.sample_noise(8 * 6, r),
        torch.randn(6, 8, 3, 32, 32, generator=r),
        torch.randn(6, 2, 3, 32, 32, generator=r),
    )
    most = []
    for micro in (1, 6):
        step = DriftStep(net, phi, dg.DriftingLoss(), generated=8, micro=micro, autocast=torch.bfloat16)
        step(on_gpu(drawn))  # what stays, such as gradients
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(on_gpu(drawn))
        most.append(torch.cuda.max_memory_allocated() - before)
    assert most[1] < 0.5 * most[0]


def test_a_run_and_its_resume(tmp_path):
    changes = ["optim.steps=20", "precision=bfloat16"]
    for folder in ("a", "b"):
        steps = ["optim.steps=10", *changes[1:]] if folder == "b" else changes
        assert train(config(*steps), tmp_path / folder, Processes.start(), Silent(), name="digits")
    view = Silent()
    assert train(config(*changes), tmp_path / "b", Processes.start(), view, name="digits", override=True)
    assert view.said[0] == "resumed after step 10"
    assert view.rows[-1]["step"] == 20
    assert view.rows[-1]["memory_gib"] > 0
