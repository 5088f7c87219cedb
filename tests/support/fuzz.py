"""Fuzz of the field and the loss against the float64 twin.

``python -m tests.support.fuzz --seconds 60 --seed 0``. A case is a list of choices (sizes, scale, layout,
weights, temperatures, options), drawn by hypothesis or from a seed. Its results must agree with the twin to
``LIMIT``, or the call must raise ``InputError``, which is allowed only where the exact result exceeds
float32. No input is silently wrong, except for the classes below.

Errors are measured sample by sample, relative to the terms of its sum, Σ_j |C_ij| ‖y_j − x_i‖, so that a
cluster, an outlier or a group cannot hide behind larger ones. Excluded, with the reason:

- Results beyond float32. A value below 1e-37, in the units of the result or of the largest drift of its
  problem, may be 0, and a mean square of such values is off by up to 1e-36. Mean squared drifts may be
  infinite where the exact value exceeds 3e38.
- The kernels mask a sample by a large distance. An inverse multiquadric is not 0 there: a drift that is
  exactly 0 may be 1e-8 of the largest, less than what float32 resolves of that one.
- Gradients above 1e36 are clamped: those of denormal features would overflow.
- Cancellation. Where attraction and repulsion agree to 1e-2 over a whole feature, normalized drifts amplify
  rounding errors: only the raw field is compared, and the loss must be finite.
- Logits beyond 1e9. The answer then depends on digits of the distances that float64 does not have either.
- Bfloat16 gradients are compared to 2⁻⁷: they are rounded to 2⁻⁸ twice.
- Sinkhorn normalization stops at a tolerance of 1e-3 by design; tests/drift/test_field.py covers it.
- Differences below 1e-12 of the extent: drifts are relative to one origin, in float64. The errors
  allowed are LIMIT · Σ_j |C_ij| (‖y_j − x_i‖ + 1e-12 · the largest distance). The second term is a floor f_i
  that does not shrink with the drift. Mean squared drifts D and losses are squares of a norm, and
  |‖V + δ‖² − ‖V‖²| ≤ 2 ‖V‖ ‖δ‖ + ‖δ‖²: the error allowed of D is LIMIT · (D + 2 √D ‖f‖) + LIMIT² ‖f‖², and
  that of a loss follows in the same way from the floor of the normalized drifts (``twin.Loss``).
- Gaussian logits of an outlier. The kernels square a distance in float32: the logit l of an outlier's
  nearest sample, and with it every affinity of its row, is off by up to 2⁻²¹ |l|, rounding of the distance
  included. Their floor is that share of the extent: from |l| of about 2e6 on, only the scale and
  finiteness are checked.
- Uneven weights in the fused kernels. Without the release's floor of affinities, normalized drifts underflow
  where one set has so small a share of the weight that its mean distance may be far beyond that of all
  samples (``thin_set``): only the scale and finiteness are checked.
- The fused kernels take float32 samples here, at scales from 1e-3 to 1e8, without extreme weights
  (``unsupported_reason`` states their limits). They run in the interpreter where there is no GPU: cases are
  few. Kernels of large groups (tiles) have their own tests.
"""

import math
import os
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import numpy as np
import torch

import driftgen as dg
from driftgen.ops import dispatch
from driftgen.ops.dispatch import without_kernels
from tests.support import twin
from tests.support.fault_search import Counts, Fault, chosen, main, reproduction

LIMIT = 1e-3
ROUNDING = 1e-12  # relative to the extent of a problem
TINY = 1e-37
HUGE = 3e38
CANCELLED = 1e-2
MAX_LOGIT = 1e9
MAX_EXPONENT = 40.0
# Cases of each target. The interpreter takes ten times as long as PyTorch: fewer cases for the kernels.
SHARES = {"field": 5, "loss": 5, "fused": 1}

KERNELS = ("laplace", "laplace", "gaussian", "inverse_multiquadric")
NORMALIZATIONS = ("both", "both", "y", "none")
FACTORS = ((1.0, 1.0), (1.0, 1.0), (1.5, 1.0), (0.0, 1.0), (1.0, 0.0))
LAYOUTS = ("random", "offset", "clusters", "apart", "duplicates", "outlier", "equal", "near")
WEIGHTS = (None, None, "mild", "zeros", "wide")
TEMPERATURES = ((0.02, 0.05, 0.2), (0.02,), (1e-3,), (0.3,), (1.0, 50.0), (1e-5, 1.0), (1e4,))
SIZES = {"n": (1, 2, 3, 5, 8, 17), "p": (1, 2, 5, 16), "m": (0, 0, 1, 4), "width": (1, 2, 3, 8, 33)}


