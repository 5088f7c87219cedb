"""DriftingLoss: features × temperatures × normalisation × weights -> LossOutput (Algorithm 1, appendix
"Feature and Drift Normalization")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from driftgen.drift.batching import Samples, as_features, buckets_by_width
from driftgen.drift.field import check_factor, check_temperature, check_weight
from driftgen.drift.interfaces import PAPER_GUARDS, RELEASE_GUARDS, Settings, Statistics
from driftgen.drift.kernels import Kernel, get_kernel, laplace
from driftgen.drift.normalization import Normalization, both, get_normalization
from driftgen.drift.passes import AnyPasses, start_passes
from driftgen.errors import InputError, NotFiniteError, unknown_name

__all__ = ["DriftingLoss", "LossOutput", "Statistics"]


@dataclass(frozen=True)
class LossOutput:
    """What one call of :class:`DriftingLoss` found.

    With drift normalisation ``loss`` is nearly constant **by design**: a feature contributes at most R² for R
    temperatures, and usually almost that, whatever the state of the model. Watch ``drift``, which falls as
    the generator nears equilibrium, and ``scale``, the spread of the features, instead.

    Attributes:
        loss: scalar to call ``backward()`` on: sum over features of the mean squared normalised drift. With a
            process group it is the value over all processes.
        per_group: ``[G]``, the same for each group of this process (differentiable too).
        drift: mean squared drift per coordinate before drift normalisation, ``[len(temperatures)]``, or a
            dict of them; in units of S_j when features are normalised.
        scale: mean distance between generated samples and all samples, scalar, or a dict of them.
    """

    loss: Tensor
    per_group: Tensor
    drift: Tensor | dict[str, Tensor]
    scale: Tensor | dict[str, Tensor]


class DriftingLoss(nn.Module):
    """The drifting loss L = Σ_j MSE(φ̃_j(x) − sg(φ̃_j(x) + Σ_τ Ṽ_{j,τ})) (Eq. "mse_loss_j").

    φ̃_j = φ_j / S_j, with S_j √D the mean distance between generated and all samples, and Ṽ_{j,τ} = V_{j,τ} /
    λ_{j,τ}, with λ² the mean of ‖V‖²/D; both means run over the whole feature: all groups, all vectors, all
    processes. With ``normalize_features=False, normalize_drift=False`` and one temperature this is Algorithm
    1, whose value is the mean squared norm of V (per coordinate: MSE averages over D).

    Example::

        loss = DriftingLoss()
        out = loss(generated, positives)      # [N, D], [G, N, D], or {name: [G, N, V, D]}
        out.loss.backward()                   # flat by design ...
        print(out.drift, out.scale)           # ... so watch these

    Args:
        temperatures: τ of each field, relative to the mean distance when features are normalised.
        kernel: see :func:`driftgen.drift_field`.
        normalization: see :func:`driftgen.drift_field`.
        attraction: factor of V⁺.
        repulsion: factor of V⁻.
        normalize_features: divide features by S_j.
        normalize_drift: divide drifts by λ_j.
        convention: ``"release"`` for the arithmetic of the authors' code, ``"paper"`` for Algorithm 2 to the
            letter. The release's constants (mask, floor, clips) belong to its own setting, a Laplace kernel
            with both-axis normalisation of normalised features; elsewhere the paper's formulas stand in.
            ``docs/paper-differences.md`` lists the differences.
        process_group: processes that share a batch, each holding some groups of it. Statistics, ``loss`` and
            gradients are those of the whole batch, at two collectives a call. Gradients then add up over
            processes: multiply by the number of processes where something (such as DDP) averages them.
        chunk: most problems (group × vector) worked on at a time; by default as many as fit 256 MiB (2 GiB on
            a GPU). Beyond its inputs (float32 or narrower), its drift (the size of ``generated``) and small
            statistics, a call never holds more than ``2 · chunk · ((R + 5)·N·T + (R + 3)·N·D + 5·T·D)``
            float32 numbers, T being all samples that a generated one is compared with and R the number of
            temperatures. Problems for which that leaves no room are computed anew in each of the three passes
            instead of being kept.
    """

    def __init__(
        self,
        temperatures: float | Sequence[float] = (0.02, 0.05, 0.2),
        kernel: str | Kernel = "laplace",
        normalization: str | Normalization = "both",
        attraction: float = 1.0,
        repulsion: float = 1.0,
        normalize_features: bool = True,
        normalize_drift: bool = True,
        convention: Literal["release", "paper"] = "release",
        process_group: dist.ProcessGroup | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(temperatures, Tensor):
            temperatures = temperatures.tolist()
        try:
            several = tuple(temperatures) if isinstance(temperatures, Iterable) else (temperatures,)
        except TypeError:
            several = ()
        if not several:
            raise InputError("temperatures is empty: give at least one, such as (0.02, 0.05, 0.2)")
        for temperature in several:
            check_temperature("temperatures", temperature)
        check_factor("attraction", attraction)
        check_factor("repulsion", repulsion)
        if convention not in ("release", "paper"):
            raise unknown_name("convention", convention, ("release", "paper"))
        if chunk is not None and not (isinstance(chunk, int) and chunk >= 1):
            raise InputError(f"chunk={chunk!r} must be a whole number, at least 1")
        released = convention == "release"
        # The release computes nothing else, so its constants say nothing about anything else.
        same = get_kernel(kernel) is laplace and get_normalization(normalization) is both
        guarded = released and normalize_features and same
        self.settings = Settings(
            temperatures=tuple(float(t) for t in several),
            kernel=get_kernel(kernel),
            normalization=get_normalization(normalization),
            attraction=attraction,
            repulsion=repulsion,
            normalize_features=normalize_features,
            normalize_drift=normalize_drift,
            guards=RELEASE_GUARDS if guarded else PAPER_GUARDS,
            weigh_kernel=not released,
            sum_vectors=not released,
            process_group=process_group,
            chunk=chunk,
        )
        self.convention = convention

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures τ, in the order of ``LossOutput.drift``."""
        return self.settings.temperatures

    def extra_repr(self) -> str:
        return f"temperatures={self.temperatures}, convention={self.convention!r}"

    def forward(
        self,
        generated: Samples,
        positives: Samples,
        negatives: Samples | None = None,
        *,
        generated_weight: Tensor | None = None,
        positive_weight: Tensor | None = None,
        negative_weight: Tensor | None = None,
        statistics: Statistics | None = None,
    ) -> LossOutput:
        """Compares the generated samples with the positives (attract), themselves and the negatives (repel).

        Sample sets are tensors ``[N, D]`` or ``[G, N, D]`` (G independent groups), or dicts of ``[G, N, V,
        D]`` (V vectors per sample, each its own problem). ``negatives`` are extra, unconditional ones.
        Weights, ``[G]`` or ``[G, n]`` (or ``[n]`` for one group), multiply the affinities of those samples
        and count in the scale.

        With ``statistics`` these samples are a part of a larger batch whose scale, drift norms and number of
        groups are known, or taken from the step before: nothing is shared with other processes, ``loss`` and
        ``drift`` are this part's shares, which add up over all parts, and so do gradients. ``scale`` is this
        part's own.
        """
        # As a view it would have a gradient of its own to go through.
        gen, pos, neg = as_features(
            generated.detach() if isinstance(generated, Tensor) else generated, positives, negatives
        )
        names = list(gen)
        first = gen[names[0]]
        groups, n = first.shape[:2]
        weight = _join_weights(
            groups,
            first.device,
            ("generated_weight", generated_weight, n),
            ("negative_weight", negative_weight, 0 if neg is None else neg[names[0]].shape[1]),
            ("positive_weight", positive_weight, pos[names[0]].shape[1]),
        )
        buckets = buckets_by_width(gen, pos, neg)
        if isinstance(generated, Tensor):
            tensors = [generated]
        else:
            tensors = [tensor for bucket in buckets for tensor in bucket.generated]
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        with _without_autocast(first.device.type):
            passes = start_passes(self.settings, buckets, weight, statistics, wants_gradient)
            scale = passes.measure_scale()
            # A look at the value would stall a GPU's queue; there a NaN shows in scale and loss.
            if scale.device.type == "cpu" and not scale.isfinite().all():
                raise _not_finite(gen, pos, neg, shared=self.settings.process_group is not None)
            drift = passes.measure_drift()
            loss, per_group = _Combine.apply(passes, *tensors)  # type: ignore[no-untyped-call]
        if isinstance(generated, Tensor):
            return LossOutput(loss, per_group, drift[0], scale[0])
        return LossOutput(
            loss,
            per_group,
            dict(zip(names, drift.unbind(), strict=True)),
            dict(zip(names, scale.unbind(), strict=True)),
        )


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Entered only where autocast is on: small losses would notice."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


