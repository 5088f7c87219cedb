"""The update of a step: drawn ahead, skipped on the device, and equal to the plain order to the bit."""

import copy

import pytest
import torch
import yaml
from torch import nn

from driftgen.errors import InputError
from driftgen.generators import ImageMLP
from driftgen.support.distributed import Distributed
from driftgen.training.build import Parts
from driftgen.training.config import Optimizer
from driftgen.training.ema import EMA
from driftgen.training.loop import Loop
from driftgen.training.run_changes import resolve
from driftgen.training.trainer import Training, train
from driftgen.training.update import Update
from tests.support.runs import SMALL, Silent, config, final

QUEUE = ["queue.kind=queue", "queue.class_size=12", "queue.global_size=30", "queue.push=9"]


class DropoutMLP(ImageMLP):
    """Draws from the default generator in every forward pass, also of the averaged model in eval mode."""

    def forward(self, noise, labels, alpha):
        return super().forward(noise, labels, alpha) * (1 + 0.1 * torch.rand(1))


def dropout_network():
    torch.manual_seed(0)
    return DropoutMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1, style_codebooks=2)


def train_dropout(folder, *changes):
    network = dropout_network()
    pairs = [change.split("=", 1) for change in (*SMALL, *changes) if "options" not in change]
    values = {key: yaml.safe_load(value) for key, value in pairs}
    setting, _ = resolve("train", "digits", {**values, "generator": network})
    parts = Parts(generator=network)
    train(setting, folder, Distributed.start("cpu"), Silent(), parts=parts, override=True)
    return final(folder)


@pytest.mark.parametrize("changes", [[], QUEUE], ids=["index", "queue"])
def test_drawing_ahead_changes_no_bit(tmp_path, monkeypatch, changes):
    """With a network that draws random numbers, and metrics that draw others between two steps."""
    changes = ["optim.steps=12", "output.metrics_every=3", "output.samples_every=4", *changes]
    calls, draw_ahead = [], Training.draw_ahead
    monkeypatch.setattr(
        Training, "draw_ahead", lambda self, step: (calls.append(step), draw_ahead(self, step))
    )
    ahead = train_dropout(tmp_path / "ahead", *changes)
    assert calls == list(range(1, 12))
    monkeypatch.setattr(Training, "draw_ahead", lambda self, step: None)  # every step draws for itself
    plain = train_dropout(tmp_path / "plain", *changes)
    assert ahead.keys() == plain.keys()
    assert all(torch.equal(ahead[k], plain[k]) for k in plain)
    assert any(value.std() > 0 for name, value in plain.items() if name.startswith("model/"))


@pytest.mark.parametrize("changes", [[], QUEUE], ids=["index", "queue"])
def test_a_resumed_run_draws_the_step_that_was_drawn_ahead(tmp_path, changes):
    straight = train_dropout(tmp_path / "straight", "optim.steps=12", *changes)
    for steps in (7, 12):
        # The checkpoint of step 7 is that of a run of 12 steps, with step 8 drawn ahead.
        with pytest.MonkeyPatch.context() as patch:
            if steps == 7:
                stop_after(patch, 7)
            resumed = train_dropout(tmp_path / "stopped", "optim.steps=12", *changes)
    assert all(torch.equal(straight[k], resumed[k]) for k in straight)


def stop_after(patch, step):
    patch.setattr(Loop, "_should_stop", lambda self: self.step == step)


def test_draws_are_equal_on_the_device_and_the_host():
    """On a CPU data.on_device=true takes the same path as on a GPU."""
    tasks = [Training(config(f"data.on_device={value}"), Distributed.start("cpu")) for value in (True, False)]
    first, second = (task.draw(3) for task in tasks)
    assert torch.equal(first.positives, second.positives)
    assert torch.equal(first.unconditional, second.unconditional)
    assert torch.equal(first.noise.gaussian, second.noise.gaussian)


class LinearTask:
    """Least squares; some steps have a bad loss or gradient."""

    def __init__(self, device="cpu"):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).to(device)
        self.events, self.bad = [], {}

    def compute_gradient(self, step):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(self.model.weight.device)
        loss = self.model(x).square().mean()
        loss.backward()
        self.events.append(("gradient", step))
        kind = self.bad.get(step)
        if kind == "gradient":
            self.model.bias.grad[0] = float("nan")
        if kind == "exploded":
            self.model.bias.grad.mul_(1e12)
        loss = loss.detach() * (float("inf") if kind == "loss" else 1)
        return Read(loss, lambda: self.events.append(("read", step)))

    def draw_ahead(self, step):
        self.events.append(("draw", step))