@dataclass(frozen=True)
class Case:
    """Choices of one case. ``far`` is the size of offsets, gaps and outliers in units of the spread."""

    target: str  # field, loss or fused
    groups: int
    n: int
    p: int
    m: int
    width: int
    scale: float
    layout: str
    far: float
    weights: str | None
    dtype: torch.dtype
    temperatures: tuple[float, ...]
    kernel: str
    normalization: str
    factors: tuple[float, float]
    convention: str
    normalize_features: bool
    normalize_drift: bool
    seed: int

    def __str__(self):
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return "Case(" + ", ".join(f"{name}={value!r}" for name, value in values) + ")"


def draw_case(pick, targets=("field", "loss")):
    """Draw a case. ``pick`` chooses one of its arguments."""
    target = pick(targets)
    fused = target == "fused"
    powers = (-3, 0, 0, 3, 8) if fused else (-30, -20, -12, -4, 0, 0, 0, 4, 12, 20, 30)
    return Case(
        target=target,
        groups=1 if target == "field" else pick((1, 1, 2, 3)),
        **{name: pick(sizes) for name, sizes in SIZES.items()},
        scale=10.0 ** pick(powers),
        layout=pick(LAYOUTS),
        far=pick((10.0, 1e3, 1e5) if fused else (10.0, 1e3, 1e5, 1e7)),
        weights=pick(WEIGHTS[:4] if fused else WEIGHTS),
        dtype=torch.float32 if fused else pick((torch.float32, torch.float32, torch.float64, torch.bfloat16)),
        temperatures=pick(TEMPERATURES),
        kernel=pick(KERNELS),
        normalization=pick(NORMALIZATIONS[: 3 if fused else None]),
        factors=pick(FACTORS),
        convention=pick(("release", "paper")),
        normalize_features=fused or pick((True, True, False)),
        normalize_drift=pick((True, True, False)),
        seed=pick(range(1000)),
    )


