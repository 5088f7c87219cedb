"""``driftgen bench loss``: forward and gradient by kernels, PyTorch path, and a literal implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from driftgen.bench.cards import card_of
from driftgen.bench.clock import Timing, free, timed
from driftgen.bench.memory import count_bytes
from driftgen.bench.record import Row, least_time
from driftgen.drift.batching import as_features, buckets_by_width
from driftgen.drift.fused import unsupported_reason
from driftgen.drift.loss import DriftingLoss
from driftgen.errors import InputError
from driftgen.ops.cuda_graphs import capture
from driftgen.ops.dispatch import without_kernels

__all__ = [
    "Case",
    "default_cases",
    "loss_operations",
    "measure_beside_small_groups",
    "measure_loss",
    "paper_features",
    "small_groups",
]

TEMPERATURES = (0.02, 0.05, 0.2)
SMALL_GROUP = 64, 64, 16  # generated samples, positives and negatives that large groups are compared with
Features = dict[str, Tensor]
# The literal implementation holds several pairwise matrices; larger cases are skipped.
MOST_PLAIN_BYTES = 2**31


@dataclass(frozen=True)
class Case:
    """Sizes of a loss call; ``features`` maps names to (vectors, width)."""

    name: str
    groups: int
    generated: int
    positives: int
    negatives: int
    features: dict[str, tuple[int, int]]

    def __post_init__(self) -> None:
        least = {"groups": 1, "generated": 1, "positives": 1, "negatives": 0}
        sizes = [(name, getattr(self, name), low) for name, low in least.items()]
        for name, size, low in (*sizes, *(("width", width, 1) for _, width in self.features.values())):
            if not low <= size < 2**31:
                raise InputError(f"{name}={size} must be at least {low} and below 2^31")

    @classmethod
    def single(cls, groups: int, generated: int, positives: int, negatives: int, width: int) -> Case:
        """Return a case with one feature of one vector."""
        name = f"{groups:,} x {generated}/{positives}/{negatives} x {width}"
        return cls(name, groups, generated, positives, negatives, {"": (1, width)})

    @classmethod
    def paper(cls, base: int, groups: int, generated: int, positives: int, negatives: int) -> Case:
        """Return a case with the 86 features of the paper's latent encoder at base width ``base``."""
        name = f"86 keys, base {base}"
        return cls(name, groups, generated, positives, negatives, paper_features(base))

    @property
    def samples(self) -> int:
        """Samples that a generated one is compared with."""
        return self.generated + self.positives + self.negatives

    @property
    def numbers(self) -> int:
        """Elements of one sample over all features."""
        return sum(vectors * width for vectors, width in self.features.values())

    @property
    def pairs(self) -> int:
        """Pairs of a generated sample and any sample, times the elements of a sample."""
        return self.groups * self.generated * self.samples * self.numbers

    def draw(self, dtype: torch.dtype, device: torch.device) -> list[Features]:
        """Draw generated samples, positives and negatives from a normal distribution."""
        generator, sets = torch.Generator(device).manual_seed(0), []
        for samples in (self.generated, self.positives, self.negatives):
            features = {}
            for name, shape in self.features.items():
                # Drawn in the final dtype: a float32 copy of the largest case would not fit beside it.
                values = torch.empty(self.groups, samples, *shape, dtype=dtype, device=device)
                features[name] = values.normal_(generator=generator)
            sets.append(features)
        return sets