class _Combine(torch.autograd.Function):
    """The last pass, as an operation with a known gradient: −2 Ṽ / (count · S) times that of the loss."""

    @staticmethod
    def forward(ctx: Any, passes: AnyPasses, *generated: Tensor) -> tuple[Tensor, Tensor]:
        loss, (per_group, ctx.gradient, saved) = passes.combine()
        ctx.all_groups, ctx.shape = passes.all_groups, generated[0].shape
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return loss, per_group.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss: Tensor | None, per_group: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = None if per_group is None else per_group * ctx.all_groups
        if loss is not None:
            upstream = loss if upstream is None else upstream + loss
        gradients = ctx.gradient.read(upstream, ctx.saved_tensors)
        if len(ctx.shape) != 4:  # a single tensor, not a set of features [G, N, V, D]
            gradients = [gradients[0].view(ctx.shape)]
        return (None, *gradients)


def _join_weights(groups: int, device: torch.device, *parts: tuple[str, Tensor | None, int]) -> Tensor | None:
    """``[G, T]`` over all parts (argument, weight, samples); None if no part has weights."""
    if all(weight is None for _, weight, _ in parts):
        return None
    joined = []
    for argument, weight, samples in parts:
        if weight is None:
            joined.append(torch.ones(groups, samples, device=device))
            continue
        check_weight(argument, weight)
        if samples == 0:
            raise InputError(f"{argument} is given, but there are no such samples")
        shape, weight = list(weight.shape), weight.detach().to(device, torch.float32)
        if groups == 1 and shape == [samples]:
            weight = weight[None]
        elif shape == [groups]:
            weight = weight[:, None]
        elif shape != [groups, samples]:
            also = f", or [{samples}]" if groups == 1 else ""
            expected = f"[{groups}] or [{groups}, {samples}]{also}"
            raise InputError(f"{argument} has shape {shape}, expected {expected}")
        joined.append(weight.expand(groups, samples))
    result = torch.cat(joined, dim=1)
    if device.type == "cpu" and not (result.sum(dim=1) > 0).all():
        raise InputError("generated_weight, positive_weight and negative_weight are all 0 in some group")
    return result


def _not_finite(*sets: dict[str, Tensor] | None, shared: bool) -> NotFiniteError:
    for argument, features in zip(("generated", "positives", "negatives"), sets, strict=True):
        for name, tensor in (features or {}).items():
            if not tensor.isfinite().all():
                where = f"{argument}[{name!r}]" if name else argument
                return NotFiniteError(f"{where} holds NaN or infinite values: remove or repair those samples")
    if shared:
        return NotFiniteError("another process of the group holds NaN or infinite values: see its message")
    return NotFiniteError(
        "generated and positives lie so far apart that their distances overflow: rescale them"
    )
