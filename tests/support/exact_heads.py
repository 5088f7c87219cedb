"""Float64 queries, keys and values for the tests of attention."""

import torch


def exact_heads(cos, sin, heads):
    def function(qkv, *weights):
        *normed, value = qkv.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
        out = []
        for x, weight in zip(normed, weights, strict=True):
            y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            a, b = y.chunk(2, dim=-1)
            c, s = cos.to(x), sin.to(x)
            out.append(torch.cat([a * c - b * s, b * c + a * s], -1))
        return *out, value

    return function
