"""Names of dtypes on the command line."""

from __future__ import annotations

import torch

from driftgen.errors import unknown_name

__all__ = ["parse_dtype"]

DTYPES = {
    "as saved": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a name; None for ``as saved``."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]
