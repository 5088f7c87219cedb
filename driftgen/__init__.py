"""Drifting Models: generators that turn noise into a sample in one network call."""

from driftgen import data, features, generators
from driftgen.errors import InputError
from driftgen.field import drift_field, mmd_field
from driftgen.interop.official import load_official
from driftgen.loss import DriftingLoss, LossOutput

__version__ = "0.1.0"
__all__ = [
    "DriftingLoss",
    "InputError",
    "LossOutput",
    "data",
    "drift_field",
    "features",
    "generators",
    "load_official",
    "mmd_field",
]