def paper_features(base: int) -> dict[str, tuple[int, int]]:
    """Return (vectors, width) of the 86 features: 12 maps with 7 each, ``norm_x`` and the sample itself."""
    maps = {"conv1": (32, 1), "layer1": (32, 1), "layer1_blk2": (32, 1)}
    for stage, (size, blocks) in {2: (16, (2, 4)), 3: (8, (2, 4, 6)), 4: (4, (2,))}.items():
        for suffix in ("", *(f"_blk{b}" for b in blocks)):
            maps[f"layer{stage}{suffix}"] = (size, 2 ** (stage - 1))
    out = {"norm_x": (1, 4), "global": (1, 4096)}
    for name, (size, factor) in maps.items():
        for suffix, vectors in (("", size**2), ("_mean", 1), ("_std", 1)):
            out[name + suffix] = (vectors, base * factor)
        for patch in (2, 4):
            for statistic in ("mean", "std"):
                out[f"{name}_{statistic}_{patch}"] = ((size // patch) ** 2, base * factor)
    return out


def default_cases(device: torch.device) -> list[Case]:
    """Return the cases that the authors' code was measured with for a GPU, small ones for the CPU."""
    if device.type == "cuda":
        sizes = [(65_536, 256), (16_384, 256), (1_024, 512)]
        return [Case.single(groups, 64, 64, 16, width) for groups, width in sizes]
    return [Case.paper(8, 2, 16, 16, 4), Case.single(64, 64, 64, 16, 64)]


def loss_operations(case: Case) -> float:
    """Count the operations: distances, one product for each temperature, and the final product."""
    return 2.0 * case.pairs * (1 + len(TEMPERATURES) + 1)


def small_groups(case: Case) -> Case | None:
    """Return groups of 64/64/16 with the width and number of pairs of a case; None unless it is larger."""
    ours, theirs = case.generated * case.samples, SMALL_GROUP[0] * sum(SMALL_GROUP)
    if ours <= theirs or case.features.keys() != {""}:
        return None
    return Case.single(max(1, round(case.groups * ours / theirs)), *SMALL_GROUP, case.numbers)


def measure_beside_small_groups(
    case: Case, dtype: torch.dtype, device: torch.device, repeats: int
) -> list[Row]:
    """Measure a case. If its groups are large, measure groups of 64/64/16 first, to compare the time per
    pair.
    """
    reference = small_groups(case)
    if reference is None:
        return measure_loss(case, dtype, device, repeats)
    small = measure_loss(reference, dtype, device, repeats)
    large = measure_loss(case, dtype, device, repeats)
    compared = [
        replace(row, pair_reference=other.pair_seconds) for row, other in zip(large, small, strict=False)
    ]
    return [*small, *compared]


def measure_loss(case: Case, dtype: torch.dtype, device: torch.device, repeats: int) -> list[Row]:
    """Measure one case beside the PyTorch path and, if it is small, the literal implementation.

    If kernels compute the loss, measure it as a CUDA graph too, as in a captured training step.
    """
    sets = case.draw(dtype, device)
    leaves = [tensor.requires_grad_() for tensor in sets[0].values()]
    inputs = count_bytes(tensor for features in sets for tensor in features.values())
    least = inputs + count_bytes(leaves)
    if case.negatives == 0:
        sets.pop()
    loss = DriftingLoss(TEMPERATURES)
    buckets = buckets_by_width(*as_features(*sets, *[None] * (3 - len(sets))))
    kernels = unsupported_reason(loss.settings, buckets) is None

    def run(value_of: Callable[..., Tensor]) -> Timing | None:
        def step() -> None:
            torch.autograd.grad(value_of(*sets), leaves)

        try:
            return timed(step, device, repeats)
        except torch.cuda.OutOfMemoryError:
            return None

    ours = run(lambda *given: loss(*given).loss)
    references = {"eager": ours}
    free(device)
    captured = None
    if kernels and device.type == "cuda":
        replay = _captured(lambda: torch.autograd.grad(loss(*sets).loss, leaves))
        captured = timed(replay, device, repeats, cold_peak=True)
        del replay
        free(device)
    if kernels:
        with without_kernels():
            references["eager"] = run(lambda *given: loss(*given).loss)
        free(device)
    if _plain_bytes(case) <= MOST_PLAIN_BYTES:
        references["plain"] = run(plain)
        free(device)
    card = card_of(device)
    known = card is not None and dtype == torch.bfloat16 and case.features.keys() == {""}
    key = (case.groups, case.generated, case.positives, case.negatives, case.numbers)
    engine = "kernels" if kernels else "PyTorch path"
    rows = []
    for timing, how in ((ours, engine), *([(captured, "CUDA graph")] if captured else [])):
        rows.append(
            Row(
                case.name,
                f"{str(dtype).removeprefix('torch.')}, {how}",
                timing,
                references,
                card.loss.get(key) if card is not None and known else None,
                least_time(card, moved=least, operations=loss_operations(case), dtype=dtype),
                held_bytes=inputs,
                least_bytes=least,
                pairs=case.pairs,
                more={"engine": "kernels" if kernels else "PyTorch", "features": len(case.features)},
            )
        )
    return rows


def _captured(step: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that captures ``step`` as a CUDA graph at the first call, and replays it."""
    graphs: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        if not graphs:
            graphs.append(capture(step)[0])
        graphs[0].replay()

    return replay


def _plain_bytes(case: Case) -> int:
    """Estimate the peak memory of :func:`plain`, reached in the largest feature."""
    largest = max(vectors * (8 * case.generated + 2 * width) for vectors, width in case.features.values())
    return 4 * case.groups * case.samples * largest


def plain(generated: Features, positives: Features, negatives: Features | None = None) -> Tensor:
    """Compute the released arithmetic literally: one feature and temperature at a time, with autograd."""
    total = torch.zeros((), device=next(iter(generated.values())).device)
    for name, gen in generated.items():
        given = [gen, positives[name], gen[:, :0] if negatives is None else negatives[name]]
        x, pos, neg = (s.float().transpose(1, 2).flatten(0, 1) for s in given)
        drift = torch.zeros_like(x)
        for temperature in TEMPERATURES:
            with torch.no_grad():
                v, unit = _plain_drift(x, pos, neg, temperature)
                drift += v / v.square().mean().clamp(min=1e-8).sqrt()
        scaled = x / unit
        total = total + (scaled - (scaled + drift).detach()).square().mean()
    return total


def _plain_drift(x: Tensor, pos: Tensor, neg: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    y, n = torch.cat([x, neg, pos], dim=1), x.shape[1]
    distance = torch.cdist(x, y).clamp(min=1e-4)
    scale = distance.mean()
    unit = (scale / x.shape[-1] ** 0.5).clamp(min=1e-3)
    logits = distance / scale.clamp(min=1e-3)
    logits = -(logits + 100 * torch.eye(n, y.shape[1], device=x.device)) / temperature
    affinity = (logits.softmax(-1) * logits.softmax(-2)).clamp(min=1e-6).sqrt()
    negative, positive = affinity.split([n + neg.shape[1], pos.shape[1]], dim=-1)
    coefficient = torch.cat([-negative * positive.sum(-1, True), positive * negative.sum(-1, True)], dim=-1)
    return (coefficient @ y - coefficient.sum(-1, keepdim=True) * x) / unit, unit
