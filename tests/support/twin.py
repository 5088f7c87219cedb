"""Brute-force float64 twin of the field and the loss. Shares no code with the library."""

import numpy as np

KERNELS = {
    "laplace": lambda d, t: np.exp(-d / t),
    "gaussian": lambda d, t: np.exp(-(d**2) / (2 * t**2)),
    "inverse_multiquadric": lambda d, t: 1 / np.sqrt(1 + (d / t) ** 2),
}


def distances(x, y):
    out = np.zeros((len(x), len(y)))
    for i in range(len(x)):
        for j in range(len(y)):
            out[i, j] = np.sqrt(np.sum((x[i] - y[j]) ** 2))
    return out


def softmax(logits, axis):
    e = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def field(
    x,
    pos,
    neg=None,
    *,
    temperature,
    normalization="both",
    kernel="laplace",
    attraction=1.0,
    repulsion=1.0,
    wp=None,
    wn=None,
    multiplicity=False,
):
    """Algorithm 2 to the letter (1e6 on the self-distance) for one problem; weights after normalization.

    With ``multiplicity`` a weight counts copies: it also multiplies the terms of sums over y."""
    x, pos = np.asarray(x, np.float64), np.asarray(pos, np.float64)
    own = neg is None
    neg = x if own else np.asarray(neg, np.float64)
    wp = np.ones(len(pos)) if wp is None else np.asarray(wp, np.float64)
    wn = np.ones(len(neg)) if wn is None else np.asarray(wn, np.float64)
    w = np.concatenate([wp, wn])
    dist = np.concatenate([distances(x, pos), distances(x, neg)], axis=1)
    masked = np.zeros(dist.shape, bool)
    if own:
        for i in range(len(x)):
            masked[i, len(pos) + i] = True
    if kernel == "laplace":
        logits = -np.where(masked, dist + 1e6, dist) / temperature
    else:
        logits = np.where(masked, -1e9, np.log(np.maximum(KERNELS[kernel](dist, temperature), 1e-300)))
    rows, columns = softmax(logits, 1), softmax(logits, 0)
    if multiplicity:
        e = np.exp(logits - logits.max(axis=1, keepdims=True))
        rows = e / (e * w).sum(axis=1, keepdims=True)
    k = np.exp(logits)
    for _ in range(3000 if normalization == "sinkhorn" else 0):
        k = k / k.sum(axis=0, keepdims=True)
        k = k / k.sum(axis=1, keepdims=True)
    a = {"both": np.sqrt(rows * columns), "y": rows}.get(normalization, k) * w
    a_pos, a_neg = a[:, : len(pos)], a[:, len(pos) :]
    v = np.zeros_like(x)
    for i in range(len(x)):
        plus = sum(a_pos[i, j] * (pos[j] - x[i]) for j in range(len(pos))) * a_neg[i].sum()
        minus = sum(a_neg[i, j] * (neg[j] - x[i]) for j in range(len(neg))) * a_pos[i].sum()
        v[i] = attraction * plus - repulsion * minus
    return v


def mmd(x, pos, temperature, kernel):
    """−½ times the gradient of 2 E ξ(x, x') − 2 E ξ(x, y); a sample exerts no force on itself."""
    x, pos = np.asarray(x, np.float64), np.asarray(pos, np.float64)
    v = np.zeros_like(x)
    for i in range(len(x)):
        for sign, others in ((1, pos), (-1, x)):
            for y in others:
                d = np.sqrt(np.sum((y - x[i]) ** 2))
                unit = temperature if kernel == "gaussian" else d
                if d > 0:
                    v[i] += (
                        sign
                        * KERNELS[kernel](d, temperature)
                        * (y - x[i])
                        / (unit * temperature)
                        / len(others)
                    )
    return v


def release_loss(gen, pos, neg, temperatures, wg, wn, wp):
    """Arithmetic of the released code in float64 on [B, n, D] arrays.

    Returns per-group loss, scale, drift, and the gradient of the summed loss.
    """
    gen, pos, neg = (np.asarray(a, np.float64) for a in (gen, pos, neg))
    y, w = np.concatenate([gen, neg, pos], 1), np.concatenate([wg, wn, wp], 1)
    n, width, m = gen.shape[1], gen.shape[2], gen.shape[1] + neg.shape[1]
    d = np.stack([np.maximum(distances(g, t), 1e-4) for g, t in zip(gen, y, strict=True)])
    scale = (d * w[:, None]).mean() / w.mean()
    unit = max(scale / np.sqrt(width), 1e-3)
    dn = d / max(scale, 1e-3)
    for i in range(n):
        dn[:, i, i] += 100
    total, drift = 0, []
    for t in temperatures:
        a = np.sqrt(np.maximum(softmax(-dn / t, 2) * softmax(-dn / t, 1), 1e-6)) * w[:, None]
        a_neg, a_pos = a[:, :, :m], a[:, :, m:]
        c = np.concatenate([-a_neg * a_pos.sum(2, keepdims=True), a_pos * a_neg.sum(2, keepdims=True)], 2)
        v = np.einsum("bij,bijd->bid", c, (y[:, None] - gen[:, :, None]) / unit)
        drift.append((v**2).mean())
        total = total + v / np.sqrt(max(drift[-1], 1e-8))
    return (total**2).mean((1, 2)), scale, np.array(drift), -2 * total / (n * width * unit)


def paper_loss(gen, pos, neg, temperatures, wg, wn, wp, kernel="laplace", normalization="both"):
    """Algorithm 2 with S_j and lambda_j of the appendix, in float64. Returns the same as ``release_loss``."""
    gen, pos, neg = (np.asarray(a, np.float64) for a in (gen, pos, neg))
    groups, n, width = gen.shape
    d = np.stack([np.concatenate([distances(g, g), distances(g, m), distances(g, p)], 1)
                  for g, m, p in zip(gen, neg, pos, strict=True)])  # fmt: skip
    w = np.concatenate([wg, wn, wp], 1)
    scale = (d * w[:, None]).sum() / (n * w.sum())
    s = scale / np.sqrt(width)
    total, drift = 0, []
    for t in temperatures:
        v = []
        for g in range(groups):
            # Negatives are x and further samples, for which `field` has no mask.
            v.append(_masked_field(gen[g] / s, pos[g] / s, neg[g] / s, t * np.sqrt(width), wg[g], wn[g],
                                   wp[g], kernel, normalization))  # fmt: skip
        v = np.stack(v)
        drift.append((v**2).mean())
        total = total + v / np.sqrt(drift[-1])
    return (total**2).mean((1, 2)), scale, np.array(drift), -2 * total / (n * width * s)


def _masked_field(x, pos, extra, temperature, wg, wn, wp, kernel, normalization):
    y = np.concatenate([pos, x, extra])
    w = np.concatenate([wp, wg, wn])
    d = distances(x, y)
    k = KERNELS[kernel](d, temperature)
    for i in range(len(x)):
        k[i, len(pos) + i] = 0.0
    rows = k / (k * w).sum(1, keepdims=True)
    columns = k / k.sum(0, keepdims=True)
    a = {"both": np.sqrt(rows * columns), "y": rows, "none": k}[normalization] * w
    a_pos, a_neg = a[:, : len(pos)], a[:, len(pos) :]
    w_pos, w_neg = a_pos * a_neg.sum(1, keepdims=True), a_neg * a_pos.sum(1, keepdims=True)
    return w_pos @ pos - w_neg @ np.concatenate([x, extra])