class Read(torch.Tensor):
    """A loss that says when the host reads it."""

    @staticmethod
    def __new__(cls, value, on_read):
        return value.as_subclass(cls)

    def __init__(self, value, on_read):
        self.on_read = on_read

    def __float__(self):
        self.on_read()
        return float(self.as_subclass(torch.Tensor))


def updated(on_device, steps=60, bad=(), device="cpu"):
    task = LinearTask(device)
    task.bad = dict(bad)
    settings = Optimizer(lr=1e-2, warmup=3, steps=steps)
    ema = EMA(task.model, [0.9], warmup=True)
    update = Update(task, settings, ema)
    update.optimizer = torch.optim.AdamW(task.model.parameters(), betas=settings.betas, fused=True)
    update.decides_on_device = on_device
    results = [update(step) for step in range(steps)]
    return task, update, ema, results


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_skip_decided_on_the_device_is_exact(device):
    """The first step, a loss and a gradient that are not finite, and an exploded norm change nothing."""
    bad = {0: "gradient", 4: "loss", 9: "gradient", 20: "exploded", 55: "exploded", 56: "gradient"}
    runs = [updated(on_device, bad=bad, device=device) for on_device in (True, False)]
    (_, first, ema, results), (_, second, other, expected) = runs
    skipped = [step for step, (loss, _) in enumerate(results) if loss is None]
    assert skipped == [0, 4, 9, 55, 56]  # too few norms are known at step 20
    assert [loss for loss, _ in results] == [loss for loss, _ in expected]
    assert first.norms == second.norms
    for mine, reference in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(mine, reference)
        for key, value in second.optimizer.state[reference].items():
            assert torch.equal(first.optimizer.state[mine][key], value)
    for name, value in other.state_dict().items():
        assert torch.equal(ema.state_dict()[name], value)


@pytest.mark.parametrize("on_device", [True, False])
def test_the_next_step_is_drawn_before_the_loss_is_read(on_device):
    task, *_ = updated(on_device, steps=2)
    assert task.events == [("gradient", 0), ("draw", 1), ("read", 0), ("gradient", 1), ("read", 1)]


def test_a_plain_cpu_run_decides_on_the_host():
    task = LinearTask()
    update = Update(task, Optimizer(), EMA(task.model, [0.9]))
    assert not update.decides_on_device
    weights = copy.deepcopy(task.model.state_dict())
    task.bad = {0: "gradient"}
    assert update(0)[0] is None
    assert all(torch.equal(task.model.state_dict()[k], v) for k, v in weights.items())


def test_muon_refuses_parts_of_matrices():
    task = LinearTask()
    with pytest.raises(InputError, match="needs whole matrices, which fsdp cuts: set fsdp=false"):
        Update(task, Optimizer(kind="muon"), EMA(task.model, [0.9]), sharded=True)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gpu_run_decides_on_the_device(kind):
    task = LinearTask("cuda")
    assert Update(task, Optimizer(kind=kind), EMA(task.model, [0.9])).decides_on_device
    assert not Update(task, Optimizer(), EMA(task.model, [0.9]), sharded=True).decides_on_device


@pytest.mark.cuda
def test_a_gpu_run_draws_the_same_from_device_and_host_memory():
    inputs = []
    for place in ("auto", "false"):
        task = Training(
            config(f"data.on_device={place}", "data.augment={flip: true}"), Distributed.start("cuda")
        )
        assert task.data.pixels.is_cuda == (place == "auto")
        inputs.append(task.draw(3))
    assert torch.equal(inputs[0].positives, inputs[1].positives)
    assert torch.equal(inputs[0].unconditional, inputs[1].unconditional)
    assert torch.equal(inputs[0].noise.gaussian, inputs[1].noise.gaussian)


@pytest.mark.cuda
def test_drawing_ahead_changes_no_bit_on_a_gpu(tmp_path, monkeypatch):
    states = []
    for folder in ("ahead", "plain"):
        changes = ["optim.steps=12", "data.augment={flip: true}", "cuda_graph=true"]
        train(config(*changes), tmp_path / folder, Distributed.start("cuda"), Silent())
        states.append(final(tmp_path / folder))
        monkeypatch.setattr(Training, "draw_ahead", lambda self, step: None)
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-5, atol=1e-6)