def samples(case):
    """Generated samples, negatives and positives of a case, ``[G, n, D]`` each, rounded to its dtype."""
    rng = np.random.default_rng(case.seed)
    sets = [rng.normal(size=(case.groups, k, case.width)) for k in (case.n, case.m, case.p)]
    direction = rng.normal(size=case.width)
    if case.layout == "offset":
        sets = [t + case.far * direction for t in sets]
    if case.layout == "clusters":
        sets = [t + case.far * direction * rng.integers(0, 3, (*t.shape[:2], 1)) for t in sets]
    if case.layout == "apart":
        sets[2] = sets[2] + 20 * direction
    if case.layout == "duplicates":
        for t in sets:
            t[:, 1::2] = t[:, : t.shape[1] // 2]
        sets[2][:, :2] = sets[0][:, :1]
    if case.layout == "outlier":
        sets[rng.choice((0, 2))][0, -1] *= case.far
    if case.layout == "equal":
        sets = [np.zeros_like(t) + direction for t in sets]
    if case.layout == "near":  # positives close to generated samples, whose spread is much larger
        sets[2] = sets[0][:, rng.integers(0, case.n, case.p)] + sets[2] / case.far
    return [torch.tensor(t * case.scale).to(case.dtype) for t in sets]


def weights(case):
    """Weights of the three sets, ``[G, n]`` each."""
    rng, shapes = np.random.default_rng(case.seed + 1), [(case.groups, k) for k in (case.n, case.m, case.p)]
    if case.weights is None:
        return [np.ones(shape) for shape in shapes]
    drawn = [rng.uniform(0.2, 2, shape) for shape in shapes]
    if case.weights == "wide":
        drawn = [10 ** rng.uniform(-6, 6, shape) for shape in shapes]
    if case.weights == "zeros":
        drawn = [w * rng.integers(0, 2, w.shape) for w in drawn]
        drawn[2][:, 0] = 1.0  # no group without any weight
    return [np.float64(np.float32(w)) for w in drawn]


@dataclass
class Outcome:
    """Largest error of a case relative to what is allowed to scale with, and what was wrong."""

    error: float = 0.0
    problems: list[str] = field(default_factory=list)

    def compare(self, name, got, want, size, least=0.0):
        """Compare values, or vectors if sizes are scalars of vectors, up to an absolute error ``least``."""
        got, want = np.float64(got), np.float64(want)
        difference = np.abs(got - want)
        if difference.ndim > np.ndim(size):
            difference = np.linalg.norm(difference, axis=-1)
        if not np.isfinite(difference).all():
            self.problems.append(f"{name} is not finite")
            return
        excess = np.maximum(difference - least, 0)
        error = np.divide(excess, size, out=np.where(excess > 0, np.inf, 0.0), where=np.asarray(size) > 0)
        self.add(name, float(error.max(initial=0.0)))

    def add(self, name, error, limit=LIMIT):
        self.error = max(self.error, error * LIMIT / limit)
        if not error <= limit:
            self.problems.append(f"{name} is off by {error:.2g}")


def check(case):
    """Run one case. Return its outcome, or None if it belongs to an excluded class."""
    with np.errstate(over="ignore", under="ignore"):
        return check_field(case) if case.target == "field" else check_loss(case)


def check_field(case):
    x, neg, pos = (t[0] for t in samples(case))
    _, wn, wp = (w[0] for w in weights(case))
    temperature = float(np.clip(case.temperatures[0] * case.scale, 1e-30, 1e30))
    options = {"temperature": temperature, "kernel": case.kernel, "normalization": case.normalization}
    options |= dict(zip(("attraction", "repulsion"), case.factors, strict=True))
    arrays = [t.double().numpy() for t in (x, pos, neg)]
    negatives, wn = (neg, wn) if case.m else (None, None)
    if beyond_float64(case, arrays, temperature):
        return None
    exact = twin.log_field(*arrays[:2], arrays[2] if case.m else None, wp=wp, wn=wn, **options)
    want, terms = (t * np.exp(exact.log_factor)[:, None] for t in (exact.values, exact.terms[:, None]))
    outcome = Outcome()
    named = {"positive_weight": wp} | ({} if wn is None else {"negative_weight": wn})
    named = {name: torch.tensor(w, dtype=torch.float32) for name, w in named.items()} if case.weights else {}
    try:
        got = dg.drift_field(x, pos, negatives, **options, **named)
    except dg.InputError as error:
        if not np.abs(want).max() > HUGE:
            outcome.problems.append(f"InputError: {error}")
        return outcome
    outcome.compare("V", got.numpy(), want, terms[:, 0], TINY * math.sqrt(case.width))
    return outcome


def beyond_float64(case, arrays, *units):
    """True if logits are so large that the twin has no digits left."""
    extent = max(np.abs(t - arrays[0].reshape(-1, case.width)[0]).max(initial=0) for t in arrays)
    ratio = extent * math.sqrt(case.width) / math.prod(units)
    return ratio > 1e15 or -twin.KERNELS[case.kernel](ratio, 1.0) > MAX_LOGIT


def check_loss(case):
    gen, neg, pos = samples(case)
    wg, wn, wp = weights(case)
    unit = 1.0 if case.normalize_features else case.scale
    temperatures = tuple(float(np.clip(t * unit, 1e-30, 1e30)) for t in case.temperatures)
    loss = dg.DriftingLoss(
        temperatures, case.kernel, case.normalization, *case.factors, case.normalize_features,
        case.normalize_drift, case.convention,
    )  # fmt: skip
    arrays = [t.double().numpy() for t in (gen, pos, neg)]
    exact = exact_loss(case, arrays, temperatures, (wg, wn, wp), guarded=loss.settings.guards.min_scale > 0)
    if exact is None:
        return None
    outcome, leaf = Outcome(), gen.clone().requires_grad_()
    named = {"generated_weight": wg, "positive_weight": wp} | ({"negative_weight": wn} if case.m else {})
    named = {name: torch.tensor(w, dtype=torch.float32) for name, w in named.items()} if case.weights else {}
    # Sums of distances overflow a little earlier than their mean.
    largest = max(np.abs(t).max(initial=0) for t in arrays) * math.sqrt(case.width)
    overflows = not max(100 * largest, exact.per_group.max()) <= HUGE
    try:
        with kernels() if case.target == "fused" else without_kernels():
            out = loss(leaf, pos, neg if case.m else None, **named)
            out.per_group.sum().backward()
    except dg.InputError as error:
        if not overflows:
            outcome.problems.append(f"InputError: {error}")
        return outcome
    outcome.compare("scale", out.scale, exact.scale, exact.scale, TINY)
    results = out.loss, out.per_group, leaf.grad
    if not all(t.isfinite().all() for t in results):
        outcome.problems.append("loss or gradient is not finite")
        return outcome
    if case.target == "fused" and thin_set(case, (wg, wn, wp), guarded=loss.settings.guards.min_scale > 0):
        return outcome
    # The drifts of several temperatures may cancel too.
    whole = np.linalg.norm(exact.gradient) / max(np.linalg.norm(exact.terms), 1e-300)
    if min(exact.cancellation, whole) < CANCELLED:
        return outcome
    return compare_loss(case, outcome, out, leaf.grad, exact)


def thin_set(case, weights, guarded):
    """True if weights let positives or negatives be so far away that normalized drifts underflow."""
    if case.weights is None or guarded or not case.normalize_drift:
        return False
    generated, negatives, positives = (w.sum(1) for w in weights)
    others = generated - weights[0].max(1) + negatives  # a sample is no negative of itself
    smaller = np.minimum(positives, others)
    farthest = ((generated + negatives + positives) / np.maximum(smaller, 1e-30)).max()
    return twin.KERNELS[case.kernel](farthest, min(case.temperatures)) < -MAX_EXPONENT


def compare_loss(case, outcome, out, gradient, exact):
    drift = np.where(exact.drift > HUGE, np.inf, exact.drift)
    finite = np.isfinite(drift) & np.isfinite(out.drift.double().numpy())
    sizes = drift + error_of_square(drift, exact.drift_floors)
    outcome.compare("drift", out.drift.numpy()[finite], drift[finite], sizes[finite], 10 * TINY)
    sizes = exact.per_group.max() + error_of_square(exact.per_group, exact.loss_floors)
    outcome.compare("loss", out.per_group.detach().numpy(), exact.per_group, sizes, 10 * TINY)
    got, want = gradient.double().numpy(), exact.gradient
    masked = 1e-8 if case.target == "fused" else 0.0
    least = (TINY + (TINY + masked) * np.abs(want).max()) * math.sqrt(case.width)
    if case.dtype == torch.bfloat16:
        least = least + 2**-7 * np.linalg.norm(want, axis=-1)
    if np.abs(want).max() < 1e36:
        outcome.compare("gradient", got, want, exact.terms, least)
    return outcome


def error_of_square(square, floor):
    """Return the error of ‖V‖², in units of LIMIT, for an error of LIMIT · floor of V: 2 ‖V‖ ‖δ‖ + ‖δ‖²."""
    return 2 * np.sqrt(square) * floor + LIMIT * floor**2


def exact_loss(case, arrays, temperatures, weights, guarded):
    """Results of the twin, or None if its logits are too large."""
    common = {"attraction": case.factors[0], "repulsion": case.factors[1]}
    common |= {"normalize_drift": case.normalize_drift}
    rounding = ROUNDING
    if guarded:
        return twin.release(*arrays, temperatures, *weights, rounding=rounding, **common)
    common |= {"multiplicity": case.convention == "paper", "kernel": case.kernel}
    common |= {"normalization": case.normalization, "normalize_features": case.normalize_features}
    exact = twin.paper(*arrays, temperatures, *weights, rounding=rounding, **common)
    unit = (exact.scale or 1.0) if case.normalize_features else 1.0
    if beyond_float64(case, arrays, min(temperatures), unit):
        return None
    if case.target == "fused" and case.kernel == "gaussian":
        rounding = max(rounding, 2**-21 * farthest_logit(arrays, min(temperatures) * unit) / LIMIT)
        exact = twin.paper(*arrays, temperatures, *weights, rounding=rounding, **common)
    return exact


def farthest_logit(arrays, temperature):
    """Return the largest −log k of a generated sample and its nearest other sample, for a Gaussian kernel."""
    nearest = 0.0
    for gen, *others in zip(*arrays, strict=True):
        d = twin.distances(gen, np.concatenate([gen, *others]))
        np.fill_diagonal(d, np.inf)
        nearest = max(nearest, d.min(1).max())
    return -twin.KERNELS["gaussian"](nearest, temperature)


@contextmanager
def kernels():
    """Run the fused kernels, on a CPU in Triton's interpreter. Warnings name calls they do not support."""
    devices, dispatch.DEVICES = dispatch.DEVICES, {"cpu", "cuda"}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DriftingLoss runs in plain PyTorch")
            yield
    finally:
        dispatch.DEVICES = devices


def search(seed, only, seconds):
    """Check random cases; ``only`` selects targets. Each case has a seed of its own."""
    targets = chosen(SHARES, only)
    if "fused" in targets and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    drawn = [target for target in targets for _ in range(SHARES[target])]
    while True:
        rng, start = np.random.default_rng(seed), time.perf_counter()
        case = draw_case(lambda choices, rng=rng: choices[rng.integers(len(choices))], drawn)
        outcome = check(case)
        counts = Counts(tried=1)
        counts.took(time.perf_counter() - start)
        counts.kinds["excluded" if outcome is None else case.target] += 1
        if outcome is not None and outcome.problems:
            again = reproduction("tests.support.fuzz", seed, only)
            counts.faults.append(Fault(f"{'; '.join(outcome.problems)}: seed {seed}, {case}", again))
        elif outcome is not None:
            counts.largest["relative error"] = outcome.error
        yield counts
        seed += 1


if __name__ == "__main__":
    main(search)
