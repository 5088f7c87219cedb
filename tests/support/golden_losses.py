"""Golden cases of the loss, and results of the loss and its float64 twin."""

import json
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "01_drift_loss.npz")
CASES = {c["key"]: c for c in json.loads((DATA / "01_drift_loss.json").read_text())["cases"]}


def samples(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def deviation(got, want):
    """Largest error relative to the largest value."""
    want = np.asarray(want, np.float64)
    return np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1e-30)


def results(loss, gen, pos, neg=None, **weights):
    """Return per-group loss, scale, drift, and the gradient of the summed per-group loss."""
    gen = gen.clone().requires_grad_()
    out = loss(gen, pos, neg, **weights)
    out.per_group.sum().backward()
    return [t.detach().float().numpy() for t in (out.per_group, out.scale, out.drift, gen.grad)]


def exact(function, gen, pos, neg, temperatures, wn=None, **options):
    """Return the four results of the twin, with weights of the negatives only."""
    groups = len(gen)
    neg = np.zeros((groups, 0, gen.shape[2])) if neg is None else neg.double().numpy()
    wn = np.ones(neg.shape[:2]) if wn is None else wn.numpy()
    ones = [np.ones(t.shape[:2]) for t in (gen, pos)]
    return function(gen.double().numpy(), pos.double().numpy(), neg, temperatures, ones[0], wn, ones[1],
    **options)  # fmt: skip


def golden_inputs(key):
    dtype = torch.bfloat16 if CASES[key]["dtype"].startswith("bfloat16") else torch.float32
    gen, pos, neg = (
        torch.tensor(GOLDEN[f"{key}_{k}"]).to(dtype) if f"{key}_{k}" in GOLDEN else None
        for k in ("gen", "pos", "neg")
    )
    wn = torch.tensor(GOLDEN[f"{key}_wn"]) if f"{key}_wn" in GOLDEN else None
    return gen, pos, neg, wn
