"""``driftgen policy train``: train a policy on demonstrations, in the loop of every other training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from driftgen.drift.field import pairwise_distance
from driftgen.generators.policy_network import PolicyNetwork, Statistics
from driftgen.interop.run_models import model_folders
from driftgen.model_io import save_model
from driftgen.ops.compile import compile_parts
from driftgen.policy.chunk_figure import draw_chunks
from driftgen.policy.chunk_samplers import make_sampler
from driftgen.policy.environments import check_demonstrations
from driftgen.support.atomic_write import atomic_folder
from driftgen.support.distributed import Distributed
from driftgen.support.meta_init import check_network_size
from driftgen.support.rng import derive_seed
from driftgen.training.build import NO_PARTS, Parts
from driftgen.training.graphed_step import GraphedStep, can_capture
from driftgen.training.health import Health
from driftgen.training.loop import run_task
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.policy_data import ChunkDraws, open_demonstrations
from driftgen.training.policy_objectives import OBJECTIVES
from driftgen.training.run_folder import check_run
from driftgen.training.step_inputs import StepInputs, StepOutput
from driftgen.training.step_memory import check_samples
from driftgen.training.summary import describe_network
from driftgen.training.view import View

__all__ = ["PolicyTraining", "chunk_scores", "network_of", "train_policy"]

# RNG stream ids
WEIGHTS, NOISE, CROP, PROBE, TIME = range(5)
PROBES, PROBE_CHUNKS = 64, 8  # held-out windows that are measured, and chunks generated for each
SHOWN, SHOWN_CHUNKS = 6, 32  # held-out windows of a preview, and chunks drawn for each


class PolicyTraining:
    """Task that trains the network of a policy.

    Attributes:
        name: of the recipe, for the card of the saved model.
    """

    def __init__(
        self,
        config: PolicyConfig,
        distributed: Distributed,
        info: Callable[[str], None] = lambda text: None,
        *,
        name: str = "",
        parts: Parts = NO_PARTS,
    ) -> None:
        self.config, self.distributed, self.name = config, distributed, name
        device, batch = distributed.device, config.batch
        opened = check_demonstrations(open_demonstrations(config.data, parts.episodes), config.environment)
        self.draws = ChunkDraws(config, opened, device)
        if config.joint.groups:
            self.draws.state_histories()  # raises for images
        torch.manual_seed(derive_seed(config.seed, WEIGHTS))
        self.network = build_policy(config, self.draws).to(device)
        self.model: nn.Module = self.network
        if config.compile:
            compile_parts(self.network)
        if distributed.group is not None:
            self.model = DistributedDataParallel(self.model)
        self.part = distributed.shard(batch.observations, "batch.observations")
        self.objective = OBJECTIVES[config.method](self.model, config, distributed)
        self.samples_per_step = batch.observations * self.objective.generated
        chunk = config.horizon * self.network.action_size
        option = f"batch.observations={batch.observations}"
        check_samples(
            option, self.samples_per_step + batch.observations * batch.positives, chunk, distributed
        )
        self.compute: Callable[[StepInputs], StepOutput] = self.objective.compute
        if can_capture(config, distributed):
            self.compute = GraphedStep(self.objective.compute, self.network.parameters(), info)
        self.sampler = make_sampler(config.method)
        self.health = Health(config.loss.temperatures, ema_warmup=config.ema_warmup)
        self.last: StepOutput | None = None
        self._random = torch.Generator(device)
        self._ahead: tuple[int, StepInputs] | None = None  # the step drawn ahead
        self.probe = self.draws.held_out_windows(PROBES)

    def describe(self) -> dict[str, str]:
        """See :class:`~driftgen.training.task.Describes`."""
        config, draws = self.config, self.draws
        shapes = ", ".join(f"{key} {'x'.join(map(str, shape))}" for key, shape in draws.shapes.items())
        held_out = "" if draws.held_out is draws.episodes else f", {len(draws.held_out)} held out"
        count = len(draws.episodes)
        episodes = f"{count:,} episode{'s' if count > 1 else ''}"
        chunks = f"{self.objective.generated} generated and {config.batch.positives} positive chunks each"
        return {
            "data": f"{episodes}, {len(draws.training):,} windows{held_out}; from {draws.episodes.source}",
            "policy": f"{config.observed} x ({shapes}) to {config.horizon} actions of "
            f"{self.network.action_size}, {config.executed} executed",
            "network": describe_network(self.network),
            "method": config.method,
            "batch": f"{config.batch.observations} observations"
            + (f", {chunks}" if config.method == "drifting" else "")
            + (f", in {config.batch.micro} micro-batches" if config.batch.micro > 1 else ""),
        }

    def draw(self, step: int) -> StepInputs:
        """Draw observations, chunks and noise; the same for any number of processes."""
        config, n = self.config, self.objective.generated
        observations, positives = self.draws.draw(step, self.part, derive_seed(config.seed, step, CROP))
        self._random.manual_seed(derive_seed(config.seed, step, NOISE))
        shape = (config.batch.observations * n, config.horizon, self.network.action_size)
        noise = torch.randn(shape, generator=self._random, device=self._random.device)
        own = slice(self.part.start * n, self.part.stop * n)
        return self.objective.inputs(noise, observations, positives, own, self._random)

    def compute_gradient(self, step: int) -> Tensor:
        """See :class:`~driftgen.training.task.Task`, here and below."""
        ahead, self._ahead = self._ahead, None
        inputs = ahead[1] if ahead is not None and ahead[0] == step else self.draw(step)
        self.last = self.compute(inputs)
        return self.last.loss

    def draw_ahead(self, step: int) -> None:
        """See :class:`~driftgen.training.task.DrawsAhead`; nothing is drawn from default generators."""
        self._ahead = step, self.draw(step)

    @torch.no_grad()
    def measure(self, averaged: nn.Module) -> dict[str, Any]:
        """Return metrics of the last step, and scores of averaged weights on held-out demonstrations."""
        assert self.last is not None
        observations, actions = self.probe
        chunks = self._generate(averaged, observations, PROBE_CHUNKS)
        return self.objective.measure(self.last) | chunk_scores(chunks, actions)

    def check_health(self, row: Mapping[str, Any]) -> list[str]:
        return self.health.update(row)

    @torch.no_grad()
    def save_preview(self, averaged: nn.Module, path: Path) -> Path | None:
        """Draw chunks of held-out observations beside the demonstrated ones."""
        observations, actions = self.draws.held_out_windows(SHOWN)
        chunks = self._generate(averaged, observations, SHOWN_CHUNKS)
        restore = self.draws.processor.restore_actions
        return draw_chunks(
            restore(chunks).cpu().numpy(), restore(actions).cpu().numpy(), path.with_suffix(".png")
        )

    def save_models(self, models: Mapping[str, nn.Module], folder: Path, step: int) -> None:
        """Save averages as ``model/`` and ``model-ema-DECAY/``, and trained weights as ``model-live/``."""
        for name, target, weights in model_folders(models):
            self._save_model(models[name], folder / target, step=step, **weights)

    def evaluate(self, averaged: Mapping[str, nn.Module], folder: Path, step: int) -> dict[str, Any]:
        """Return nothing: ``driftgen policy eval`` scores a run in its environment."""
        return {}

    def memory_advice(self) -> str:
        batch = self.config.batch
        if 2 * batch.micro <= batch.observations and not self.config.joint.groups:
            return f"use --set batch.micro={2 * batch.micro} (the same step in micro-batches)"
        return f"use --set batch.observations={max(1, batch.observations // 2)}"

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore nothing: step and seed determine every draw."""

    def _generate(self, network: nn.Module, observations: Mapping[str, Tensor], each: int) -> Tensor:
        """Return normalized chunks ``[n, each, T, A]`` with the same noise at every step."""
        n = len(next(iter(observations.values())))
        self._random.manual_seed(derive_seed(self.config.seed, PROBE))
        shape = (n * each, self.config.horizon, self.network.action_size)
        noise = torch.randn(shape, generator=self._random, device=self._random.device)
        # Compiled blocks would be compiled again for this batch size.
        with torch.compiler.set_stance("force_eager"):
            chunks = self.sampler(network, noise, observations)
        grouped: Tensor = chunks.float().unflatten(0, (n, each))
        return grouped

    def _save_model(self, model: nn.Module, target: Path, **source: Any) -> None:
        facts = {"recipe": self.name, "method": self.config.method, "environment": self.config.environment}
        with atomic_folder(target) as scratch:
            save_model(model, scratch, source={k: v for k, v in (facts | source).items() if v is not None})


