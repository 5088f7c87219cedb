"""Figures of one step that tell its health: spread, diversity, neighbours, and what the encoder sees."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from driftgen.drift.kernels import farthest
from driftgen.drift.loss import DriftingLoss, LossOutput

__all__ = ["feature_group", "measure"]

PER_GROUP = 3  # features measured in each group, the smallest ones
CLASSES, SAMPLES, VECTORS = 32, 32, 2  # of each feature, at most
SAMPLE, INPUT = "global", ("global", "norm_x")  # the sample itself; features that no encoder makes
DEAD = 1e-4  # of the largest mean distance in a feature's group


def feature_group(name: str) -> str:
    """The feature group of a feature: ``mae/layer1`` of ``mae/layer1_blk2_mean_4``."""
    prefix, slash, last = name.rpartition("/")
    return prefix + slash + re.split(r"_(?:mean|std|blk)", last, maxsplit=1)[0]


@torch.no_grad()
def measure(
    generated: Mapping[str, Tensor],
    positives: Mapping[str, Tensor],
    output: LossOutput,
    loss: DriftingLoss,
) -> dict[str, Any]:
    """Figures of one step for ``metrics.jsonl``, from features ``[G, N, V, D]`` and what the loss found.

    - ``drift``, ``drift_groups``: raw drift per temperature, the mean over all features and over each group;
    - ``scale``: mean distance, by feature group;
    - ``spread``: √(variance of the generated features / that of the positives) over all samples of the step,
      the geometric mean over feature groups; 1 is right;
    - ``diversity``: mean distance between generated samples of a class / that of positives, likewise;
    - ``neighbours``: per temperature, how many samples a generated one feels: 1 / Σ_j p_j², with p_j ∝ k(x,
      y_j) over all samples of its class, the median over feature groups. Near 1 the drift says nothing;
    - ``encoder_spread``: √(variance / mean square) of the features of positives, in that feature group of the
      encoders where it is least; 0 means that the encoder does not look at its input;
    - ``class_share``: which share of the variance of positives lies between classes (unbiased), ``[in the
      encoders' feature group where it is least, in the samples themselves]``;
    - ``dead``: features that are the same for all samples up to rounding.

    A figure that cannot be had (one class, no encoder, no ``global``) is left out. The cost is bounded: a few
    small features of each group and a few samples of them; one transfer from the device.
    """
    groups: dict[str, list[str]] = {}
    for name in generated:
        groups.setdefault(feature_group(name), []).append(name)
    order = [name for names in groups.values() for name in names]
    assert isinstance(output.drift, dict)
    assert isinstance(output.scale, dict)
    drifts, scales = (torch.stack([t[n] for n in order]).float() for t in (output.drift, output.scale))
    moments = [_moments(generated, positives, output.scale, names, loss) for names in groups.values()]
    by_feature, distance, by_group = _fetch(drifts, scales[:, None], torch.stack(moments))
    row: dict[str, Any] = {"drift": _mean(by_feature), "drift_groups": {}, "scale": {}}
    dead, at = [], 0
    for group, names in groups.items():
        part = slice(at, at + len(names))
        row["drift_groups"][group] = _mean(by_feature[part])
        found = [d for (d,) in distance[part]]
        row["scale"][group] = sum(found) / len(found)
        dead += [name for name, d in zip(names, found, strict=True) if d < DEAD * max(found)]
        at += len(names)
    row |= _ratios(dict(zip(groups, by_group, strict=True)))
    return row | ({"dead": dead} if dead else {})


def _fetch(*tensors: Tensor) -> list[list[list[float]]]:
    """Tables as lists, in one transfer from the device."""
    parts = torch.cat([t.flatten() for t in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.view(t.shape).tolist() for part, t in zip(parts, tensors, strict=True)]


def _moments(
    generated: Mapping[str, Tensor],
    positives: Mapping[str, Tensor],
    scale: Mapping[str, Tensor],
    names: list[str],
    loss: DriftingLoss,
) -> Tensor:
    """Of one feature group: variance of all generated and of all positives, mean distance within a class of
    both, mean square of positives, their variance within and between classes, neighbours per temperature.

    All but neighbours are sums over features, so that one that is constant up to rounding counts for nothing.
    """
    small = sorted(names, key=lambda n: (generated[n].shape[2], generated[n].shape[3]))[:PER_GROUP]
    sums, neighbours = [], []
    for name in small:
        x, y = (t[name][:CLASSES, :SAMPLES, :VECTORS].float().transpose(1, 2) for t in (generated, positives))
        within = _variance(y.transpose(1, 2))
        between = _variance(y.mean(2)[None]) - within / y.shape[2]
        of_all = [_variance(t.transpose(1, 2).flatten(0, 1)[None]) for t in (x, y)]
        own = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        apart = [_off_diagonal_mean(own), _off_diagonal_mean(torch.cdist(y, y))]
        sums.append(torch.stack([*of_all, *apart, y.square().sum(-1).mean(), within, between]))
        neighbours.append(_neighbours(own, torch.cdist(x, y), scale[name], loss))
    return torch.cat([torch.stack(sums).sum(0), torch.stack(neighbours).median(0).values])


def _variance(x: Tensor) -> Tensor:
    """The mean over classes and vectors of the variance over samples, ``[G, N, V, D]``; NaN for one."""
    return x.var(1).sum(-1).mean() if x.shape[1] > 1 else x.new_tensor(math.nan)


def _off_diagonal_mean(distance: Tensor) -> Tensor:
    n = distance.shape[-1]
    return distance.sum((-2, -1)).mean() / (n * (n - 1)) if n > 1 else distance.new_tensor(math.nan)


def _neighbours(own: Tensor, others: Tensor, scale: Tensor, loss: DriftingLoss) -> Tensor:
    itself = torch.eye(own.shape[-1], own.shape[-1] + others.shape[-1], dtype=torch.bool, device=own.device)
    distance = torch.cat([own, others], dim=-1)
    if loss.settings.normalize_features:
        distance = distance / scale.clamp(min=1e-12)
    felt = []
    for temperature in loss.temperatures:
        logits = loss.settings.kernel(distance.clamp(max=farthest(temperature)), temperature)
        p = torch.softmax(logits.masked_fill(itself, -math.inf), dim=-1)
        felt.append((1 / p.square().sum(-1)).mean())
    return torch.stack(felt)


def _ratios(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, i, power in (("spread", 0, 0.5), ("diversity", 2, 1.0)):
        logs = [power * math.log(max(f[i], 1e-30) / f[i + 1]) for f in figures.values() if f[i + 1] > 0]
        if logs and all(map(math.isfinite, logs)):
            row[key] = math.exp(sum(logs) / len(logs))
    row["neighbours"] = [median(column) for column in zip(*(f[7:] for f in figures.values()), strict=True)]
    encoders = [g for g, f in figures.items() if g.rpartition("/")[2] not in INPUT and f[1] >= 0]
    if encoders:
        row["encoder_spread"] = min(math.sqrt(figures[g][1] / max(figures[g][4], 1e-30)) for g in encoders)
    share = {g: f[6] / (f[5] + f[6]) for g, f in figures.items() if f[5] + f[6] > 0}
    if SAMPLE in share and any(g in share for g in encoders):
        row["class_share"] = [min(share[g] for g in encoders if g in share), share[SAMPLE]]
    return row


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
