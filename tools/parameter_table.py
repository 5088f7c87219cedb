"""The table of parameters in docs/models.md, counted from the code."""

from __future__ import annotations

import torch

from driftgen.features.resnet_mae import PRESETS as ENCODERS
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.dit import PRESETS as TRANSFORMERS
from driftgen.generators.dit import DiT
from driftgen.generators.unet import PRESETS as CONVOLUTIONAL
from driftgen.generators.unet import UNet2D
from driftgen.support.meta_init import on_meta_device
from tools.records import Results, markdown

__all__ = ["table"]

# In millions, from the paper's tables of results and of encoders.
PAPER = {"B/2": "133", "L/2": "463", "B/16": "134", "L/16": "464"}


def table(_: Results) -> str:
    """Return a Markdown table with one row for each preset, counted on the meta device."""
    rows = []
    with on_meta_device():
        for name in TRANSFORMERS:
            net = DiT.preset(name)
            c = net.config
            shape = f"{c.input_size}×{c.input_size}×{c.in_channels}"
            paper = f"{PAPER[name]}M" if name in PAPER else ""
            rows.append((f"`DiT.preset({name!r})`", shape, f"{count(net):.1f}M", paper))
        for name in CONVOLUTIONAL:
            unet = UNet2D.preset(name)
            u = unet.config
            shape = f"{u.input_size}×{u.input_size}×{u.in_channels}"
            rows.append((f"`UNet2D.preset({name!r})`", shape, f"{count(unet):.1f}M", ""))
        for name in ENCODERS:
            mae = ResNetMAE.preset(name)
            whole, encoder = count(mae), count(mae.encoder)
            side = 32 * mae.patchify
            shape = f"{side}×{side}×{mae.in_channels}"
            text = f"{encoder:.1f}M encoder, {whole:.1f}M with decoder and classifier"
            rows.append((f"`ResNetMAE.preset({name!r})`", shape, text, ""))
    return markdown(("model", "samples or input", "parameters", "the paper's"), rows)


def count(module: torch.nn.Module) -> float:
    """Return the number of parameters in millions."""
    return sum(p.numel() for p in module.parameters()) / 1e6
