"""Options and tensor names of a released generator, and those of :class:`driftgen.generators.DiT`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftgen.errors import InputError
from driftgen.generators.dit import DiTConfig

__all__ = ["official_dit_config", "official_dit_names", "official_dit_options"]

# Options that mean the same under both names. The release has others that do not change the function.
SAME_OPTIONS = {
    "input_size": "input_size",
    "in_channels": "in_channels",
    "patch_size": "patch_size",
    "hidden_size": "hidden_size",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "num_classes": "num_classes",
    "n_cls_tokens": "context_tokens",
    "use_rope": "rope",
    "attn_fp32": "attention_float32",
}
OTHER_OPTIONS = ("noise_coords", "noise_classes", "use_qknorm", "use_swiglu", "use_rmsnorm")


def official_dit_options(config: DiTConfig) -> dict[str, Any]:
    """Return the release's ``model_config`` of a generator."""
    if config.mlp == "gelu_tanh":
        raise InputError("mlp='gelu_tanh' has no released form: only 'swiglu' and 'gelu' have")
    if config.qk_norm not in ("none", config.norm):
        raise InputError(
            f"qk_norm={config.qk_norm!r} with norm={config.norm!r} has no released form: qk_norm must be "
            f"{config.norm!r} or 'none'"
        )
    return {theirs: getattr(config, ours) for theirs, ours in SAME_OPTIONS.items()} | {
        "noise_coords": config.style_codebooks,
        "noise_classes": config.style_entries if config.style_codebooks else 0,
        "use_qknorm": config.qk_norm != "none",
        "use_swiglu": config.mlp == "swiglu",
        "use_rmsnorm": config.norm == "rms",
        "cond_dim": config.condition_width,
        "out_channels": config.in_channels,
    }


def official_dit_config(options: Mapping[str, Any]) -> DiTConfig:
    """Return the configuration for the ``model_config`` of a released generator."""
    missing = sorted({*SAME_OPTIONS, *OTHER_OPTIONS} - set(options))
    if missing:
        raise InputError(f"model_config lacks {', '.join(missing)}")
    if options.get("out_channels", options["in_channels"]) != options["in_channels"]:
        raise InputError(
            f"model_config: out_channels={options['out_channels']} differs from "
            f"in_channels={options['in_channels']}, which is not supported"
        )
    norm = "rms" if options["use_rmsnorm"] else "layer"
    styles: dict[str, Any] = {"style_codebooks": 0}
    if options["noise_classes"]:
        styles = {"style_codebooks": options["noise_coords"], "style_entries": options["noise_classes"]}
    return DiTConfig(
        **{ours: options[theirs] for theirs, ours in SAME_OPTIONS.items()},
        **styles,
        norm=norm,
        qk_norm=norm if options["use_qknorm"] else "none",
        mlp="swiglu" if options["use_swiglu"] else "gelu",
        condition_size=options.get("cond_dim"),
    )


def official_dit_names(config: DiTConfig) -> dict[str, str]:
    """Map the release's name of every tensor of a generator to the key of our ``state_dict``."""
    names = {
        "Embed_0/embedding": "conditioning.classes.weight",
        "RMSNorm_0/weight": "conditioning.alpha.norm.weight",
        "LightningDiT_0/pos_embed": "positions",
    }
    linears = {
        "TimestepEmbedder_0/TorchLinear_0": "conditioning.alpha.first",
        "TimestepEmbedder_0/TorchLinear_1": "conditioning.alpha.second",
        "LightningDiT_0/TorchLinear_0": "patch_embedding",
        "LightningDiT_0/FinalLayer_0/TorchLinear_0": "final.modulation",
        "LightningDiT_0/FinalLayer_0/TorchLinear_1": "final.output",
    }
    if config.norm == "rms":
        names["LightningDiT_0/FinalLayer_0/RMSNorm_0/weight"] = "final.norm.weight"
    if config.context_tokens:
        names["LightningDiT_0/cls_embed"] = "context"
        linears["LightningDiT_0/TorchLinear_1"] = "context_projection"
    for i in range(config.style_codebooks):
        names[f"noise_embeds_{i}/embedding"] = f"conditioning.styles.{i}.weight"
    for i in range(config.depth):
        theirs, ours = f"LightningDiT_0/blocks_{i}", f"blocks.{i}"
        if config.norm == "rms":
            names[f"{theirs}/RMSNorm_0/weight"] = f"{ours}.attention_norm.weight"
            names[f"{theirs}/RMSNorm_1/weight"] = f"{ours}.mlp_norm.weight"
        for short, long in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            if config.qk_norm == "rms":
                names[f"{theirs}/Attention_0/{short}/weight"] = f"{ours}.attention.{long}.weight"
            elif config.qk_norm == "layer":
                names[f"{theirs}/Attention_0/{short}/scale"] = f"{ours}.attention.{long}.weight"
                names[f"{theirs}/Attention_0/{short}/bias"] = f"{ours}.attention.{long}.bias"
        linears[f"{theirs}/Attention_0/TorchLinear_0"] = f"{ours}.attention.qkv"
        linears[f"{theirs}/Attention_0/TorchLinear_1"] = f"{ours}.attention.output"
        if config.mlp == "swiglu":
            linears[f"{theirs}/SwiGLUFFN_0/TorchLinear_0"] = f"{ours}.mlp.gate"
            linears[f"{theirs}/SwiGLUFFN_0/TorchLinear_1"] = f"{ours}.mlp.value"
            linears[f"{theirs}/SwiGLUFFN_0/TorchLinear_2"] = f"{ours}.mlp.output"
        else:
            linears[f"{theirs}/StandardMLP_0/TorchLinear_0"] = f"{ours}.mlp.0"
            linears[f"{theirs}/StandardMLP_0/TorchLinear_1"] = f"{ours}.mlp.2"
        linears[f"{theirs}/TorchLinear_0"] = f"{ours}.modulation"
    for theirs, ours in linears.items():
        names[f"{theirs}/Dense_0/kernel"] = f"{ours}.weight"
        names[f"{theirs}/Dense_0/bias"] = f"{ours}.bias"
    return names
