"""Drifting Models: generators that turn noise into a sample in one network call."""

from driftgen import data, generators
from driftgen.errors import InputError
from driftgen.field import drift_field, mmd_field
from driftgen.loss import DriftingLoss, LossOutput

__version__ = "0.1.0"
__all__ = ["DriftingLoss", "InputError", "LossOutput", "data", "drift_field", "generators", "mmd_field"]
