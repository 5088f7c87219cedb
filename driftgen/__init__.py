"""Drifting Models: generators that turn noise into a sample in one network call."""

from typing import TYPE_CHECKING, Any

from driftgen import data, features, generators, tokenizers
from driftgen.data.queue import SampleQueue
from driftgen.drift import guidance
from driftgen.drift.field import drift_field, mmd_field
from driftgen.drift.loss import DriftingLoss, LossOutput
from driftgen.errors import InputError
from driftgen.interop.official import load_official

if TYPE_CHECKING:
    from driftgen.model_io import load_model, save_model
    from driftgen.pipeline import DriftPipeline

__version__ = "0.1.0"
__all__ = [
    "DriftPipeline",
    "DriftingLoss",
    "InputError",
    "LossOutput",
    "SampleQueue",
    "data",
    "drift_field",
    "features",
    "generators",
    "guidance",
    "load_model",
    "load_official",
    "mmd_field",
    "save_model",
    "tokenizers",
]

# Loaded on first use: what reads and writes files is not needed to compute a loss.
_LATER = {
    "DriftPipeline": "driftgen.pipeline",
    "load_model": "driftgen.model_io",
    "save_model": "driftgen.model_io",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'driftgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
