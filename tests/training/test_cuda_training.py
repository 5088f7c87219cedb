"""Training on a GPU: the release's step, parts of it, a run with resume, and memory that falls."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

import driftgen as dg
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators import DiT
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.training.graphed_step import GraphedStep
from driftgen.training.pretrain import Pretraining
from driftgen.training.recipes import load_recipe
from driftgen.training.step import guided_inputs
from driftgen.training.trainer import train
from tests.support.accuracy import error
from tests.support.golden_steps import (
    CASE,
    golden_step,
    golden_step_inputs,
    gradients,
    make_step,
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


def on_gpu(inputs):
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs)


@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_is_that_of_the_release(micro):
    generator, step = golden_step("cuda", micro=micro)
    out = step(on_gpu(golden_step_inputs()))
    assert out.loss.item() == pytest.approx(CASE["loss"], rel=1e-4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in generator.parameters()])
    assert norm.item() == pytest.approx(CASE["g_norm"], rel=1e-3)


def test_exact_parts_give_the_gradient_of_the_whole():
    inputs, computed = on_gpu(small_step_inputs(small()[0])), []
    for micro in (1, 3):
        net, step = small("cuda", micro=micro)
        step(inputs)
        computed.append(gradients(net).cpu())
    assert error(computed[1], computed[0]) < 1e-4


def test_parts_need_less_memory():
    """Large enough for activations to outweigh weights, and what cuBLAS takes for itself."""
    net = DiT(input_size=32, in_channels=3, hidden_size=256, depth=4, num_heads=4, num_classes=6).cuda()
    phi = FeatureStack([ResNetMAE(3, 64, blocks=(1, 1), decoder=False)]).cuda()
    r = torch.Generator().manual_seed(0)
    inputs = guided_inputs(
        net.sample_noise(8 * 6, r),
        torch.arange(6),
        torch.ones(6),
        torch.randn(6, 8, 3, 32, 32, generator=r),
        torch.randn(6, 2, 3, 32, 32, generator=r),
        generated=8,
    )
    most = []
    for micro in (1, 6):
        step = make_step(net, phi, dg.DriftingLoss(), generated=8, micro=micro, autocast=torch.bfloat16)
        step(on_gpu(inputs))  # allocates what stays, such as gradients
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(on_gpu(inputs))
        most.append(torch.cuda.max_memory_allocated() - before)
    assert most[1] < 0.5 * most[0]


UNET = "generator={kind: unet, options: {widths: [16, 32], blocks: [1, 1], attention_levels: []}}"


@pytest.mark.parametrize("network", [[], [UNET]], ids=["mlp", "unet"])  # a U-Net is channels-last on a GPU
def test_a_run_and_its_resume(tmp_path, network):
    changes = ["optim.steps=20", "precision=bfloat16", *network]
    for folder in ("a", "b"):
        steps = ["optim.steps=10", *changes[1:]] if folder == "b" else changes
        assert train(config(*steps), tmp_path / folder, Distributed.start(), Silent(), name="digits")
    view = Silent()
    assert train(config(*changes), tmp_path / "b", Distributed.start(), view, name="digits", override=True)
    assert view.said[0] == "resumed after step 10"
    assert view.rows[-1]["step"] == 20
    assert view.rows[-1]["memory_gib"] > 0


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_captured_step_is_the_step(autocast):
    """With new inputs, other weights and other shapes at each call."""
    net, step = small("cuda", autocast=autocast)
    said = []
    captured = GraphedStep(step, net.parameters(), said.append)
    for seed, classes in ((0, 6), (1, 6), (2, 3), (3, 3)):
        inputs = on_gpu(small_step_inputs(net, seed, classes))
        net.zero_grad()
        expected = step(inputs)
        loss, gradient = expected.loss.item(), gradients(net).clone()
        net.zero_grad()
        output = captured(inputs)
        assert output.loss.item() == pytest.approx(loss, rel=1e-5)
        assert error(gradients(net), gradient) < 1e-5
        assert list(output.scale) == list(expected.scale)
        for name in expected.scale:
            torch.testing.assert_close(output.scale[name], expected.scale[name])
            torch.testing.assert_close(output.generated[name], expected.generated[name])
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    assert not said
    assert captured.capturable


def test_a_step_that_synchronizes_is_not_captured():
    net, step = small("cuda")

    class Looks(torch.nn.Module):
        def forward(self, *inputs):
            samples = net(*inputs)
            return samples / max(1.0, float(samples.detach().abs().max()))

    step.generator = Looks()
    inputs, said = on_gpu(small_step_inputs(net)), []
    expected = step(inputs).loss.item()
    gradient = gradients(net).clone()
    captured = GraphedStep(step, net.parameters(), said.append)
    for _ in range(2):
        net.zero_grad()
        assert captured(inputs).loss.item() == pytest.approx(expected, rel=1e-5)
        assert error(gradients(net), gradient) < 1e-5
    assert len(said) == 1
    assert said[0].startswith("CUDA graph disabled: ")
    assert "; set cuda_graph=false to skip capture (driftgen explain cuda-graph-disabled)" in said[0]
    assert torch.randn(3, device="cuda").isfinite().all()


@pytest.mark.parametrize("kind", ["whole", "crops", "pool"])
def test_a_run_is_the_same_captured(tmp_path, kind):
    """The whole loop: clipping, updates, averages, previews, a stop and a resume."""
    states, more = {}, {"crops": ["crops.share=0.5"]}.get(kind, [])
    if kind == "pool":  # the weights of the encoder change between replays
        paths = [str(tmp_path / f"encoder-{i}") for i in range(2)]
        for path in paths:
            save_model(ResNetMAE(in_channels=1, base_channels=40, blocks=[1, 1]), path)
        more = [f"encoders=[{{kind: mae, path: {paths[0]}, pool: [{paths[1]}]}}]"]
    for graph in (True, False):
        for steps in (6, 12):
            changes = [f"optim.steps={steps}", f"cuda_graph={graph}", "compile=true", *more]
            view = Silent()
            assert train(config(*changes), tmp_path / str(graph), Distributed.start(), view, override=True)
        assert not [text for text in view.said if "CUDA graph" in text]
        states[graph] = final(tmp_path / str(graph))
    for name, value in states[False].items():
        torch.testing.assert_close(states[True][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("finetune", [0, 2])
def test_a_captured_pretraining_step_is_the_step(finetune):
    """Loss and gradients of the same steps, before and during fine-tuning."""
    results = {}
    for graph in (True, False):
        changes = [f"mae.finetune_steps={finetune}", "mae.finetune_ramp=1", "optim.steps=4", "batch_size=16"]
        recipe = load_recipe("mae-digits", [*changes, f"cuda_graph={graph}"], "pretrain")
        task = Pretraining(recipe, Distributed.start())
        assert (task.graphed is not None) == graph
        results[graph] = []
        for step in range(4):
            task.mae.zero_grad()
            loss = task.compute_gradient(step).item()
            results[graph].append((loss, gradients(task.mae).clone()))
        task.data.close()
    for (loss, gradient), (expected, reference) in zip(results[True], results[False], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert error(gradient, reference) < 1e-4
