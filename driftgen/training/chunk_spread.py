"""Spread of action chunks: what several policies do in one ambiguous observation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.drift.field import pairwise_distance
from driftgen.errors import InputError
from driftgen.policy.chunk_figure import Panel, draw_comparison
from driftgen.policy.chunk_samplers import make_sampler
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.policy.episodes import STATE
from driftgen.policy.processor import ACTION
from driftgen.policy.two_ways import navigate
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.checksum import weights_checksum
from driftgen.support.provenance import command_line, environment, provenance
from driftgen.support.whole_numbers import check_count, check_seed
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.policy_data import ChunkDraws, open_demonstrations
from driftgen.training.policy_task import chunk_scores
from driftgen.training.recipes import load_config
from driftgen.training.run_folder import CONFIG

__all__ = ["Ambiguity", "compare_spread", "find_ambiguity", "measure_spread"]

NEIGHBORS = 16  # observations of different episodes, the chosen one among them
CANDIDATES = 4096  # windows that are examined, spread evenly
DENSE = 0.1  # share of the candidates whose neighbors count as near
ROLLOUTS = 100  # of the toy
MOST_CHUNKS = 10_000  # of a policy: all pairs of them are compared
COLORS = {"drifting": "tab:blue", "diffusion": "tab:green", "regression": "tab:red"}
FIGURE, RECORD = "spread.png", "spread.json"
EVALUATOR = "chunks from one observation, beside the demonstrated chunks of the nearest observations"
Array = NDArray[Any]


class Ambiguity(NamedTuple):
    """An observation after which demonstrators went different ways.

    Attributes:
        window: of the training demonstrations.
        neighbors: windows with the nearest observations, one of each episode; ``window`` is the first.
        distance: mean distance of their demonstrated chunks, per coordinate.
    """

    window: int
    neighbors: list[int]
    distance: float


def find_ambiguity(
    histories: Tensor,
    chunks: Tensor,
    episodes: Tensor,
    neighbors: int = NEIGHBORS,
    window: int | None = None,
) -> Ambiguity:
    """Find the observation whose nearest observations are followed by the most different chunks.

    Different means the mean distance of chunks, divided by the distance of the farthest of these
    observations: far ones are other situations, not other decisions. The choice depends on the demonstrations
    alone, not on a policy.

    Args:
        histories: normalized observations of each window, ``[W, D]``.
        chunks: normalized actions of each window, ``[W, T, A]``.
        episodes: episode of each window, ``[W]``.
        neighbors: windows to compare, one of each episode.
        window: take this one instead of searching.
    """
    neighbors = min(neighbors, len(episodes.unique()))
    if neighbors < 2:
        raise InputError("there is 1 training episode: chunks of at least 2 are compared")
    windows = torch.linspace(0, len(histories) - 1, min(CANDIDATES, len(histories))).long()
    if window is not None:
        if not 0 <= window < len(histories):
            raise InputError(f"window {window} does not exist: there are 0 to {len(histories) - 1}")
        windows = torch.tensor([window])
    near, far = [], []
    for candidate in windows.tolist():
        distance = torch.linalg.vector_norm(histories - histories[candidate], dim=1)
        distance[candidate] = -1.0  # before any duplicate
        nearest = torch.full((int(episodes.max()) + 1,), torch.inf)
        nearest.scatter_reduce_(0, episodes, distance, "amin")
        chosen = nearest.topk(neighbors, largest=False)
        far.append(chosen.values[-1])
        own = torch.isin(episodes, chosen.indices) & (distance == nearest[episodes])
        first = {int(episodes[i]): int(i) for i in reversed(own.nonzero()[:, 0].tolist())}
        near.append([first[episode] for episode in chosen.indices.tolist()])
    distances = torch.stack(far)
    limit = distances.quantile(DENSE).clamp(min=1e-6)
    groups = chunks[torch.tensor(near)].flatten(2)
    apart = pairwise_distance(groups, groups).sum((1, 2)) / (
        neighbors * (neighbors - 1) * groups.shape[2] ** 0.5
    )
    best = int((apart / distances.clamp(min=limit)).argmax())
    return Ambiguity(int(windows[best]), near[best], float(apart[best]))


def measure_spread(chunks: Tensor, demonstrated: Tensor) -> dict[str, Any]:
    """Compare normalized chunks ``[N, T, A]`` with demonstrated ones ``[M, T, A]`` of like observations.

    - ``chunk_spread``: mean distance between chunks, per coordinate;
    - ``energy_score``: mean over the demonstrated chunks, see
      :func:`~driftgen.training.policy_task.chunk_scores`;
    - ``ways``: share of chunks nearer to each of the two clusters of demonstrated chunks, the larger first;
    - ``between``: share of chunks in the middle half of the way from one cluster to the other.
    """
    x, a = chunks.flatten(1).double(), demonstrated.flatten(1).double()
    scores = chunk_scores(chunks[None].expand(len(a), *chunks.shape), demonstrated)
    centers = _two_clusters(a)
    ways = pairwise_distance(x, centers).argmin(1).bincount(minlength=2) / len(x)
    axis = centers[1] - centers[0]
    position = (x - centers[0]) @ axis / axis.square().sum().clamp(min=1e-12)
    between = ((position > 0.25) & (position < 0.75)).double().mean()
    spread = {key: scores[key] for key in ("chunk_spread", "energy_score")}
    return spread | {"ways": ways.tolist(), "between": float(between)}


def compare_spread(
    runs: Sequence[str],
    out: Path,
    *,
    chunks: int = 64,
    seed: int = 0,
    window: int | None = None,
    data: str | None = None,
    scheduler: str | None = None,
    rollouts: int = ROLLOUTS,
    device: str = "cpu",
) -> dict[str, Any]:
    """Draw chunks of several runs from one observation, and write ``spread.png`` and ``spread.json``.

    Args:
        runs: folders of training runs on the same demonstrations.
        out: folder to write to.
        chunks: drawn by each policy.
        seed: of the noise.
        window: of the training demonstrations; the most ambiguous one if None.
        data: demonstrations, if they are no longer where the first run found them.
        scheduler: of policies of method diffusion.
        rollouts: of each policy, in the toy two-ways.
        device: of the networks.
    """
    check_count("chunks", chunks, most=MOST_CHUNKS)
    check_seed("seed", seed)
    configs = [load_config(_run_config(run), PolicyConfig) for run in runs]
    first = configs[0]
    if data is not None:
        first = first.model_copy(update={"data": first.data.model_copy(update={"path": data})})
    draws = ChunkDraws(first, open_demonstrations(first.data), torch.device("cpu"))
    histories = draws.state_histories()  # raises for images
    everything = np.arange(len(draws.training))
    actions = draws.processor.normalize(ACTION, torch.from_numpy(draws.training.load(everything)[1]))
    episodes = torch.from_numpy(draws.training.episode_of(everything))
    found = find_ambiguity(histories, actions, episodes, window=window)
    demonstrated = actions[torch.tensor(found.neighbors)]
    observation = draws.training.load([found.window])[0]
    restore = draws.processor.restore_actions
    shown = f"{len(found.neighbors)} demonstrations"
    panels = [Panel(shown, "of the nearest observations", restore(demonstrated).numpy(), "black")]
    rows = []
    for run, config in zip(runs, configs, strict=True):
        policy = DriftingPolicy.from_pretrained(run, device=device)
        if config.method == "diffusion":
            policy.sampler = make_sampler(config.method, scheduler)
        _check_same(run, policy, draws)
        noise = policy.network.sample_noise(chunks, torch.Generator().manual_seed(seed))
        drawn = torch.from_numpy(policy.predict(observation, noise))
        measured = measure_spread(draws.processor.normalize(ACTION, drawn), demonstrated)
        row = {"run": Path(run).name, "method": config.method, "network_calls": policy.calls, **measured}
        if config.environment == "two-ways":
            result = navigate(policy, rollouts, seed)
            row["rollouts"] = {
                "count": rollouts,
                "success": float(result.success.mean()),
                "above": float(result.above.mean()),
            }
        row |= {"weights": weights_checksum(policy.network)[:16], "config": config.model_dump(mode="json")}
        rows.append(row)
        calls = f"{policy.calls} network call{'s' if policy.calls > 1 else ''}"
        panels.append(Panel(f"{config.method}, {calls}", _caption(row), drawn.numpy(), COLORS[config.method]))
    state = observation[STATE][0, -1]
    record = {
        "demonstrations": draws.episodes.source,
        "environment": first.environment,
        "window": found.window,
        "observation": observation[STATE][0].tolist(),
        "neighbors": found.neighbors,
        "demonstrated": measure_spread(demonstrated, demonstrated),
        "chunks": chunks,
        "noise_seed": seed,
        "policies": rows,
        "evaluator": EVALUATOR,
        **provenance(command_line()),
        "device": environment(torch.device(device))["device"],
    }
    folder = make_folder(out)
    draw_comparison(panels, state, first.environment, folder / FIGURE)
    with atomic_write(folder / RECORD) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['run']}: {_caption(row).replace(chr(10), ', ')}")
    print(folder / FIGURE)
    return record


def _two_clusters(points: Tensor) -> Tensor:
    """Return the centers of two clusters of points ``[M, D]``, the larger first (2-means)."""
    apart = pairwise_distance(points, points)
    first, second = divmod(int(apart.argmax()), len(points))
    centers = points[[first, second]]
    for _ in range(20):
        nearer = pairwise_distance(points, centers).argmin(1)
        counts = nearer.bincount(minlength=2)
        if not counts.all():  # all points are equal
            return centers
        centers = torch.stack([points[nearer == k].mean(0) for k in counts.argsort(descending=True)])
    return centers


def _run_config(run: str) -> Path:
    path = Path(run) / CONFIG
    if not path.is_file():
        raise InputError(f"{run} is no training run: {CONFIG} is missing")
    return path


def _check_same(run: str, policy: DriftingPolicy, draws: ChunkDraws) -> None:
    network = policy.network
    if network.observations != draws.shapes or network.horizon != draws.config.horizon:
        raise InputError(f"{run} has other observations or another horizon: compare runs of the same task")


def _caption(row: Mapping[str, Any]) -> str:
    text = f"energy score {row['energy_score']:.3f}, spread {row['chunk_spread']:.3f}\n"
    text += f"ways {row['ways'][0]:.0%} / {row['ways'][1]:.0%}, between {row['between']:.0%}"
    if "rollouts" in row:
        text += f"\n{row['rollouts']['success']:.0%} of rollouts succeed"
    return text
