"""The base class of configuration sections, and constrained numeric types."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "Decay", "Natural", "Positive", "Real", "Section", "Share", "path_replaces"]

# Upper bounds keep every number exact in int64, and finite in float32 when a few of them are multiplied.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Real = Annotated[float, Field(ge=-1e9, le=1e9)]


class Section(BaseModel):
    """An immutable configuration section that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def path_replaces(values: Any, others: Collection[str], kind: str) -> Any:
    """Return the values of a section of data, with ``kind`` if a path is set beside another kind."""
    if isinstance(values, dict) and values.get("path") and values.get("kind") in others:
        return values | {"kind": kind}
    return values
