"""The three passes of one loss call: scale, drift norms, combined drift. Two collectives lie between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from driftgen.drift.eager import EagerEngine
from driftgen.drift.fused import FusedEngine, unsupported_reason
from driftgen.drift.interfaces import Combined, DriftPass, Engine, LossCall, ScalePass
from driftgen.ops.dispatch import has_kernels

__all__ = ["run_passes", "select_engine"]


def run_passes(
    engine: Engine, check_scale: Callable[[Tensor], None]
) -> tuple[ScalePass, DriftPass, Combined]:
    """Run the passes in order. Each one receives the results of those before it.

    ``check_scale`` may raise before the second pass.
    """
    with torch.no_grad():
        scale = engine.measure_scale()
        check_scale(scale.scale)
        drift = engine.measure_drift(scale)
        return scale, drift, engine.combine(scale, drift)


def select_engine(call: LossCall) -> tuple[Engine, str | None]:
    """Return the fused engine if its kernels support the call, else the eager engine.

    The second result is the reason if the device has kernels, but the call is not supported.
    """
    reason = unsupported_reason(call.settings, call.buckets)
    if reason is None:
        return FusedEngine(call), None
    return EagerEngine(call), reason if has_kernels(call.buckets[0].device) else None
