"""DriftingLoss and LossOutput (Algorithm 1, appendix "Feature and Drift Normalization")."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from driftgen.drift.arguments import check_factor, check_switch, check_temperature, check_weight
from driftgen.drift.batching import Samples, as_features, buckets_by_width
from driftgen.drift.interfaces import (
    PAPER_GUARDS,
    RELEASE_GUARDS,
    Combined,
    LossCall,
    Settings,
    Statistics,
)
from driftgen.drift.kernels import Kernel, get_kernel, laplace
from driftgen.drift.normalization import Normalization, both, get_normalization
from driftgen.drift.passes import run_passes, select_engine
from driftgen.errors import InputError, NotFiniteError, explained, unknown_name
from driftgen.ops.dispatch import is_capturing

__all__ = ["DriftingLoss", "LossOutput", "Statistics"]


@dataclass(frozen=True)
class LossOutput:
    """Result of one call of :class:`DriftingLoss`.

    With drift normalization ``loss`` is nearly constant **by design**: a feature contributes at most R² for R
    temperatures, and usually almost that, whatever the state of the model. Watch ``drift``, which falls as
    the generator approaches equilibrium, and ``scale``, the spread of the features, instead.

    Attributes:
        loss: scalar to call ``backward()`` on: sum over features of the mean squared normalized drift. With a
            process group, the value over all processes.
        per_group: ``[G]``, the loss of each group of this process, also differentiable.
        drift: mean squared drift per coordinate before drift normalization, ``[len(temperatures)]``, or a
            dict of them; in units of S_j if features are normalized.
        scale: mean distance between generated samples and all samples, scalar, or a dict of them.
    """

    loss: Tensor
    per_group: Tensor
    drift: Tensor | dict[str, Tensor]
    scale: Tensor | dict[str, Tensor]


class DriftingLoss(nn.Module):
    """The drifting loss ``L = Σ_j MSE(φ̃_j(x) − sg(φ̃_j(x) + Σ_τ Ṽ_{j,τ}))`` (Eq. "mse_loss_j").

    Here ``φ̃_j = φ_j / S_j``, where ``S_j √D`` is the mean distance between generated and all samples, and
    ``Ṽ_{j,τ} = V_{j,τ} / λ_{j,τ}``, where λ² is the mean of ``‖V‖²/D``. Both means run over the whole
    feature: all groups, all vectors, all processes. With ``normalize_features=False,
    normalize_drift=False`` and one temperature this is Algorithm 1, whose value is the mean of ``‖V‖²/D``.

    On a GPU, fused kernels compute the loss. If they do not support a call, it runs in plain PyTorch, and a
    warning gives the reason once.

    Example::

        loss = DriftingLoss()
        out = loss(generated, positives)      # [N, D], [G, N, D], or {name: [G, N, V, D]}
        out.loss.backward()                   # flat by design ...
        print(out.drift, out.scale)           # ... so watch these

    Args:
        temperatures: τ of each field, relative to the mean distance if features are normalized.
        kernel: see :func:`driftgen.drift_field`.
        normalization: see :func:`driftgen.drift_field`.
        attraction: factor of V⁺.
        repulsion: factor of V⁻.
        normalize_features: divide features by S_j.
        normalize_drift: divide drifts by λ_j.
        convention: ``"release"`` for the arithmetic of the authors' code, ``"paper"`` for Algorithm 2 to the
            letter. The release's constants (mask, floor, clips) only apply to a Laplace kernel with both-axis
            normalization of normalized features. All other settings use the paper's formulas.
            ``docs/paper-differences.md`` lists the differences.
        process_group: processes that share a batch, each holding some of its groups. Statistics, ``loss`` and
            gradients are those of the whole batch, at two collectives per call. Gradients must be summed over
            processes: multiply the loss by the number of processes if they are averaged (DDP, FSDP).
        chunk: maximum number of problems (group × vector) computed at a time in plain PyTorch; by default as
            many as fit 256 MiB (2 GiB on a GPU). Beyond its inputs (float32 or narrower), the drift (the size
            of ``generated``) and small statistics, a call allocates at most ``2 · chunk · ((R + 5)·N·T +
            (R + 3)·N·D + 5·T·D)`` float32 elements, where T is the number of samples that each generated
            sample is compared with, and R the number of temperatures. Intermediate results beyond that bound
            are recomputed in each of the three passes. Elements are float64 if samples are float64, and on a
            CPU also in chunks where float32 would lose digits (distant clusters, very low temperatures). On
            a GPU, temperatures below about 2e-4 are computed in float64 as well.
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
            taus = tuple(temperatures) if isinstance(temperatures, Iterable) else (temperatures,)
        except TypeError:
            taus = ()
        if not taus:
            raise InputError("temperatures is empty: pass at least one, such as (0.02, 0.05, 0.2)")
        taus = tuple(check_temperature("temperatures", temperature) for temperature in taus)
        attraction, repulsion = check_factor("attraction", attraction), check_factor("repulsion", repulsion)
        if not isinstance(convention, str) or convention not in ("release", "paper"):
            raise unknown_name("convention", convention, ("release", "paper"))
        if chunk is not None and not (isinstance(chunk, int) and chunk >= 1):
            raise InputError(f"chunk={chunk!r} must be a positive integer")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise InputError(
                f"process_group={process_group!r} must be a torch.distributed.ProcessGroup, such as "
                "torch.distributed.group.WORLD after init_process_group, or None"
            )
        check_switch("normalize_features", normalize_features)
        check_switch("normalize_drift", normalize_drift)
        if normalize_features and min(taus) < 1e-12:
            raise InputError(
                f"temperatures={min(taus):g} must be at least 1e-12, in units of the mean distance: float64 "
                "distances do not resolve less"
            )
        released = convention == "release"
        # The released code has no other kernel or normalization for its constants to apply to.
        same = get_kernel(kernel) is laplace and get_normalization(normalization) is both
        guarded = released and normalize_features and same
        self.settings = Settings(
            temperatures=taus,
            kernel=get_kernel(kernel),
            normalization=get_normalization(normalization),
            attraction=attraction,
            repulsion=repulsion,
            normalize_features=normalize_features,
            normalize_drift=normalize_drift,
            guards=RELEASE_GUARDS if guarded else PAPER_GUARDS,
            weighted_softmax=not released,
            sum_vectors=not released,
            process_group=process_group,
            chunk=chunk,
        )
        self.convention = convention
        self._warned: set[str] = set()

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
        """Compute the loss. Positives attract the generated samples; other generated samples and negatives
        repel them.

        Sample sets are tensors ``[N, D]`` or ``[G, N, D]`` (G independent groups), or dicts of ``[G, N, V,
        D]`` (V vectors per sample, each its own problem). ``negatives`` are extra, unconditional samples.
        Weights, ``[G]`` or ``[G, n]`` (or ``[n]`` for one group), multiply the affinities of their samples,
        and the scale is a weighted mean.

        Pass ``statistics`` if the samples are part of a larger batch whose scale, drift norms and number of
        groups are known, or are taken from the previous step. The call then uses no collective, and in a
        process group it returns values that are not finite instead of raising: check their sums over the
        processes. ``loss``, ``drift`` and gradients are the share of this part: they add up to those of the
        batch. ``scale`` is the mean distance of this part.
        """
        # A view of a leaf that requires a gradient would add a node to the graph.
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
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        call = LossCall(self.settings, buckets, weight, statistics, needs_gradient)

        # Reading a value would synchronize a GPU. There, a NaN shows in scale and loss, and so it does in a
        # group with given statistics: no process may raise for samples that the others do not see, because
        # they would wait for it in the next collective.
        shared = self.settings.process_group is not None
        checked = first.device.type == "cpu" and not (shared and statistics is not None)

        def check_scale(scale: Tensor) -> None:
            if checked and not scale.isfinite().all():
                raise _not_finite(gen, pos, neg, shared=shared)

        with _without_autocast(first.device.type):
            engine, fallback_reason = select_engine(call)
            if fallback_reason is not None:
                self._warn_once(fallback_reason, first.device)
            (scale, all_groups, _), (drift, _), combined = run_passes(engine, check_scale)
            loss, per_group = _AttachGradient.apply(combined, all_groups, *tensors)  # type: ignore[no-untyped-call]
            if checked and not (loss.isfinite() and (shared or per_group.isfinite().all())):
                raise NotFiniteError("the loss overflows float32: rescale the samples or normalize drifts")
        if isinstance(generated, Tensor):
            return LossOutput(loss, per_group, drift[0], scale[0])
        return LossOutput(
            loss,
            per_group,
            dict(zip(names, drift.unbind(), strict=True)),
            dict(zip(names, scale.unbind(), strict=True)),
        )

    def _warn_once(self, reason: str, device: torch.device) -> None:
        """Warn that the loss does not use the fused kernels, once for each reason."""
        if reason in self._warned or is_capturing(device):
            return
        self._warned.add(reason)
        warnings.warn(
            explained(
                f"DriftingLoss runs in plain PyTorch on {device}, not in the faster fused kernels: {reason}",
                "slow-loss",
            ),
            stacklevel=5,  # the caller of the module: this method, forward and two frames of nn.Module
        )


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Disable autocast if it is enabled. Entering the context is expensive for small losses."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


