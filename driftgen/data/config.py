"""Configuration sections for real data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from driftgen.support.config_base import Count, Section, Share, path_replaces

__all__ = ["Augment", "Data", "InMemory", "Queue"]


class Augment(Section):
    """Random changes applied whenever an image is drawn."""

    flip: bool = False  # horizontally, with probability 1/2
    crop: Literal["center", "random-resized"] = "center"
    crop_scale: tuple[Share, Share] = (0.2, 1.0)  # range of the area fraction of a random resized crop
    # Small random affine transforms, for datasets so small that a generator would memorize them.
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0  # degrees, in both directions
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0  # factor 1 - zoom ... 1 + zoom
    shift: Annotated[float, Field(ge=0, le=1e4)] = 0.0  # pixels, in both directions


class InMemory(Section):
    """Identity of data passed from Python, so that a run resumes with the same data only."""

    count: Count
    shape: tuple[Count, ...]
    checksum: str


class Data(Section):
    """The dataset."""

    # images: see driftgen.data.images.open_images; memory: passed from Python, see driftgen.train
    kind: Literal["digits", "images", "latents", "memory"] = "images"
    path: str | None = None
    size: Count | None = None  # side in pixels; None for the size of an array
    channels: Literal[1, 3] = 3
    conditional: bool = True  # False puts all images into one class
    limit: Count | None = None  # maximum number of images
    workers: Annotated[int, Field(ge=0, le=256)] = 2  # decoding processes; more would only fill the memory
    augment: Augment = Augment()
    # Keep images of an array on the device, and index and augment them there. auto: on a GPU, if they fit
    # and if nothing but flips is drawn.
    on_device: bool | Literal["auto"] = "auto"
    memory: InMemory | None = None

    @model_validator(mode="after")
    def _latents_only_flip(self) -> Data:
        """Reject what a latent cache, which holds each image and its mirror image, cannot do."""
        if self.kind == "latents":
            plain = Augment(flip=self.augment.flip)
            for name in Augment.model_fields:
                if getattr(self.augment, name) != getattr(plain, name):
                    raise ValueError(f"augment.{name} does not apply to latents, which can only be flipped")
        return self

    @model_validator(mode="before")
    @classmethod
    def _path_replaces_other_data(cls, values: Any) -> Any:
        return path_replaces(values, ("digits", "memory"), "images")


class Queue(Section):
    """The source of a step's positives: the paper's queues, or an index of all data by class."""

    kind: Literal["index", "queue"] = "index"
    class_size: Count = 128
    global_size: Count = 1000
    push: Count = 64
