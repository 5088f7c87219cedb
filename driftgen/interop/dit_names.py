"""Where each option and each tensor of a released generator goes in :class:`driftgen.generators.DiT`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftgen.errors import InputError
from driftgen.generators.dit import DiTConfig

__all__ = ["official_dit_config", "official_dit_names", "official_dit_options"]

# Our name of each option of a released generator; what is not listed does not change the function computed.
GENERATOR_OPTIONS = {
    "input_size": "input_size",
    "in_channels": "in_channels",
    "patch_size": "patch_size",
    "hidden_size": "hidden_size",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "num_classes": "num_classes",
    "n_cls_tokens": "context_tokens",
    "noise_coords": "style_codebooks",
    "noise_classes": "style_entries",
    "use_qknorm": "qk_norm",
    "use_swiglu": "swiglu",
    "use_rope": "rope",
    "use_rmsnorm": "rms_norm",
    "attn_fp32": "attention_float32",
}


def official_dit_options(config: DiTConfig) -> dict[str, Any]:
    """The release's ``model_config`` of a generator."""
    options = {theirs: getattr(config, ours) for theirs, ours in GENERATOR_OPTIONS.items()}
    return {**options, "cond_dim": config.hidden_size, "out_channels": config.in_channels}


def official_dit_config(options: Mapping[str, Any]) -> DiTConfig:
    """Our configuration for the ``model_config`` of a released generator."""
    missing = sorted(set(GENERATOR_OPTIONS) - set(options))
    if missing:
        raise InputError(f"model_config lacks {', '.join(missing)}")
    for theirs, same_as in (("cond_dim", "hidden_size"), ("out_channels", "in_channels")):
        if options.get(theirs, options[same_as]) != options[same_as]:
            raise InputError(
                f"model_config: {theirs}={options[theirs]} differs from {same_as}: not supported"
            )
    for option in ("use_swiglu", "use_rmsnorm", "use_qknorm"):
        if not options[option]:
            raise InputError(f"model_config: {option}=false: no released model is built so")
    return DiTConfig(**{ours: options[theirs] for theirs, ours in GENERATOR_OPTIONS.items()})


def official_dit_names(config: DiTConfig) -> dict[str, str]:
    """The release's name of every tensor of a generator, and ours."""
    names = {
        "Embed_0/embedding": "conditioning.classes.weight",
        "RMSNorm_0/weight": "conditioning.alpha.norm.weight",
        "LightningDiT_0/cls_embed": "context",
        "LightningDiT_0/pos_embed": "positions",
        "LightningDiT_0/FinalLayer_0/RMSNorm_0/weight": "final.norm.weight",
    }
    linears = {
        "TimestepEmbedder_0/TorchLinear_0": "conditioning.alpha.first",
        "TimestepEmbedder_0/TorchLinear_1": "conditioning.alpha.second",
        "LightningDiT_0/TorchLinear_0": "patch_embedding",
        "LightningDiT_0/TorchLinear_1": "context_projection",
        "LightningDiT_0/FinalLayer_0/TorchLinear_0": "final.modulation",
        "LightningDiT_0/FinalLayer_0/TorchLinear_1": "final.output",
    }
    for i in range(config.style_codebooks):
        names[f"noise_embeds_{i}/embedding"] = f"conditioning.styles.{i}.weight"
    for i in range(config.depth):
        theirs, ours = f"LightningDiT_0/blocks_{i}", f"blocks.{i}"
        names[f"{theirs}/RMSNorm_0/weight"] = f"{ours}.attention_norm.weight"
        names[f"{theirs}/RMSNorm_1/weight"] = f"{ours}.mlp_norm.weight"
        names[f"{theirs}/Attention_0/q_norm/weight"] = f"{ours}.attention.query_norm.weight"
        names[f"{theirs}/Attention_0/k_norm/weight"] = f"{ours}.attention.key_norm.weight"
        linears[f"{theirs}/Attention_0/TorchLinear_0"] = f"{ours}.attention.qkv"
        linears[f"{theirs}/Attention_0/TorchLinear_1"] = f"{ours}.attention.output"
        linears[f"{theirs}/SwiGLUFFN_0/TorchLinear_0"] = f"{ours}.mlp.gate"
        linears[f"{theirs}/SwiGLUFFN_0/TorchLinear_1"] = f"{ours}.mlp.value"
        linears[f"{theirs}/SwiGLUFFN_0/TorchLinear_2"] = f"{ours}.mlp.output"
        linears[f"{theirs}/TorchLinear_0"] = f"{ours}.modulation"
    for theirs, ours in linears.items():
        names[f"{theirs}/Dense_0/kernel"] = f"{ours}.weight"
        names[f"{theirs}/Dense_0/bias"] = f"{ours}.bias"
    return names
