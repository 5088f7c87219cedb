"""A task without images: chunks of actions conditioned on observations, as a policy trains."""

import json
import os
import signal
from typing import Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import nn

from driftgen import DriftingLoss
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.config_base import Section
from driftgen.support.distributed import Distributed
from driftgen.support.rng import derive_generator, derive_seed
from driftgen.training.config import Optimizer, Output
from driftgen.training.health import Health
from driftgen.training.loop import run_task
from driftgen.training.microbatch import MicroBatchedStep
from driftgen.training.run_folder import check_run
from driftgen.training.step import DriftStep, StepInputs, flatten_samples
from driftgen.training.step_metrics import measure
from tests.support.runs import Silent

# RNG stream ids
WEIGHTS, OBSERVATIONS, NOISE, PREVIEW = range(4)
HORIZON, ACTIONS = 4, 2


class ActionConfig(Section):
    task: Literal["actions"] = "actions"
    seed: int = 0
    observations: int = 6
    generated: int = 8
    positives: int = 5
    micro: int = 1
    mode: Literal["exact", "previous"] = "exact"
    temperatures: tuple[float, ...] = (0.05, 0.2)
    optim: Optimizer = Optimizer(lr=3e-3, warmup=2, steps=20)
    ema: tuple[float, ...] = (0.9, 0.99)
    ema_warmup: bool = True
    output: Output = Field(
        default_factory=lambda: Output(metrics_every=5, samples_every=10, checkpoint_every=10)
    )
    fsdp: bool = False


class ActionGenerator(nn.Module):
    """Maps a noise vector and an observation of two parts to a chunk of actions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8 + 3 + 1, 32), nn.SiLU(), nn.Linear(32, HORIZON * ACTIONS))

    def forward(self, noise, observation):
        x = torch.cat([noise["vector"], observation["state"], observation["goal"]], dim=1)
        return self.layers(x).unflatten(1, (HORIZON, ACTIONS))


def draw_observations(n, random):
    return {"state": torch.randn(n, 3, generator=random), "goal": torch.rand(n, 1, generator=random)}


def mean_actions(observation):
    """The mean of the data for each observation."""
    time = torch.linspace(0, 1, HORIZON)[:, None]
    return time * observation["state"][:, None, :ACTIONS] + observation["goal"][:, None]


class ActionTask:
    def __init__(self, config):
        self.config = config
        torch.manual_seed(derive_seed(config.seed, WEIGHTS))
        self.model = ActionGenerator()
        self.loss = DriftingLoss(config.temperatures)
        self.step = DriftStep(self.model, flatten_samples, self.loss, generated=config.generated)
        self.micro = None if config.micro == 1 else MicroBatchedStep(self.step, config.micro, config.mode)
        self.compute = self.micro or self.step
        self.samples_per_step = config.observations * config.generated
        self.health = Health(config.temperatures)
        self.drawn = torch.zeros((), dtype=torch.int64)

    def draw(self, step):
        config = self.config
        observation = draw_observations(
            config.observations, derive_generator(config.seed, step, OBSERVATIONS)
        )
        random = derive_generator(config.seed, step, NOISE)
        noise = torch.randn(config.observations * config.generated, 8, generator=random)
        shape = (config.observations, config.positives, HORIZON, ACTIONS)
        positives = mean_actions(observation)[:, None] + 0.3 * torch.randn(shape, generator=random)
        self.drawn += config.observations
        return StepInputs({"vector": noise}, (observation,), positives)

    def compute_gradient(self, step):
        self.output = self.compute(self.draw(step))
        return self.output.loss

    def measure(self, averaged):
        observation = draw_observations(64, derive_generator(self.config.seed, PREVIEW))
        with torch.no_grad():
            chunks = averaged({"vector": torch.zeros(64, 8)}, observation)
        out = self.output
        return {
            "averaged_error": (chunks - mean_actions(observation)).abs().mean().item(),
            **measure(out.generated, out.positives, out.drift, out.scale, self.loss),
        }

    def check_health(self, row):
        return self.health.update(row)

    def save_preview(self, averaged, path):
        observation = draw_observations(3, derive_generator(self.config.seed, PREVIEW))
        with torch.no_grad():
            chunks = averaged({"vector": torch.zeros(3, 8)}, observation)
        path = path.with_suffix(".json")
        make_folder(path.parent)
        with atomic_write(path) as scratch:
            scratch.write_text(json.dumps(chunks.tolist()))
        return path

    def save_models(self, averaged, folder, step):
        for decay, model in averaged.items():
            save_file(
                model.state_dict(), folder / f"policy-{decay}.safetensors", metadata={"step": str(step)}
            )

    def memory_advice(self):
        return "use --set observations=3"

    def state_dict(self):
        return {"drawn": self.drawn} | (self.micro.state_dict() if self.micro else {})

    def load_state_dict(self, state):
        self.drawn = state["drawn"].clone()
        if self.micro:
            self.micro.load_state_dict(state, torch.device("cpu"))


class KilledTask(ActionTask):
    """Kills its own process in the middle of step 13."""

    def compute_gradient(self, step):
        if step == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_gradient(step)


def train_actions(folder, kind=ActionTask, *, override=False, **changes):
    view = Silent()
    config = check_run(folder, ActionConfig(**changes), override=override)
    task, header = kind(config), {"task": config.task}
    done = run_task(folder, config, task, Distributed.start("cpu"), view, header)
    return done, view, task
