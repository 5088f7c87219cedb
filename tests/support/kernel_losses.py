"""Inputs of the loss for its GPU kernels, and their results against the float64 twin."""

import numpy as np
import torch

import driftgen as dg
from tests.support import twin
from tests.support.accuracy import error
from tests.support.interpreter import DEVICE

LIFT = 2**10
# Maximum relative errors.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 1e-3}
KINDS = ["random", "offset", "far", "clustered", "duplicate", "outlier"]


def samples(kind, sizes, width, groups=2, dtype=torch.float32, seed=0):
    """Draw generated, negatives and positives ``[groups, n, width]``, rounded to the dtype."""
    rng = np.random.default_rng(seed)
    offset, centers = 30 * rng.normal(size=width), rng.normal(size=(3, width))
    out = []
    for number, n in enumerate(sizes):
        x = rng.normal(size=(groups, n, width)) + 0.3 * number
        if kind == "offset":
            x += offset
        if kind == "far":
            x += 200
        if kind == "clustered":
            x = centers[rng.integers(0, 3, (groups, n))] + 1e-2 * x
        if kind == "duplicate":
            x[:, 1::2] = x[:, : n // 2]
            if number:
                x[:, :4] = out[0][:, :1]
        if kind == "outlier":
            x[0, -1] *= 1e4
        out.append(x)
    return [torch.tensor(x).to(dtype) for x in out]


def run(loss, gen, pos, neg=None, **weights):
    gen = gen.to(DEVICE).clone().requires_grad_()
    out = loss(gen, pos.to(DEVICE), None if neg is None else neg.to(DEVICE), **weights)
    # A scaled loss, as in mixed precision: float16 underflows at 6e-8.
    (gradient,) = torch.autograd.grad(LIFT * out.loss, gen)
    return out, gradient.double() / LIFT


def compare(gen, pos, neg, exact, weights=None, **options):
    """Compare the kernels with the twin on inputs rounded to the dtype."""
    dtype, groups = gen.dtype, gen.shape[0]
    sizes = [gen.shape[1], 0 if neg is None else neg.shape[1], pos.shape[1]]
    wg, wn, wp = weights or [np.ones((groups, n)) for n in sizes]
    loss = dg.DriftingLoss(**options)
    named = {}
    if weights:
        named = {
            "generated_weight": wg,
            "positive_weight": wp,
            **({} if neg is None else {"negative_weight": wn}),
        }
        named = {k: torch.tensor(w, dtype=torch.float32) for k, w in named.items()}
    out, gradient = run(loss, gen, pos, neg, **named)
    empty = torch.zeros(groups, 0, gen.shape[2])
    per_group, scale, drift, expected = exact(
        gen.double(), pos.double(), (empty if neg is None else neg).double(), loss.temperatures, wg, wn, wp
    )
    assert error(out.scale, scale) < ALLOWED[dtype]
    assert error(out.drift, drift) < ALLOWED[dtype]
    assert error(out.per_group, per_group) < ALLOWED[dtype]
    assert error(out.loss, np.mean(per_group)) < ALLOWED[dtype]
    # Rounding a few gradients to 16 bits alone may exceed the allowed error.
    rounded = (torch.tensor(expected) * LIFT / groups).to(dtype).double() / LIFT
    assert error(gradient * groups, expected) < max(ALLOWED[dtype], 1.2 * error(rounded * groups, expected))
    return out, gradient


def features(seed, n, dtype, requires=False):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 4), "b": (1, 4), "d": (1, 34)}
    out = {k: torch.randn(2, n, *s, generator=rng).to(dtype) + 0.1 * seed for k, s in shapes.items()}
    return {k: v.to(DEVICE).requires_grad_(requires) for k, v in out.items()}


def error_of_distant_clusters(convention, gap, sizes, width, temperatures=(0.02, 0.05, 0.2)):
    """Largest error of the loss and of the gradient of a sample, relative to the terms of their sums,
    Σ_j |C_ij| ‖y_j − x_i‖: clusters of spread 1, ``gap`` apart in every coordinate. The floor of affinities
    attracts and repels over the gap: drifts are up to 1,000 times smaller than their terms.
    """
    gen, neg, pos = samples("random", sizes, width, groups=1)
    for x in (gen, neg, pos):
        x[:, x.shape[1] // 2 :] += gap
    out, gradient = run(dg.DriftingLoss(temperatures, convention=convention), gen, pos, neg)
    weights = [np.ones((1, n)) for n in sizes]
    twins = {"release": twin.release, "paper": twin.paper}
    exact = twins[convention](gen, pos, neg, temperatures, *weights, rounding=0.0)
    off = np.linalg.norm(gradient.cpu().numpy() - exact.gradient, axis=-1) / exact.terms
    return max(float(off.max()), error(out.loss, exact.per_group.mean()) * exact.cancellation)
