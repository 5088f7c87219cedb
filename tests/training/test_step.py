"""A training step against the release's own, and in parts against itself."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import driftgen as dg
from driftgen.interop.dit_names import official_dit_names
from driftgen.support.rng import RNGState
from driftgen.training.config import Optimizer
from driftgen.training.ema import EMA
from driftgen.training.microbatch import MicroBatchedStep
from driftgen.training.optimizer import clip, learning_rate, make_optimizer
from driftgen.training.step import DriftStep, flatten_samples
from driftgen.training.step_inputs import StepInputs
from driftgen.training.update import Update
from tests.support.accuracy import error
from tests.support.cases import slow_after
from tests.support.fork_server import run_ranks
from tests.support.golden_steps import (
    CASE,
    GOLDEN,
    golden,
    golden_step,
    golden_step_inputs,
    gradients,
    small,
    small_step_inputs,
)
from tests.support.mae_weights import to_theirs


@pytest.mark.parametrize(
    ("micro", "mode"), slow_after(1, [(1, "exact"), (3, "exact"), (2, "exact"), (3, "previous")])
)
def test_a_step_is_that_of_the_release(micro, mode):
    """Loss, scale and drift of every feature; gradients. The first step of "previous" is exact."""
    generator, step = golden_step(micro=micro, mode=mode)
    out = step(golden_step_inputs())
    assert out.loss.item() == pytest.approx(CASE["loss"], rel=1e-5)
    for i, name in enumerate(CASE["features_sorted"]):
        # The release's distance of a sample to itself is rounding noise, which its mean distance contains.
        assert error(out.scale[name], GOLDEN["small8/feature_scale"][i]) < 2e-4, name
        want = GOLDEN["small8/feature_lossR"][i]
        if want.min() > 1e-9:  # below, a constant feature's drift is rounding noise in the release, 0 here
            assert error(out.drift[name].sqrt(), want**0.5) < 1e-4, name
    norm = torch.nn.utils.get_total_norm([p.grad for p in generator.parameters()])
    assert norm.item() == pytest.approx(CASE["g_norm"], rel=2e-5)
    gradients = {name: p.grad for name, p in generator.named_parameters()}
    names = official_dit_names(generator.config)
    theirs = {path: to_theirs_all(path, gradients[ours]) for path, ours in names.items()}
    for path, want in zip(CASE["all_grad_norms_order"], GOLDEN["small8/all_grad_norms"], strict=True):
        assert theirs[path].norm().item() == pytest.approx(want, rel=1e-4, abs=1e-6), path
    for path, note in CASE["grad_params"].items():
        if note["stored"] == "full":
            assert error(theirs[path].reshape(note["shape"]), golden(f"grad/{path}")) < 5e-5, path


def to_theirs_all(path, tensor):
    return to_theirs(tensor) if path.endswith("/kernel") else tensor


@pytest.mark.slow
def test_three_updates_are_those_of_the_release():
    generator, step = golden_step()
    config = Optimizer(lr=1e-2, warmup=2, clip=2.0, weight_decay=0.01, betas=(0.9, 0.95), steps=3)
    optimizer, ema = make_optimizer(generator.parameters(), config), EMA(generator, [0.999])
    for t in range(3):
        inputs = golden_step_inputs(
            "x" if t == 0 else f"traj/{t}/x", f"traj/{t}/cfg", f"traj/{t}/noise_labels"
        )
        rate = learning_rate(config, t)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        out = step(inputs)
        norm = clip(generator.parameters(), config.clip)
        optimizer.step()
        ema.update(generator)
        want = GOLDEN["small8/traj/loss_gnorm_lr"][t]
        assert out.loss.item() == pytest.approx(want[0], rel=1e-4)
        assert norm.item() == pytest.approx(want[1], rel=2e-3)
        assert rate == pytest.approx(want[2], rel=1e-3)
    names = official_dit_names(generator.config)
    averaged = ema.first.state_dict()
    for path, note in CASE["grad_params"].items():
        if note["stored"] != "full":
            continue
        for kind, state in (("params", generator.state_dict()), ("ema", averaged)):
            got = to_theirs_all(path, state[names[path]]).reshape(note["shape"])
            want = golden(f"traj/{kind}/{path}")
            # Adam divides by the size of the gradient, so where that is rounding noise the update is too.
            assert error(got, want) < 4e-3, (kind, path)
            if path == "Embed_0/embedding":  # classes that did not occur: decay alone
                idle = [c for c in range(10) if c not in golden("labels").tolist()]
                torch.testing.assert_close(got[idle], want[idle], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["ablation", "sota"])
def test_learning_rates(name):
    table = GOLDEN[f"lr/{name}"]
    lr, warmup = {"ablation": (2e-4, 5000), "sota": (4e-4, 10_000)}[name]
    config = Optimizer(lr=lr, warmup=warmup)
    for step, want in table:
        assert learning_rate(config, int(step)) == pytest.approx(want, rel=1e-4)


def test_a_decay_is_constant_and_then_linear():
    config = Optimizer(lr=3e-4, warmup=100, steps=1000, schedule="decay", decay_share=0.2, final_lr=0.1)
    constant = Optimizer(lr=3e-4, warmup=100, steps=1000)
    assert all(learning_rate(config, t) == learning_rate(constant, t) for t in range(801))
    for t in (801, 850, 900, 999):
        assert learning_rate(config, t) == pytest.approx(3e-4 * (1 - 0.9 * (t - 800) / 200))
    assert learning_rate(config, 1000) == pytest.approx(3e-5)
    assert learning_rate(config, 5000) == pytest.approx(3e-5)  # a finished run that is extended by mistake


def test_a_cosine_falls_after_the_warmup():
    config = Optimizer(lr=3e-4, warmup=100, steps=900, schedule="cosine", final_lr=0.2)
    assert learning_rate(config, 50) == learning_rate(Optimizer(lr=3e-4, warmup=100), 50)
    assert learning_rate(config, 100) == 3e-4
    for t, share in ((300, 0.2 + 0.8 * (1 + 0.5**0.5) / 2), (500, 0.6), (900, 0.2)):
        assert learning_rate(config, t) == pytest.approx(3e-4 * share)
    rates = [learning_rate(config, t) for t in range(100, 901)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "decay"])
def test_a_warmup_longer_than_the_run_has_no_schedule_to_fall(schedule):
    """Short trials of a recipe keep its warm-up."""
    config = Optimizer(warmup=5000, steps=20, schedule=schedule)
    constant = [learning_rate(Optimizer(warmup=5000, steps=20), t) for t in range(20)]
    rates = [learning_rate(config, t) for t in range(20)]
    assert rates[:17] == constant[:17]
    assert all(0 < rate <= most for rate, most in zip(rates, constant, strict=True))


@pytest.mark.parametrize("micro", [2, 4, 6])
@pytest.mark.parametrize("unconditional", [0, 3])
def test_exact_parts_give_the_gradient_of_the_whole(micro, unconditional):
    net, step = small()
    whole = step(small_step_inputs(net, unconditional=unconditional))
    want = gradients(net)
    net, step = small(micro=micro)
    out = step(small_step_inputs(net, unconditional=unconditional))
    assert error(gradients(net), want) < 1e-5
    assert out.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    assert list(out.drift) == list(whole.drift)


def test_previous_parts_use_the_statistics_of_the_step_before():
    """On the same step twice the statistics of the step before are its own: the exact gradient."""
    net, step = small()
    step(small_step_inputs(net))
    want = gradients(net)
    net, step = small(micro=3, mode="previous")
    inputs = small_step_inputs(net)
    step(inputs)
    net.zero_grad()
    out = step(inputs)
    assert error(gradients(net), want) < 1e-4
    net.zero_grad()
    step(small_step_inputs(net, seed=1))  # another step, with the statistics of this one
    other = gradients(net)
    net, step = small()
    exact = step(small_step_inputs(net, seed=1))
    assert 1e-3 < error(other, gradients(net)) < 0.5
    assert sum(d.sum() for d in out.drift.values()) != sum(d.sum() for d in exact.drift.values())


class Points(nn.Module):
    """A generator of points that drops some of its hidden units."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, noise, labels):
        return self.layers(noise) + labels[:, None]