class _AttachGradient(torch.autograd.Function):
    """Identity on the combined loss, with the gradient −2 Ṽ / (count · S) of the generated features."""

    @staticmethod
    def forward(
        ctx: Any, combined: Combined, groups: Tensor | int, *generated: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.gradient, ctx.groups, ctx.shape = combined.gradient, groups, generated[0].shape
        ctx.save_for_backward(*combined.saved)
        ctx.set_materialize_grads(False)
        return combined.loss, combined.per_group.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss: Tensor | None, per_group: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = None if per_group is None else per_group * ctx.groups
        if loss is not None:
            upstream = loss if upstream is None else upstream + loss
        gradients = ctx.gradient.compute(upstream, ctx.saved_tensors)
        if len(ctx.shape) != 4:  # a single tensor, not a set of features [G, N, V, D]
            gradients = [gradients[0].view(ctx.shape)]
        return (None, None, *gradients)


def _join_weights(groups: int, device: torch.device, *parts: tuple[str, Tensor | None, int]) -> Tensor | None:
    """Concatenate the weights of all parts (argument, weight, samples) to ``[G, T]``; None if no part has
    weights.
    """
    if all(weight is None for _, weight, _ in parts):
        return None
    joined = []
    for argument, weight, samples in parts:
        if weight is None:
            joined.append(torch.ones(groups, samples, device=device))
            continue
        check_weight(argument, weight)
        if samples == 0:
            raise InputError(f"{argument} is given, but there are no samples for it: leave it out")
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
        raise InputError(
            "generated_weight, positive_weight and negative_weight are all 0 in some group: "
            "give every group a sample with positive weight"
        )
    return result


def _not_finite(*sets: dict[str, Tensor] | None, shared: bool) -> NotFiniteError:
    for argument, features in zip(("generated", "positives", "negatives"), sets, strict=True):
        for name, tensor in (features or {}).items():
            if not tensor.isfinite().all():
                where = f"{argument}[{name!r}]" if name else argument
                return NotFiniteError(f"{where} contains NaN or infinite values: remove or fix those samples")
    if shared:
        return NotFiniteError("another process of the group received NaN or infinite values: see its message")
    return NotFiniteError("distances between generated and positives overflow float32: rescale the samples")