def build_policy(config: PolicyConfig, draws: ChunkDraws) -> PolicyNetwork:
    """Build the network of a policy for demonstrations of these shapes."""
    return network_of(config, draws.shapes, draws.episodes.actions.shape[1], draws.statistics)


def network_of(
    config: PolicyConfig, shapes: Mapping[str, Sequence[int]], action_size: int, statistics: Statistics
) -> PolicyNetwork:
    """Build the network of a configuration for given shapes of an observation and width of an action."""
    build = partial(
        PolicyNetwork,
        shapes,
        action_size,
        statistics,
        horizon=config.horizon,
        observed=config.observed,
        executed=config.executed,
        method=config.method,
        generator=config.generator.kind,
        preset=config.generator.preset,
        options=config.generator.options,
        crop=config.images.crop,
        image_features=config.images.features,
        image_widths=config.images.widths,
        keypoints=config.images.keypoints,
    )
    check_network_size(build)
    return build()


def chunk_scores(chunks: Tensor, actions: Tensor) -> dict[str, float]:
    """Compare normalized chunks ``[n, N, T, A]`` with demonstrated ones ``[n, T, A]``.

    - ``chunk_error``: root mean square distance of a chunk to the demonstrated one, per coordinate;
    - ``chunk_spread``: mean distance between chunks of one observation, per coordinate; 0 for regression;
    - ``energy_score``: E‖x − a‖ − ½ E‖x − x'‖, per coordinate: a proper score, lowest for the distribution
      that the demonstrations come from (Gneiting and Raftery, 2007).
    """
    x, a = chunks.flatten(2).float(), actions.flatten(1).float()[:, None]
    size, each = x.shape[2] ** 0.5, x.shape[1]
    error, own = pairwise_distance(x, a), pairwise_distance(x, x)
    spread = own.sum((1, 2)).mean() / max(each * (each - 1), 1)
    values = torch.stack([error.square().mean().sqrt(), spread, error.mean() - spread / 2]) / size
    return dict(zip(("chunk_error", "chunk_spread", "energy_score"), values.tolist(), strict=True))


def train_policy(
    config: PolicyConfig,
    folder: Path,
    distributed: Distributed,
    view: View,
    *,
    name: str = "",
    override: bool = False,
    report: Callable[[Path], object] | None = None,
    parts: Parts = NO_PARTS,
) -> bool:
    """Train a policy in ``folder``, or resume its training; return True if the run is complete.

    The folder receives ``model/`` (the first average), ``samples/``, ``metrics.jsonl`` and whatever
    ``report(folder)`` writes. ``parts.episodes`` are demonstrations that were passed from Python.
    """
    config = check_run(folder, config, override=override)
    task = PolicyTraining(config, distributed, view.info, name=name, parts=parts)
    drifts = {"temperatures": list(config.loss.temperatures)} if config.method == "drifting" else {}
    header = {"task": "policy", "method": config.method, "recipe": name} | drifts
    return run_task(folder, config, task, distributed, view, header, report)
