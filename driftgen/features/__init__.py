"""φ: what the drift is measured in."""

from driftgen.features.pyramid import feature_pyramid
from driftgen.features.resnet_mae import MAEOutput, ResNetMAE

__all__ = ["MAEOutput", "ResNetMAE", "feature_pyramid"]
