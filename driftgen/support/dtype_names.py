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


def parse_dtype(name: str, *, saved: bool = False) -> torch.dtype | None:
    """Return the dtype of a name; None for ``as saved``. Only ``saved`` weights may be ``int8``."""
    dtypes = DTYPES | ({"int8": torch.int8} if saved else {})
    if name not in dtypes:
        raise unknown_name("dtype", name, dtypes)
    return dtypes[name]
