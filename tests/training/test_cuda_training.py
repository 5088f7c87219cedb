"""Training on a GPU: the release's step, parts of it, a run with resume, and memory that falls."""

import pytest
import torch

import driftgen as dg
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators import DiT
from driftgen.training.distributed import Distributed
from driftgen.training.graphed_step import GraphedStep
from driftgen.training.step import DriftStep, StepInputs
from driftgen.training.trainer import train
from tests.support.golden_steps import (
    CASE,
    golden_step,
    golden_step_inputs,
    gradients,
    relative,
    small,
    small_step_inputs,
)
from tests.support.runs import Silent, config, final

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = True


def on_gpu(drawn):
    return StepInputs(
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
    out = step(on_gpu(golden_step_inputs()))
    assert out.loss.item() == pytest.approx(CASE["loss"], rel=1e-4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in generator.parameters()])
    assert norm.item() == pytest.approx(CASE["g_norm"], rel=1e-3)


def test_exact_parts_give_the_gradient_of_the_whole():
    found = []
    for micro in (1, 3):
        net, step = small(micro=micro)
        drawn = small_step_inputs(net)
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
    drawn = StepInputs(
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
        assert train(config(*steps), tmp_path / folder, Distributed.start(), Silent(), name="digits")
    view = Silent()
    assert train(config(*changes), tmp_path / "b", Distributed.start(), view, name="digits", override=True)
    assert view.said[0] == "resumed after step 10"
    assert view.rows[-1]["step"] == 20
    assert view.rows[-1]["memory_gib"] > 0


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_recorded_step_is_the_step(autocast):
    """With new numbers, other weights and other sizes at each call."""
    net, step = small(autocast=autocast)
    net.cuda()
    step.phi.cuda()
    said = []
    recorded = GraphedStep(step, net.parameters(), said.append)
    for seed, classes in ((0, 6), (1, 6), (2, 3), (3, 3)):
        drawn = on_gpu(small_step_inputs(net, seed, classes))
        net.zero_grad()
        wanted = step(drawn)
        loss, gradient = wanted.loss.item(), gradients(net).clone()
        net.zero_grad()
        found = recorded(drawn)
        assert found.loss.item() == pytest.approx(loss, rel=1e-5)
        assert relative(gradients(net), gradient) < 1e-5
        assert list(found.scale) == list(wanted.scale)
        for name in wanted.scale:
            torch.testing.assert_close(found.scale[name], wanted.scale[name])
            torch.testing.assert_close(found.generated[name], wanted.generated[name])
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    assert not said
    assert recorded.recordable


def test_a_step_that_looks_at_numbers_is_not_recorded():
    net, step = small()
    net.cuda()
    step.phi.cuda()

    class Looks(torch.nn.Module):
        def forward(self, *inputs):
            samples = net(*inputs)
            return samples / max(1.0, float(samples.detach().abs().max()))

    step.generator = Looks()
    drawn, said = on_gpu(small_step_inputs(net)), []
    wanted = step(drawn).loss.item()
    gradient = gradients(net).clone()
    recorded = GraphedStep(step, net.parameters(), said.append)
    for _ in range(2):
        net.zero_grad()
        assert recorded(drawn).loss.item() == pytest.approx(wanted, rel=1e-5)
        assert relative(gradients(net), gradient) < 1e-5
    assert len(said) == 1
    assert "waits for the GPU" in said[0]
    assert torch.randn(3, device="cuda").isfinite().all()


def test_a_run_is_the_same_recorded(tmp_path):
    """The loop around it too: clipping, updates, averages, pictures, a stop and a resume."""
    found = {}
    for graph in (True, False):
        for steps in (6, 12):
            changes = [f"optim.steps={steps}", f"cuda_graph={graph}", "compile=true"]
            view = Silent()
            assert train(config(*changes), tmp_path / str(graph), Distributed.start(), view, override=True)
        assert not [text for text in view.said if "launch" in text]
        found[graph] = final(tmp_path / str(graph))
    for name, value in found[False].items():
        torch.testing.assert_close(found[True][name], value, rtol=1e-3, atol=1e-5)
