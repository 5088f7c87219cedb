"""Names of dtypes on the command line."""

from __future__ import annotations

import torch

from driftgen.errors import InputError, unknown_name

__all__ = ["check_network_dtype", "parse_dtype"]

DTYPES = {
    "as saved": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_network_dtype(dtype: torch.dtype | None) -> None:
    """Raise an InputError for a dtype that networks do not compute in; None is the dtype of the weights."""
    if dtype is not None and dtype not in COMPUTED:
        names = ", ".join(str(each) for each in COMPUTED)
        raise InputError(f"dtype={dtype}: networks compute in {names}")


def parse_dtype(name: str, *, saved: bool = False) -> torch.dtype | None:
    """Return the dtype of a name; None for ``as saved``. Only ``saved`` weights may be ``int8``."""
    dtypes = DTYPES | ({"int8": torch.int8} if saved else {})
    if name not in dtypes:
        raise unknown_name("dtype", name, dtypes)
    return dtypes[name]
