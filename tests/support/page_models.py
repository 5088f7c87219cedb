"""Models for the page that generates images."""

from driftgen.generators import ImageMLP
from driftgen.pipeline import DriftPipeline
from tests.support import exported
from tests.support.pipelines import lively


def many_classes():
    """Trained without guidance, with more classes than fit on buttons, without names."""
    network = ImageMLP(input_size=8, in_channels=1, num_classes=30, hidden_size=64, depth=1)
    return DriftPipeline(lively(network), source={"guidance_range": [1.0, 1.0]})


PIPELINES = {
    "digits": lambda: DriftPipeline.from_pretrained("digits"),
    "dit": exported.dit,  # with style indices
    "unet": exported.unet,
    "many classes": many_classes,
}
