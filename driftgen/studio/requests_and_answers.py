"""Requests of the Sample and Policy tabs and their answers: plain values, which go between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "GUIDANCE_VALUES",
    "MODES",
    "MOST_IMAGES",
    "MOST_ROWS",
    "ModelEntry",
    "ModelFacts",
    "Pictures",
    "RolloutRequest",
    "RolloutVideo",
    "SampleRequest",
]

Mode = Literal["samples", "guidance", "walk"]
MODES: tuple[Mode, ...] = ("samples", "guidance", "walk")
MOST_IMAGES = 64  # of a request
MOST_ROWS = 8  # of the modes with several images per row
GUIDANCE_VALUES = (1.0, 1.5, 2.0, 3.0, 4.0)


class ModelEntry(NamedTuple):
    """A model that can be chosen: its name for a request, and the text that a list shows."""

    name: str
    label: str


class ModelFacts(NamedTuple):
    """Classes of a model by name, its default guidance, and the highest one to offer."""

    classes: tuple[str, ...]
    guidance: float
    highest: float


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample.

    Attributes:
        model: a packaged name, a run, or a name on the Hub.
        classes: names; all in turn if empty.
        guidance: α; the model's default if None.
        seed: of the noise.
        number: of images; of rows, for the other modes.
        mode: ``samples``; ``guidance``, the same noise at several α; or ``walk`` between two noises.
        second_seed: of the noise at the end of a walk.
    """

    model: str
    classes: tuple[str, ...] = ()
    guidance: float | None = None
    seed: int = 0
    number: int = 16
    mode: Mode = "samples"
    second_seed: int = 1


@dataclass(frozen=True)
class Pictures:
    """Images of equal size in rows, and a line about them.

    Attributes:
        files: PNG files, row by row.
        size: width and height of an image in pixels.
        columns: images per row; 0 for as many as fit.
        captions: one per image.
        column_names: one per column, or none.
        note: a line of text.
        animation: a GIF of all columns in turn, or none.
    """

    files: tuple[bytes, ...]
    size: tuple[int, int]
    columns: int
    captions: tuple[str, ...]
    note: str
    column_names: tuple[str, ...] = ()
    animation: bytes | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """An episode to simulate: the policy, and the seed of the environment."""

    model: str
    seed: int = 0


@dataclass(frozen=True)
class RolloutVideo:
    """An mp4 file of an episode, and a line about it."""

    video: bytes
    note: str
