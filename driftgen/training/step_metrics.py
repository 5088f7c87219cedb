"""Metrics of one step that reveal its health: spread, diversity, neighbors, variation of the encoder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from driftgen.drift.field import pairwise_distance
from driftgen.drift.kernels import farthest
from driftgen.drift.loss import DriftingLoss

__all__ = ["CLASSES", "feature_group", "measure", "measure_spread"]

PER_GROUP = 3  # features measured in each group, the smallest ones
CLASSES, SAMPLES, VECTORS = 32, 32, 2  # upper limits for each feature
SAMPLE, INPUT = "global", ("global", "norm_x")  # the sample itself; features that come from no encoder
DEAD = 1e-4  # relative to the largest mean distance in a feature's group


def feature_group(name: str) -> str:
    """Return the group of a feature: ``mae/layer1`` for ``mae/layer1_blk2_mean_4``."""
    prefix, slash, last = name.rpartition("/")
    return prefix + slash + re.split(r"_(?:mean|std|blk)", last, maxsplit=1)[0]


@torch.no_grad()
def measure(
    generated: Mapping[str, Tensor],
    positives: Mapping[str, Tensor],
    drift: Mapping[str, Tensor],
    scale: Mapping[str, Tensor],
    loss: DriftingLoss,
) -> dict[str, Any]:
    """Return metrics of one step for ``metrics.jsonl``.

    - ``drift``, ``drift_groups``: raw drift per temperature, the mean over all features and over each group;
    - ``scale``: mean distance, by feature group;
    - ``spread``: √(variance of the generated features / that of the positives) over all samples of the step,
      the geometric mean over feature groups; 1 is ideal;
    - ``diversity``: mean distance between generated samples of a class / that of positives, likewise;
    - ``neighbors``: per temperature, the effective number of samples that act on a generated one: 1 / Σ_j
      p_j², with p_j ∝ k(x, y_j) over all samples of its class, the median over feature groups. Near 1 the
      drift carries no information;
    - ``encoder_spread``: √(variance / mean square) of the features of positives, the minimum over the
      encoders' feature groups; 0 means that the encoder ignores its input;
    - ``class_share``: unbiased share of the variance of positives that lies between classes, ``[minimum over
      the encoders' feature groups, of the samples themselves]``;
    - ``dead``: features that are equal for all samples up to rounding.

    A metric that is undefined (one class, no encoder, no ``global``) is left out. The cost is bounded: a few
    small features of each group, a few samples of each, one transfer from the device.

    Args:
        generated: features ``[G, N, V, D]`` by name.
        positives: features ``[G, P, V, D]`` by name.
        drift: raw drift ``[len(temperatures)]`` by name.
        scale: mean distance by name.
        loss: provides kernel and temperatures.
    """
    groups: dict[str, list[str]] = {}
    for name in generated:
        groups.setdefault(feature_group(name), []).append(name)
    order = [name for names in groups.values() for name in names]
    drifts, scales = (torch.stack([t[n] for n in order]).float() for t in (drift, scale))
    moments = [_moments(generated, positives, scale, names, loss) for names in groups.values()]
    by_feature, distance, by_group = _to_lists(drifts, scales[:, None], torch.stack(moments))
    row: dict[str, Any] = {"drift": _mean(by_feature), "drift_groups": {}, "scale": {}}
    dead, at = [], 0
    for group, names in groups.items():
        part = slice(at, at + len(names))
        row["drift_groups"][group] = _mean(by_feature[part])
        distances = [d for (d,) in distance[part]]
        row["scale"][group] = sum(distances) / len(distances)
        dead += [name for name, d in zip(names, distances, strict=True) if d < DEAD * max(distances)]
        at += len(names)
    row |= _ratios(dict(zip(groups, by_group, strict=True)))
    return row | ({"dead": dead} if dead else {})


@torch.no_grad()
def measure_spread(
    generated: Mapping[str, Tensor], positives: Mapping[str, Tensor], loss: DriftingLoss
) -> dict[str, float]:
    """Return ``spread`` and ``diversity`` of features, as :func:`measure` has them."""
    groups: dict[str, list[str]] = {}
    for name in generated:
        groups.setdefault(feature_group(name), []).append(name)
    ones = {name: next(iter(generated.values())).new_ones(()) for name in generated}
    moments = torch.stack([_moments(generated, positives, ones, names, loss) for names in groups.values()])
    row = _ratios(dict(zip(groups, moments.tolist(), strict=True)))
    return {key: row[key] for key in ("spread", "diversity") if key in row}


def _to_lists(*tensors: Tensor) -> list[list[list[float]]]:
    """Return matrices as lists, in one transfer from the device."""
    parts = torch.cat([t.flatten() for t in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.view(t.shape).tolist() for part, t in zip(parts, tensors, strict=True)]


def _moments(
    generated: Mapping[str, Tensor],
    positives: Mapping[str, Tensor],
    scale: Mapping[str, Tensor],
    names: list[str],
    loss: DriftingLoss,
) -> Tensor:
    """Return the moments of one feature group: variance of all generated and of all positives, mean distance
    within a class of both, mean square of positives, their variance within and between classes, neighbors per
    temperature.

    All but neighbors are sums over features, so that a feature that is constant up to rounding has no weight.
    """
    small = sorted(names, key=lambda n: (generated[n].shape[2], generated[n].shape[3]))[:PER_GROUP]
    sums, neighbors = [], []
    for name in small:
        x, y = (t[name][:CLASSES, :SAMPLES, :VECTORS].float().transpose(1, 2) for t in (generated, positives))
        within = _variance(y.transpose(1, 2))
        between = _variance(y.mean(2)[None]) - within / y.shape[2]
        total = [_variance(t.transpose(1, 2).flatten(0, 1)[None]) for t in (x, y)]
        own = pairwise_distance(x, x)
        distance = [_off_diagonal_mean(own), _off_diagonal_mean(pairwise_distance(y, y))]
        sums.append(torch.stack([*total, *distance, y.square().sum(-1).mean(), within, between]))
        neighbors.append(_neighbors(own, pairwise_distance(x, y), scale[name], loss))
    return torch.cat([torch.stack(sums).sum(0), torch.stack(neighbors).median(0).values])


def _variance(x: Tensor) -> Tensor:
    """Return the variance over samples of ``[G, N, V, D]``, mean over groups and vectors; NaN for N = 1."""
    return x.var(1).sum(-1).mean() if x.shape[1] > 1 else x.new_tensor(math.nan)


def _off_diagonal_mean(distance: Tensor) -> Tensor:
    n = distance.shape[-1]
    return distance.sum((-2, -1)).mean() / (n * (n - 1)) if n > 1 else distance.new_tensor(math.nan)


def _neighbors(own: Tensor, others: Tensor, scale: Tensor, loss: DriftingLoss) -> Tensor:
    self_pairs = torch.eye(
        own.shape[-1], own.shape[-1] + others.shape[-1], dtype=torch.bool, device=own.device
    )
    distance = torch.cat([own, others], dim=-1)
    if loss.settings.normalize_features:
        distance = distance / scale.clamp(min=1e-12)
    counts = []
    for temperature in loss.temperatures:
        logits = loss.settings.kernel(distance.clamp(max=farthest(temperature)), temperature)
        p = torch.softmax(logits.masked_fill(self_pairs, -math.inf), dim=-1)
        counts.append((1 / p.square().sum(-1)).mean())
    return torch.stack(counts)


def _ratios(moments: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, i, power in (("spread", 0, 0.5), ("diversity", 2, 1.0)):
        logs = [power * math.log(max(f[i], 1e-30) / f[i + 1]) for f in moments.values() if f[i + 1] > 0]
        if logs and all(map(math.isfinite, logs)):
            row[key] = math.exp(sum(logs) / len(logs))
    row["neighbors"] = [median(column) for column in zip(*(f[7:] for f in moments.values()), strict=True)]
    encoders = [g for g, f in moments.items() if g.rpartition("/")[2] not in INPUT and f[1] >= 0]
    if encoders:
        row["encoder_spread"] = min(math.sqrt(moments[g][1] / max(moments[g][4], 1e-30)) for g in encoders)
    share = {g: f[6] / (f[5] + f[6]) for g, f in moments.items() if f[5] + f[6] > 0}
    if SAMPLE in share and any(g in share for g in encoders):
        row["class_share"] = [min(share[g] for g in encoders if g in share), share[SAMPLE]]
    return row


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
