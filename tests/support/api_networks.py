"""Calls of networks that work, and small networks for other calls."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import driftgen as dg
from driftgen.generators import Noise, PolicyNetwork
from tests.support.api_call import Call, Fresh, labels, make_call, randn
from tests.support.efficientnet_weights import efficientnet_state

STATE = "observation.state"

SMALL_DIT = {
    "input_size": 4, "in_channels": 1, "patch_size": 2, "hidden_size": 16, "depth": 1, "num_heads": 2,
    "mlp_ratio": 2.0, "num_classes": 3, "context_tokens": 2, "style_codebooks": 2, "style_entries": 4,
}  # fmt: skip
SMALL_GENERATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DiT": (
        dg.generators.DiT,
        SMALL_DIT | {"norm": "rms", "qk_norm": "rms", "mlp": "swiglu", "rope": True, "condition_size": 8},
    ),
    "ImageMLP": (
        dg.generators.ImageMLP,
        {"input_size": 4, "in_channels": 1, "hidden_size": 16, "depth": 1, "condition_size": 8,
         "num_classes": 3, "style_codebooks": 2, "style_entries": 4},
    ),
    "UNet2D": (
        dg.generators.UNet2D,
        {"input_size": 8, "in_channels": 1, "widths": (8, 8), "blocks": (1, 1), "attention_levels": (1,),
         "head_size": 8, "groups": 4, "condition_size": 8, "num_classes": 3, "style_codebooks": 2,
         "style_entries": 4},
    ),
    "ConvDecoder": (
        dg.generators.ConvDecoder,
        {"input_size": 8, "in_channels": 1, "num_classes": 3, "style_codebooks": 2, "style_entries": 4},
    ),
}  # fmt: skip
CHUNKS = {"widths": [16], "groups": 4, "kernel_size": 3}
CHUNK_OPTIONS: dict[str, dict[str, Any]] = {
    "UNet1D": CHUNKS,
    "ChunkTransformer": {"hidden_size": 16, "depth": 1, "heads": 2},
    "ChunkMLP": {"hidden_size": 16, "depth": 1},
}
STATISTICS = {"action": {"low": [0.0, -1.0], "high": [2.0, 1.0]}, STATE: {"low": [0.0], "high": [1.0]}}


@cache
def network(name: str) -> nn.Module:
    """Return a small network of a name."""
    torch.manual_seed(0)
    if name == "MLP":
        return dg.generators.MLP(noise_dim=4, data_dim=2, hidden=8, depth=1)
    if name == "mae":
        return dg.features.ResNetMAE(in_channels=1, base_channels=8, blocks=(1, 1), num_classes=3)
    if name == "policy":
        shapes = {STATE: (1,)}
        return PolicyNetwork(shapes, 2, STATISTICS, horizon=4, observed=2, executed=2, options=CHUNKS)
    if name in CHUNK_OPTIONS:
        options = CHUNK_OPTIONS[name]
        cls = getattr(dg.generators, name)
        return cls(action_size=2, horizon=4, condition_size=3, observed=2, **options)
    cls, options = SMALL_GENERATORS[name]
    return cls(**options)


def _generator_calls(name: str) -> list[Call]:
    cls, options = SMALL_GENERATORS[name]
    size = options["input_size"]

    def forward(**arguments: Any) -> Any:
        with torch.no_grad():
            return network(name)(**arguments)

    def noise(folder: Path) -> Noise:
        return Noise(torch.randn(2, 1, size, size), torch.randint(4, (2, 2)))

    return [
        make_call(name, lambda **given: cls(**given) and None, **options),
        make_call(f"{name} of noise", forward, True, noise=Fresh(noise), labels=labels(2, 3), alpha=1.5),
        make_call(
            f"{name} of alphas", forward, True, noise=Fresh(noise), labels=labels(2, 3), alpha=randn(2)
        ),
        make_call(
            f"{name}.sample_noise", lambda **given: network(name).sample_noise(**given), n=3,
            generator=Fresh(lambda _: torch.Generator()),
        ),
    ]  # fmt: skip


def _mlp(**given: Any) -> Any:
    with torch.no_grad():
        return network("MLP")(**given)


def _features(**given: Any) -> Any:
    with torch.no_grad():
        return network("mae").features(**given)


def _mae_loss(**given: Any) -> Any:
    with torch.no_grad():
        return network("mae").loss(**given)


def _lite_file(folder: Path) -> Path:
    path = folder / "lite.safetensors"
    save_file(efficientnet_state(), path)
    return path


def _lite_features(x: Any, vectors: Any, mean_std: Any, patch_sizes: Any, **given: Any) -> Any:
    encoder = dg.features.EfficientNetLite(**given)
    return encoder.features(x, vectors=vectors, mean_std=mean_std, patch_sizes=patch_sizes)


def _policy_forward(noise: Any, observations: Any) -> Any:
    with torch.no_grad():
        return network("policy")(noise, observations)


def _chunk_calls(name: str) -> list[Call]:
    def forward(**given: Any) -> Any:
        with torch.no_grad():
            return network(name)(**given)

    return [
        make_call(name, forward, True, noise=randn(2, 4, 2), condition=randn(2, 2, 3)),
        make_call(
            f"{name}.sample_noise", lambda **given: network(name).sample_noise(**given), n=3,
            generator=Fresh(lambda _: torch.Generator()),
        ),
    ]  # fmt: skip


NETWORKS = [
    make_call(
        "MLP", lambda **given: dg.generators.MLP(**given) and None, noise_dim=4, data_dim=2, hidden=8,
        depth=1,
    ),
    make_call("MLP of noise", _mlp, True, noise=randn(5, 4)),
    make_call(
        "MLP.sample_noise", lambda **given: network("MLP").sample_noise(**given), n=3,
        generator=Fresh(lambda _: torch.Generator()),
    ),
    *(call for name in SMALL_GENERATORS for call in _generator_calls(name)),
    *_chunk_calls("UNet1D"),
    *_chunk_calls("ChunkTransformer"),
    *_chunk_calls("ChunkMLP"),
    make_call(
        "DiT.preset", lambda **given: dg.generators.DiT.preset(**given) and None, name="B/2",
        hidden_size=16, depth=1, num_heads=2,
    ),
    make_call(
        "ResNetMAE", lambda **given: dg.features.ResNetMAE(**given) and None, in_channels=1, base_channels=8,
        blocks=(1, 1), patchify=1, mask_ratio=0.5, mask_patch=2, decoder=True, num_classes=3,
    ),
    make_call(
        "ResNetMAE.features", _features, True, x=randn(2, 1, 8, 8), every_k_block=1, vectors=True,
        mean_std=True,
        patch_sizes=(2, 4), norm_x=True,
    ),
    make_call(
        "ResNetMAE.loss", _mae_loss, True, x=randn(2, 1, 8, 8),
        mask=Fresh(lambda _: torch.randint(2, (2, 1, 8, 8)).float()), labels=labels(2, 3), cls_weight=0.1,
        generator=Fresh(lambda _: torch.Generator()),
    ),
    make_call(
        "ResNetMAE.sample_mask", lambda **given: network("mae").sample_mask(**given), n=2,
        generator=Fresh(lambda _: torch.Generator()), size=(4, 4), device=torch.device("cpu"),
    ),
    make_call(
        "feature_pyramid", dg.features.feature_pyramid, True,
        maps=Fresh(lambda _: {"a": torch.randn(2, 3, 4, 4), "b": torch.randn(2, 5, 2, 2)}), vectors=True,
        mean_std=True, patch_sizes=(2, 4),
    ),
    make_call(
        "FeatureStack", lambda encoders, vanilla, x: dg.features.FeatureStack(encoders,
        vanilla=vanilla).features(x),
        True, encoders=Fresh(lambda _: [(network("mae"), {"patch_sizes": (2,)})]), vanilla=True,
        x=randn(2, 1, 8, 8),
    ),
    make_call(
        "Backbone", dg.features.Backbone, name_or_folder="missing", size=8, mean=None, std=None, stages=None,
    ),
    make_call(
        "EfficientNetLite", _lite_features, True, weights_file=Fresh(_lite_file), size=32, stages=(2, 3),
        dtype=torch.float32, x=randn(2, 3, 8, 8), vectors=True, mean_std=True, patch_sizes=(2,),
    ),
    make_call(
        "PolicyNetwork", lambda **given: PolicyNetwork(**given) and None, observations={STATE: (1,)},
        action_size=2,
        statistics=STATISTICS, horizon=4, observed=2, executed=2, method="drifting", generator="unet1d",
        preset=None, options=CHUNKS, crop=None, image_features=8, image_widths=(8, 8), keypoints=4,
    ),
    make_call(
        "PolicyNetwork of noise", _policy_forward, True, noise=randn(2, 4, 2),
        observations=Fresh(lambda _: {STATE: torch.randn(2, 2, 1)}),
    ),
]  # fmt: skip