def points(micro=3, mode="exact", device="cpu", **options):
    torch.manual_seed(0)
    net = Points(**options).to(device)
    step = DriftStep(net, flatten_samples, dg.DriftingLoss(), generated=4)
    return net, step if micro == 1 else MicroBatchedStep(step, micro, mode)


def points_inputs(seed=0, device="cpu"):
    r = torch.Generator().manual_seed(seed)
    noise, real = torch.randn(24, 4, generator=r), torch.randn(6, 5, 3, generator=r)
    return StepInputs(noise.to(device), (torch.arange(6, device=device),), real.to(device))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_step_leaves_the_statistics_of_the_step_before(bad, monkeypatch):
    """A GPU raises nothing: NaN of a step must not normalize the next one."""
    compare, broken = DriftStep.compare, False

    def compare_as_on_a_gpu(self, *args):
        if not broken:
            return compare(self, *args)
        out = compare(self, *args[:4])
        drift, scale = ({k: v * torch.nan for k, v in d.items()} for d in (out.drift, out.scale))
        return dataclasses.replace(out, loss=out.loss * torch.nan, drift=drift, scale=scale)

    monkeypatch.setattr(DriftStep, "compare", compare_as_on_a_gpu)
    results = []
    for skipped in ([], [bad]):
        net, step = points(mode="previous", dropout=0.0)
        for seed in range(3):
            if seed == bad and not skipped:
                continue
            broken = seed in skipped
            net.zero_grad()
            assert step(points_inputs(seed)).loss.isfinite() == (not broken)
        results.append(gradients(net))
        assert all(tensor.isfinite().all() for tensor in step.state_dict().values())
    assert torch.equal(*results)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("mode", ["exact", "previous"])
