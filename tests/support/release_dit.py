"""Float64 twin of the released generator, in NumPy and by the release's parameter names (METHOD 25-31a)."""

import math

import numpy as np

erf = np.vectorize(math.erf)


def release_samples(parameters, options, x, labels, alpha, style):
    """Samples ``[B, H, W, C]`` for noise x ``[B, H, W, C]``; shares no code with the library."""
    p = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    condition = _condition(p, options, labels, alpha, style)
    patch, h = options["patch_size"], options["hidden_size"]
    b, side, channels = len(x), x.shape[1] // patch, x.shape[3]
    tokens = x.reshape(b, side, patch, side, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    tokens = _linear(p, "LightningDiT_0/TorchLinear_0", tokens.reshape(b, side * side, -1))
    tokens = tokens + p["LightningDiT_0/pos_embed"]
    context = options["n_cls_tokens"]
    if context:
        first = _linear(p, "LightningDiT_0/TorchLinear_1", condition)[:, None] + p["LightningDiT_0/cls_embed"]
        tokens = np.concatenate([first, tokens], axis=1)
    for i in range(options["depth"]):
        tokens = _block(p, f"LightningDiT_0/blocks_{i}", options, tokens, _silu(condition))
    name = "LightningDiT_0/FinalLayer_0"
    shift, scale = np.split(_linear(p, f"{name}/TorchLinear_0", _silu(condition))[:, None], 2, axis=-1)
    normed = _norm(p, f"{name}/RMSNorm_0", options, tokens[:, context:])
    out = _linear(p, f"{name}/TorchLinear_1", normed * (1 + scale) + shift)
    assert tokens.shape[-1] == h
    out = out.reshape(b, side, side, patch, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(x.shape)


def _condition(p, options, labels, alpha, style):
    angles = alpha[:, None] * np.exp(np.arange(128) * (-np.log(10_000) / 128))
    waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    hidden = _silu(_linear(p, "TimestepEmbedder_0/TorchLinear_0", waves))
    hidden = _linear(p, "TimestepEmbedder_0/TorchLinear_1", hidden)
    hidden = hidden / np.sqrt(np.mean(hidden**2, -1, keepdims=True) + 1e-6) * p["RMSNorm_0/weight"]
    total = p["Embed_0/embedding"][labels] + 0.02 * hidden
    for i in range(options["noise_coords"] if options["noise_classes"] else 0):
        total = total + p[f"noise_embeds_{i}/embedding"][style[:, i]]
    assert total.shape[1] == options["cond_dim"]
    return total


def _block(p, name, options, x, condition):
    parts = np.split(_linear(p, f"{name}/TorchLinear_0", condition)[:, None], 6, axis=-1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    normed = _norm(p, f"{name}/RMSNorm_0", options, x) * (1 + scale) + shift
    x = x + gate * _attention(p, f"{name}/Attention_0", options, normed)
    normed = _norm(p, f"{name}/RMSNorm_1", options, x) * (1 + mlp_scale) + mlp_shift
    if options["use_swiglu"]:
        gated, value, last = (f"{name}/SwiGLUFFN_0/TorchLinear_{i}" for i in range(3))
        return x + mlp_gate * _linear(p, last, _silu(_linear(p, gated, normed)) * _linear(p, value, normed))
    hidden = _linear(p, f"{name}/StandardMLP_0/TorchLinear_0", normed)
    hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
    return x + mlp_gate * _linear(p, f"{name}/StandardMLP_0/TorchLinear_1", hidden)


def _attention(p, name, options, x):
    b, tokens, h = x.shape
    heads = options["num_heads"]
    qkv = _linear(p, f"{name}/TorchLinear_0", x).reshape(b, tokens, 3, heads, h // heads)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    if options["use_qknorm"]:
        q, k = (
            _norm(p, f"{name}/{n}", options, t)
            if options["use_rmsnorm"]
            else _affine_norm(p, f"{name}/{n}", t)
            for n, t in (("q_norm", q), ("k_norm", k))
        )
    if options["use_rope"]:
        q, k = _rotate(q), _rotate(k)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(h // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ v
    return _linear(p, f"{name}/TorchLinear_1", mixed.transpose(0, 2, 1, 3).reshape(b, tokens, h))


def _rotate(x):
    head = x.shape[-1]
    angles = np.arange(x.shape[-2])[:, None] * 10_000.0 ** (-np.arange(0, head, 2) / head)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def _norm(p, name, options, x):
    if options["use_rmsnorm"]:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * p[f"{name}/weight"]
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt(np.mean(centered**2, -1, keepdims=True) + 1e-6)


def _affine_norm(p, name, x):
    return _norm(p, name, {"use_rmsnorm": False}, x) * p[f"{name}/scale"] + p[f"{name}/bias"]


def _linear(p, name, x):
    return x @ p[f"{name}/Dense_0/kernel"] + p[f"{name}/Dense_0/bias"]


def _silu(x):
    return x / (1 + np.exp(-x))
