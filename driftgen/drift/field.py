"""The drifting field V: pure functions on tensors, no modules, no state.

Results are float32, without gradient. Samples may form distant clusters, and logits may be large: if float32
would lose digits (:func:`needs_float64`), or if the samples are float64, everything is computed in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftgen.drift.arguments import (
    check_agreement,
    check_factor,
    check_pairs,
    check_samples,
    check_switch,
    check_temperature,
    check_weight,
)
from driftgen.drift.kernels import Kernel, farthest, get_kernel
from driftgen.drift.normalization import (
    MASKED,
    MIN_LOG_SUM,
    LogAffinity,
    Normalization,
    floored_both,
    get_normalization,
)
from driftgen.errors import InputError

__all__ = [
    "displacement",
    "drift_coefficients",
    "drift_field",
    "exact_dtype",
    "medoid",
    "mmd_field",
    "needs_float64",
    "pairwise_distance",
]

# Bounds of :func:`needs_float64`. Relative errors of float32 are up to 3e-7 times an offset, and about 6e-8
# times a logit.
MAX_OFFSET = 32.0
MAX_LOGIT = 200.0


def drift_field(
    x: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float,
    kernel: str | Kernel = "laplace",
    normalization: str | Normalization = "both",
    attraction: float = 1.0,
    repulsion: float = 1.0,
    positive_weight: Tensor | None = None,
    negative_weight: Tensor | None = None,
    self_mask: bool | None = None,
) -> Tensor:
    """Compute the drifting field V at every x (Algorithm 2; Eq. "VZZ").

    V_i = attraction · Σ_j W⁺_ij (y⁺_j − x_i) − repulsion · Σ_j W⁻_ij (y⁻_j − x_i), with W⁺ = A⁺ ΣA⁻ and W⁻ =
    A⁻ ΣA⁺ from the normalized affinities A. With both factors 1 the x_i cancel and V = W⁺y⁺ − W⁻y⁻, as in
    Algorithm 2. Other factors give the paper's ablation of anti-symmetry (1.5V⁺ − V⁻, V⁺ alone, ...).

    Args:
        x: samples to move, ``[..., N, D]``. The leading dimensions of all sets must broadcast.
        positives: samples that attract, ``[..., P, D]``.
        negatives: samples that repel, ``[..., M, D]``; None means x itself, each sample ignoring itself.
        temperature: τ of the kernel, in units of the data.
        kernel: ``"laplace"``, ``"gaussian"``, ``"inverse_multiquadric"``, or a function ``(distance, τ) ->
            log k``.
        normalization: ``"both"`` (the paper's), ``"y"``, ``"none"``, ``"sinkhorn"``, or a function.
        attraction: factor of V⁺.
        repulsion: factor of V⁻.
        positive_weight: ``[P]`` or ``[..., P]``; multiplies affinities after normalization, as in the
            released code.
        negative_weight: ``[M]`` or ``[..., M]``, likewise.
        self_mask: True if the first N negatives are x itself: each sample then ignores itself. By default
            True if ``negatives`` is None or is ``x``.

    Returns:
        V, float32, shaped like x after broadcasting. No gradient flows.
    """
    if self_mask is None:
        self_mask = negatives is None or negatives is x
    check_switch("self_mask", self_mask)
    temperature = check_temperature("temperature", temperature)
    attraction, repulsion = check_factor("attraction", attraction), check_factor("repulsion", repulsion)
    x, positives = check_samples("x", x), check_samples("positives", positives)
    negatives = x if negatives is None else check_samples("negatives", negatives)
    check_agreement(x, positives, negatives)
    if self_mask and negatives.shape[-2] < x.shape[-2]:
        raise InputError(
            f"self_mask=True needs x as the first {x.shape[-2]} negatives, "
            f"but there are {negatives.shape[-2]}: pass negatives=None, or x followed by further samples"
        )
    log_kernel, normalize = get_kernel(kernel), get_normalization(normalization)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x, y = _side_by_side(x, negatives, positives)
        if x.device.type == "cuda":  # where reading the result of a test would synchronize
            x, y = x.double(), y.double()
        weight = _join_weights(y, negatives.shape[-2], negative_weight, positive_weight)
        distance = pairwise_distance(x, y)
        row_sums = distance.sum(-1)
        center = medoid(row_sums, x)
        if x.dtype == torch.float32 and x.device.type == "cpu":
            limit = farthest(temperature)
            mean_logits = log_kernel((row_sums / y.shape[-2]).clamp(max=limit), temperature)
            m, factors = negatives.shape[-2], (attraction, repulsion)
            overflows = bool((row_sums > 1e38).any())
            # A Euclidean norm might overflow or underflow.
            offset = (x - center).abs().amax(-1) * math.sqrt(x.shape[-1])
            if overflows or needs_float64(distance, offset, m, mean_logits, factors, limit, own=self_mask):
                x, y = x.double(), y.double()
                distance = pairwise_distance(x, y)
        limit = farthest(temperature, x.dtype, log_kernel)
        _check_reach(distance, temperature, limit)
        logits = log_kernel(distance.clamp(max=limit), temperature)
        if self_mask:
            logits.diagonal(dim1=-2, dim2=-1).fill_(MASKED)
        coefficients, log_factor = drift_coefficients(
            logits,
            negatives.shape[-2],
            normalize,
            weight=weight,
            attraction=attraction,
            repulsion=repulsion,
        )
        drift = displacement(coefficients, x - center, y - center)
        if log_factor is None:
            return _as_float32(drift)
        exact = exact_dtype(x.device)
        return _as_float32(drift.to(exact) * log_factor.to(exact).exp())


def mmd_field(
    x: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float,
    kernel: str = "gaussian",
) -> Tensor:
    """Compute the field that a squared-MMD loss induces (appendix "The Drifting Field of MMD").

    V(x) = E⁺[∂ξ(x, y⁺)/∂x] − E⁻[∂ξ(x, y⁻)/∂x] = −½ ∂L/∂x, with L(x) = 2 E⁻[ξ(x, y⁻)] − 2 E⁺[ξ(x, y⁺)].
    ξ is ``"gaussian"``, exp(−‖x − y‖² / 2τ²), or ``"laplace"``, exp(−‖x − y‖ / τ). For the batch loss
    mean ξ(x, x') − 2 mean ξ(x, y) + const this is −N/2 times the gradient. ``negatives=None`` means x itself:
    the mean runs over all N samples, and a sample exerts no force on itself.
    """
    temperature = check_temperature("temperature", temperature)
    x, positives = check_samples("x", x), check_samples("positives", positives)
    negatives = x if negatives is None else check_samples("negatives", negatives)
    check_agreement(x, positives, negatives)
    if not isinstance(kernel, str) or kernel not in ("gaussian", "laplace"):
        raise InputError(f"kernel={kernel!r} has no MMD field: use 'gaussian' or 'laplace'")
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x, y = (t.to(exact_dtype(t.device)) for t in _side_by_side(x, negatives, positives))
        distance = pairwise_distance(x, y)
        m, p = negatives.shape[-2], positives.shape[-2]
        share = torch.cat([x.new_full((m,), -1 / m), x.new_full((p,), 1 / p)])
        logits = get_kernel(kernel)(distance.clamp(max=farthest(temperature, x.dtype)), temperature)
        weight = logits.exp() * share
        # ∂ξ/∂x = ξ (y − x)/(u τ), u = τ (Gaussian) or ‖y − x‖ (Laplace, with no force at its kink). Uses
        # differences, a few x at a time: for close points 1/‖y − x‖ would amplify cancellation errors.
        unit = (
            torch.where(distance > 0, distance, 1.0)
            if kernel == "laplace"
            else torch.full_like(distance, temperature)
        )
        out = torch.empty_like(x)
        rows = max(1, 2**24 // y.numel())
        for part in (slice(i, i + rows) for i in range(0, x.shape[-2], rows)):
            gap = (y[..., None, :, :] - x[..., part, None, :]).div_(unit[..., part, :, None])
            out[..., part, :] = (weight[..., part, None, :] @ gap).squeeze(-2) / temperature
        return _as_float32(out)


def _check_reach(distance: Tensor, temperature: float, limit: float) -> None:
    """Raise if the kernel would tell no two distances apart. On a GPU, reading them would synchronize."""
    if distance.device.type == "cpu" and distance.numel() and float(distance.max()) > limit:
        nearest = float(distance[distance > 0].min())
        if nearest > limit:
            raise InputError(
                f"temperature={temperature:g} is too low for samples that are {nearest:.2g} apart or more: "
                "raise it, or rescale the samples"
            )


def pairwise_distance(x: Tensor, y: Tensor) -> Tensor:
    """Pairwise distances ‖x_i − y_j‖, ``[..., N, D]`` and ``[..., T, D]`` to ``[..., N, T]``, in their dtype.

    |x|² + |y|² − 2xy in float32 would cancel if the mean is large relative to the spread. On a CPU, distances
    come from differences, scaled by a power of two so that squares neither underflow nor overflow. On an
    NVIDIA GPU, where differences take twenty times as long, they come from that formula in float64, relative
    to a median of samples: identical points have distance 0, and an outlier does not affect the others.
    """
    if x.device.type == "cuda":
        dtype, origin = x.dtype, _median_of_three(y).double()
        x, y = x - origin, y - origin
        square_x, square_y = (torch.linalg.vector_norm(t, dim=-1).square() for t in (x, y))
        squares = (x @ y.mT).mul_(-2).add_(square_x[..., :, None]).add_(square_y[..., None, :])
        return squares.clamp_(min=0).sqrt_().to(dtype)
    size = torch.maximum(_max_abs(x), _max_abs(y))
    largest = 126 if x.dtype == torch.float32 else 1022
    # torch.ldexp would compute the power in float32.
    unit = torch.full_like(size, 2.0).pow(torch.frexp(size).exponent.clamp(-largest, largest))
    return torch.cdist(x / unit, y / unit, compute_mode="donot_use_mm_for_euclid_dist").mul_(unit)


def medoid(row_sums: Tensor, x: Tensor) -> Tensor:
    """Return the x with the smallest sum of distances to all y, ``[..., 1, D]``: an origin that is robust to
    outliers. ``x`` may also be any other rows, one for each sample.
    """
    index = row_sums.argmin(dim=-1)[..., None, None]
    return x.gather(-2, index.expand(*index.shape[:-1], x.shape[-1]))


def needs_float64(
    distance: Tensor, offset: Tensor, negatives: int, mean_logits: Tensor, factors: tuple[float, float],
    limit: float | Tensor, *, own: bool,
) -> bool:  # fmt: skip
    """Return True if drifts computed in float32 from these samples would be off by about 1e-5 or more.

    Rounding errors of Σ_j C_ij y_j scale with ``offset``, the distance of x_i from the origin. The terms of
    V_i scale with at least the mean of the distances to the nearest positive and negative, weighted by
    ``factors``. If x are the first negatives (``own``), a sample is not its own nearest. Errors of affinities
    scale with logits, of which ``mean_logits`` are those at the mean distance of each x_i. Distances beyond
    ``limit`` would be clamped.
    """
    if own:
        diagonal = distance.diagonal(dim1=-2, dim2=-1)
        self_distance = diagonal.clone()
        diagonal.fill_(math.inf)
    near = distance.amin(-1)
    if (offset >= MAX_OFFSET * near).any():  # seldom, and the two sets take three times as long
        near = torch.zeros_like(offset)
        for part, factor in zip((distance[..., negatives:], distance[..., :negatives]), factors, strict=True):
            if factor != 0:
                near += part.amin(-1) * abs(factor) / sum(map(abs, factors))
    if own:
        diagonal.copy_(self_distance)
    coarse = (offset >= MAX_OFFSET * near).any() or (mean_logits < -MAX_LOGIT).any()
    return bool(coarse or (distance > limit).any())


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return float64 if the device supports it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def drift_coefficients(
    logits: Tensor,
    negatives: int,
    normalization: Normalization,
    *,
    weight: Tensor | None = None,
    weighted_softmax: bool = False,
    floor: float = 0.0,
    attraction: float = 1.0,
    repulsion: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return C with V_i = exp(log_factor_i) Σ_j C_ij (y_j − x_i): −W⁻ in the first ``negatives`` columns, W⁺
    in the others (Algorithm 2).

    ``weight`` ``[..., 1, T]`` multiplies the affinities after normalization. With ``weighted_softmax`` it
    also multiplies the terms of sums over y, so that weight 2 equals two copies. ``floor`` bounds the
    affinities of both-axis normalization from below (1e-3 in the released code).

    The second result is ``log_factor`` ``[..., N, 1]``: for each x_i, the logarithm of the largest A⁻ times
    the largest A⁺, which every W contains. It is None if a floor or a user's normalization gives A itself.
    """
    log_weight = weight.log() if weight is not None and floor == 0 else None
    normalized: LogAffinity | Tensor
    if floor > 0:
        normalized = floored_both(logits, floor)
    else:
        normalized = normalization(logits, log_weight if weighted_softmax else None)
    log_factor = None
    if isinstance(normalized, LogAffinity):
        affinity = normalized.values if log_weight is None else normalized.values + log_weight
        log_factor = _exp_of_sets(affinity[..., :negatives], affinity[..., negatives:])
    else:
        affinity = normalized if weight is None else normalized * weight
    repelled, attracted = affinity[..., :negatives], affinity[..., negatives:]
    sum_negative, sum_positive = repelled.sum(-1, keepdim=True), attracted.sum(-1, keepdim=True)
    repelled *= -repulsion * sum_positive
    attracted *= attraction * sum_negative
    return affinity, log_factor


def _exp_of_sets(repelled: Tensor, attracted: Tensor) -> Tensor:
    """Turn log A⁻ and log A⁺ into A, in place, each divided by the largest of its row. Return the logarithm
    of the product of both divisors, or MIN_LOG_SUM if a set has no pairs.
    """
    largest = [part.amax(dim=-1, keepdim=True) for part in (repelled, attracted)]
    for part, most in zip((repelled, attracted), largest, strict=True):
        part.sub_(torch.where(most > MIN_LOG_SUM, most, 0.0)).exp_()
    return (largest[0] + largest[1]).clamp_(min=MIN_LOG_SUM)


def displacement(coefficients: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return Σ_j C_ij (y_j − x_i) for C of shape ``[..., N, T]``, or ``[..., R, N, T]`` for R fields at once.

    The two sums cancel: pass x and y relative to a point close to them.
    """
    if coefficients.ndim == y.ndim:
        moved = coefficients @ y
    else:
        moved = (coefficients.flatten(-3, -2) @ y).unflatten(-2, coefficients.shape[-3:-1])
        x = x.unsqueeze(-3)
    return moved.addcmul_(coefficients.sum(-1, keepdim=True), x, value=-1)


def _as_float32(field: Tensor) -> Tensor:
    """Return the field in float32. Raises ``InputError`` if it overflows (checked on a CPU)."""
    result = field.float()
    if result.device.type == "cpu" and not result.isfinite().all():
        raise InputError("the field exceeds the range of float32 (3e38): rescale samples or weights")
    return result


def _side_by_side(x: Tensor, negatives: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and y = [negatives, positives] with one dtype and the same leading dimensions."""
    try:
        lead = torch.broadcast_shapes(x.shape[:-2], negatives.shape[:-2], positives.shape[:-2])
    except RuntimeError:
        shapes = [list(t.shape) for t in (x, positives, negatives)]
        raise InputError(
            f"the leading dimensions of x, positives and negatives do not broadcast: {shapes}"
        ) from None
    # At least distances and logits are held at once.
    pair = 2 * max(t.element_size() for t in (x, negatives, positives))
    check_pairs(math.prod(lead), x.shape[-2], negatives.shape[-2] + positives.shape[-2], pair, x.device)
    y = torch.cat([t.expand(*lead, *t.shape[-2:]) for t in (negatives, positives)], dim=-2)
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.expand(*lead, *x.shape[-2:]).to(dtype), y.to(dtype)


def _join_weights(
    y: Tensor, negatives: int, negative_weight: Tensor | None, positive_weight: Tensor | None
) -> Tensor | None:
    if negative_weight is None and positive_weight is None:
        return None
    joined = torch.ones(y.shape[:-1], device=y.device)
    for argument, weight, part in (
        ("negative_weight", negative_weight, joined[..., :negatives]),
        ("positive_weight", positive_weight, joined[..., negatives:]),
    ):
        if weight is None:
            continue
        check_weight(argument, weight)
        try:
            part.copy_(weight.detach().expand(part.shape))
        except RuntimeError:
            raise InputError(
                f"{argument} has shape {list(weight.shape)}, expected {list(part.shape)}, "
                f"or [{part.shape[-1]}] for all problems"
            ) from None
    return joined[..., None, :]


def _median_of_three(y: Tensor) -> Tensor:
    """Coordinate-wise median of three samples. One outlier cannot move it."""
    a, b, c = (y[..., i : i + 1, :] for i in (0, y.shape[-2] // 2, y.shape[-2] - 1))
    return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))


def _max_abs(samples: Tensor) -> Tensor:
    return samples.abs().amax(dim=(-2, -1), keepdim=True)