def test_all_passes_drop_the_same_units(mode, device):
    net, step = points(mode=mode, device=device)
    inputs = points_inputs(device=device)
    torch.manual_seed(7)
    out = step(inputs)
    after = RNGState.save(torch.device(device))
    net_of_whole, whole = points(micro=1, device=device)
    torch.manual_seed(7)
    samples = [whole.generate(part, net_of_whole)["global"] for part, _ in step._split(inputs)]
    assert not torch.equal(samples[0], samples[1])
    expected = whole.compare(inputs, {"global": torch.cat(samples)}, *whole.encode_real(inputs))
    expected.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss.detach())
    torch.testing.assert_close(gradients(net), gradients(net_of_whole))
    for found, wanted in zip(after, RNGState.save(torch.device(device)), strict=True):
        assert wanted is None or torch.equal(found, wanted)


class OneBadStep:
    """Three steps on two processes; one process has a NaN in its last part of the second step."""

    def __init__(self, rank, bad, group):
        torch.manual_seed(0)
        self.rank, self.bad, self.model = rank, bad, DistributedDataParallel(Points(dropout=0.0))
        step = DriftStep(self.model, flatten_samples, dg.DriftingLoss(process_group=group), generated=4)
        self.compute = MicroBatchedStep(step, 3, "previous")

    def compute_gradient(self, step):
        inputs = points_inputs(10 * step + self.rank)
        if step == self.bad and self.rank == 1:
            inputs.positives[-1] = torch.nan
        return self.compute(inputs).loss


def train_with_a_bad_step(rank, folder):
    for bad in (0, 1):
        task = OneBadStep(rank, bad, dist.group.WORLD)
        update = Update(task, Optimizer(lr=1e-2, warmup=0, steps=3), EMA(task.model, [0.9]))
        assert [update(step)[0] is None for step in range(3)] == [step == bad for step in range(3)]
        torch.save(task.model.state_dict(), f"{folder}/{bad}-{rank}.pt")


@pytest.mark.distributed
def test_processes_skip_a_bad_step_together(tmp_path):
    code = f"""
import sys
import torch.distributed as dist
from {__name__} import train_with_a_bad_step
dist.init_process_group("gloo")
train_with_a_bad_step(dist.get_rank(), sys.argv[1])
dist.destroy_process_group()
"""
    run_ranks(["-c", code, str(tmp_path)])
    for bad in (0, 1):
        first, second = (torch.load(tmp_path / f"{bad}-{rank}.pt", weights_only=True) for rank in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert all(value.isfinite().all() for value in first.values())


def test_parts_hold_fewer_activations():
    """Numbers kept for the backward pass, counted as they are saved."""

    def most_saved(**options):
        net, step = small(**options)
        alive, most = 0, 0

        class Box:
            def __init__(self, tensor):
                nonlocal alive, most
                self.tensor = tensor
                alive += tensor.numel()
                most = max(most, alive)

            def __del__(self):
                nonlocal alive
                alive -= self.tensor.numel()

        with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
            step(small_step_inputs(net))
        return most

    whole = most_saved()
    # Weights are saved too, whatever the number of parts.
    assert most_saved(micro=6) < 0.45 * whole
    assert most_saved(micro=6) < most_saved(micro=2) < whole
