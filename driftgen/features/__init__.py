"""φ: feature encoders whose feature spaces the drift is computed in."""

from driftgen.features.backbones import Backbone
from driftgen.features.efficientnet_lite import EfficientNetLite
from driftgen.features.pyramid import feature_pyramid
from driftgen.features.resnet_mae import MAEOutput, ResNetMAE
from driftgen.features.stack import DecodeFirst, Encoder, FeatureStack

__all__ = [
    "Backbone",
    "DecodeFirst",
    "EfficientNetLite",
    "Encoder",
    "FeatureStack",
    "MAEOutput",
    "ResNetMAE",
    "feature_pyramid",
]
