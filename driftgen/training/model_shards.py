"""Save a model again in small files of another dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from driftgen.errors import InputError
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.base import Generator
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.model_io import load_any, save_model
from driftgen.pipeline import DriftPipeline
from driftgen.support.atomic_write import check_free
from driftgen.support.sizes import parse_size

__all__ = ["save_shards"]


def save_shards(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_size: int | str = "16MB",
    decoder: bool = True,
) -> Path:
    """Save a generator with its tokenizer, an encoder or a policy in shards, and return the folder.

    Args:
        source: as in :func:`driftgen.load_model`; of a run, its first average.
        out: new or empty folder.
        dtype: of the weights; as saved if None.
        max_shard_size: largest weight file, in bytes or as text.
        decoder: keep the decoder of a masked autoencoder; its features do not need it.
    """
    parse_size(max_shard_size, "max_shard_size")  # before anything is loaded
    check_free(Path(out))
    model, _, facts = load_any(source)
    if not decoder:
        if not isinstance(model, ResNetMAE):
            raise InputError(f"{source} is no masked autoencoder: only those have a decoder to leave out")
        model.decoder = None
    if isinstance(model, Generator) and not isinstance(model, PolicyNetwork):
        pipe = DriftPipeline.from_pretrained(source)
        return pipe.save_pretrained(out, dtype=dtype, max_shard_size=max_shard_size)
    return save_model(model, out, dtype=dtype, max_shard_size=max_shard_size, **facts)
