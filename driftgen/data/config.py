"""The sections of a configuration that say where real samples come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from driftgen.support.config_base import Count, Natural, Section, Share

__all__ = ["Augment", "Data", "Queue"]


class Augment(Section):
    """What is done to an image each time it is drawn."""

    flip: bool = False  # left and right, with probability 1/2
    crop: Literal["center", "random-resized"] = "center"
    crop_scale: tuple[Share, Share] = (0.2, 1.0)  # share of the area that a random resized crop keeps
    # Small random affine changes, for data so small that a generator would learn it by heart.
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0  # degrees, either way
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0  # factor 1 - zoom ... 1 + zoom
    shift: Annotated[float, Field(ge=0)] = 0.0  # pixels, either way


class Data(Section):
    """Where real samples come from."""

    kind: Literal["digits", "images", "latents"] = "images"  # images: a folder, .npz or .npy
    path: str | None = None
    size: Count | None = None  # side in pixels; None keeps that of an array
    channels: Literal[1, 3] = 3
    conditional: bool = True  # False puts all images into one class
    limit: Count | None = None  # no more than so many images
    workers: Natural = 2  # processes that decode
    augment: Augment = Augment()


class Queue(Section):
    """Where the positives of a step are drawn from: the paper's queues, or all data by class."""

    kind: Literal["index", "queue"] = "index"
    class_size: Count = 128
    global_size: Count = 1000
    push: Count = 64
