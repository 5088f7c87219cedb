"""Samples for a page: images, the same noise at several guidance values, a walk between two noises, and
nearest training images. One model is in memory at a time."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from driftgen.data.config import Data
from driftgen.data.images import RealData
from driftgen.data.locate import locate
from driftgen.errors import InputError
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.neighbors import CosineNeighbors
from driftgen.evaluation.real_images import DIGITS, load_bytes, open_in_shape, run_data
from driftgen.generators.base import Noise
from driftgen.interop.packaged import find_packaged
from driftgen.ops.host_copy import device_tensor
from driftgen.pipeline import DriftPipeline
from driftgen.studio.model_list import find_source, list_models
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.studio.requests_and_answers import (
    GUIDANCE_VALUES,
    MODES,
    MOST_IMAGES,
    MOST_ROWS,
    ModelEntry,
    ModelFacts,
    Pictures,
    SampleRequest,
)
from driftgen.support.distributed import choose_device
from driftgen.support.images import to_pil, to_uint8

__all__ = ["Sampler", "interpolate"]

BATCH = 16  # images; bounds the memory
WALK = 9  # images of a walk
NEAREST = 5
MOST_TRAINING = 20_000  # training images that are compared; evenly spread if there are more
SHOWN_SAMPLES = 8  # that are compared with training images
GIF_MILLISECONDS = 120
USUAL_GUIDANCE = 8.0  # end of the slider for models that record no range


def _highest_guidance(pipe: DriftPipeline) -> float:
    """Return the end of the guidance slider: 1 above the highest value of the training, if that is known."""
    try:
        highest = float(pipe.source["guidance_range"][1]) + 1
    except (KeyError, IndexError, TypeError, ValueError):  # other programs may have written the range
        highest = USUAL_GUIDANCE
    return max(min(highest, USUAL_GUIDANCE), 2.0, math.ceil(pipe.guidance))


class Sampler:
    """Answers requests of the Sample tab.

    Args:
        folders: that may be read.
        device: of the models; the best one if None.
    """

    def __init__(self, folders: ReadableFolders, device: str | None = None) -> None:
        self.folders, self.device = folders, choose_device(device)
        self._loaded: tuple[tuple[str, float], DriftPipeline] | None = None

    def list_models(self, _: object = None) -> list[ModelEntry]:
        """Return the generators to choose from."""
        return list_models(self.folders, "generator")

    def describe(self, model: str) -> ModelFacts:
        """Load a model and return what a request can choose."""
        pipe = self._pipeline(model)
        count = pipe.num_classes or 1
        names = pipe.class_names or ([str(i) for i in range(count)] if count > 1 else [])
        return ModelFacts(tuple(names), pipe.guidance, _highest_guidance(pipe))

    def sample(self, request: SampleRequest) -> Pictures:
        """Sample the images of a request."""
        _check(request)
        pipe = self._pipeline(request.model)
        if request.mode == "guidance":
            return self._compare_guidance(pipe, request)
        return self._walk(pipe, request) if request.mode == "walk" else self._images(pipe, request)

    def nearest(self, request: SampleRequest) -> Pictures:
        """Sample the first images of a request, each followed by its nearest training images."""
        _check(request)
        pipe = self._pipeline(request.model)
        labels = _labels(pipe, request, min(request.number, SHOWN_SAMPLES))
        pixels = pipe(labels, guidance=request.guidance, seed=request.seed, output="numpy")
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        _, channels, height, width = images.shape
        data = self._training_images(request.model, pipe, (channels, height, width))
        try:
            return _compare(images, [_name(pipe, label) for label in labels], data)
        finally:
            data.close()

    def _images(self, pipe: DriftPipeline, request: SampleRequest) -> Pictures:
        labels = _labels(pipe, request, request.number)
        started = time.perf_counter()
        images = pipe(labels, guidance=request.guidance, seed=request.seed)
        note = self._note(len(images), time.perf_counter() - started)
        captions = tuple(_name(pipe, label) for label in labels)
        return Pictures(_files(images), images[0].size, 0, captions, note)

    def _compare_guidance(self, pipe: DriftPipeline, request: SampleRequest) -> Pictures:
        labels = _labels(pipe, request, min(request.number, MOST_ROWS))
        started = time.perf_counter()
        columns = [pipe(labels, guidance=alpha, seed=request.seed) for alpha in GUIDANCE_VALUES]
        note = self._note(len(labels) * len(columns), time.perf_counter() - started)
        images = [column[row] for row in range(len(labels)) for column in columns]
        names = [_name(pipe, label) for label in labels]
        captions = tuple(name for name in names for _ in columns)
        shown = tuple(f"guidance {alpha:g}" for alpha in GUIDANCE_VALUES)
        note = f"{note} Each row has one noise."
        return Pictures(_files(images), images[0].size, len(columns), captions, note, shown)

    def _walk(self, pipe: DriftPipeline, request: SampleRequest) -> Pictures:
        labels = _labels(pipe, request, min(request.number, MOST_ROWS))
        alpha = pipe.check(guidance=request.guidance, seed=request.seed)
        first, second = (_noise(pipe, len(labels), seed) for seed in (request.seed, request.second_seed))
        started = time.perf_counter()
        columns = [
            _decode(pipe, interpolate(first, second, i / (WALK - 1)), labels, alpha) for i in range(WALK)
        ]
        note = self._note(len(labels) * WALK, time.perf_counter() - started)
        images = [column[row] for row in range(len(labels)) for column in columns]
        captions = tuple(_name(pipe, label) for label in labels for _ in columns)
        names = (f"seed {request.seed}", *[""] * (WALK - 2), f"seed {request.second_seed}")
        return Pictures(_files(images), images[0].size, WALK, captions, note, names, _animate(columns))

    def _note(self, count: int, seconds: float) -> str:
        """Return the cost of images in words."""
        each = 1000 * seconds / count
        shown = f"{each:.0f}" if each >= 10 else f"{each:.1f}"
        images = "1 image: 1 network call" if count == 1 else f"{count} images: 1 network call each"
        return f"{images}, {shown} ms per image on {self.device}."

    def _pipeline(self, model: str) -> DriftPipeline:
        """Return a loaded model. A run that continues replaces its model, which is then loaded again."""
        source = find_source(model, self.folders)
        written = _written(Path(source))
        if self._loaded is None or self._loaded[0] != (source, written):
            self._loaded = None  # frees the memory before the next model needs it
            pipe = DriftPipeline.from_pretrained(source, device=self.device, batch_size=BATCH)
            self._loaded = ((source, written), pipe)
        return self._loaded[1]

    def _training_images(self, model: str, pipe: DriftPipeline, shape: tuple[int, int, int]) -> RealData:
        data = None
        if find_packaged(model.strip()) is not None:
            data = Data(kind="digits") if pipe.source.get("recipe") == DIGITS else None
        elif Path(model).is_dir():
            data = run_data(str(self.folders.check(Path(model))))
        if data is None:
            raise InputError(f"the training images of {model} are not here, so nothing can be compared")
        if data.path is not None:
            place = locate(data.path)
            for path in place.files or (place.path,):
                self.folders.check_tree(path)
        return open_in_shape(data.model_copy(update={"workers": 0}), shape)


def interpolate(first: Noise, second: Noise, t: float) -> Noise:
    """Return ε(t) = cos(πt/2) ε₀ + sin(πt/2) ε₁, Gaussian noise of the same variance for every t.

    Style indices have nothing between them: those of the first noise stay.
    """
    angle = 0.5 * math.pi * t
    return Noise(math.cos(angle) * first.gaussian + math.sin(angle) * second.gaussian, first.style)


def _check(request: SampleRequest) -> None:
    if request.mode not in MODES:
        raise InputError(f"mode={request.mode!r} is not known: choose from {', '.join(MODES)}")
    if not 1 <= request.number <= MOST_IMAGES:
        raise InputError(f"{request.number} images: ask for 1 to {MOST_IMAGES}")


def _labels(pipe: DriftPipeline, request: SampleRequest, count: int) -> list[int]:
    classes: list[Any] = list(request.classes)
    if not pipe.class_names:
        classes = [int(name) if name.isdecimal() else name for name in request.classes]
    return pipe.labels(classes or None, count)


def _name(pipe: DriftPipeline, label: int) -> str:
    if pipe.class_names:
        return pipe.class_names[label]
    return f"class {label}" if (pipe.num_classes or 1) > 1 else ""


def _noise(pipe: DriftPipeline, count: int, seed: int) -> Noise:
    pipe.check(seed=seed)
    noise = pipe.generator.sample_noise(count, torch.Generator().manual_seed(seed))
    if not isinstance(noise, Noise):
        raise InputError("this generator has noise of its own kind: there is no walk between two of them")
    return noise.to(pipe.device)


@torch.inference_mode()
def _decode(pipe: DriftPipeline, noise: Noise, labels: list[int], alpha: float) -> list[Image.Image]:
    classes = device_tensor(labels, torch.long, pipe.device)
    alphas = torch.full((len(labels),), alpha, device=pipe.device)
    samples = pipe.generator(noise, classes, alphas).float()
    return to_pil(to_uint8(pipe.tokenizer.decode(samples).float()))


def _compare(images: Tensor, names: list[str], data: RealData) -> Pictures:
    """Return each sample, then the training images with the highest cosine similarity of pixels."""
    encoder = load_encoder("pixels", torch.device("cpu"))
    count = len(data.labels)
    chosen = torch.arange(count)
    if count > MOST_TRAINING:
        chosen = torch.linspace(0, count - 1, MOST_TRAINING).long()
    nearest = min(NEAREST, len(chosen))
    search = CosineNeighbors(encoder(images), nearest)
    for batch in chosen.split(256):
        search.update(encoder(load_bytes(data, batch)))
    files: list[Image.Image] = []
    captions: list[str] = []
    for i, name in enumerate(names):
        found = load_bytes(data, chosen[search.indices[i]])
        files += to_pil(torch.cat([images[i : i + 1], found]).permute(0, 2, 3, 1).numpy())
        captions += [f"sample {name}".strip(), *(f"{s:.3f}" for s in search.similarities[i].tolist())]
    compared = f"{len(chosen):,} of {count:,}" if len(chosen) < count else f"{count:,}"
    note = (
        f"Each sample beside the nearest of {compared} training images, by cosine similarity of pixels. A "
        "sample that equals its neighbor may be memorized; driftgen neighbors counts such copies."
    )
    columns = ("sample", *(f"nearest {i + 1}" for i in range(nearest)))
    return Pictures(_files(files), files[0].size, nearest + 1, tuple(captions), note, columns)


def _files(images: list[Image.Image]) -> tuple[bytes, ...]:
    return tuple(_encoded(image) for image in images)


def _encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _animate(columns: list[list[Image.Image]]) -> bytes:
    """Return a GIF of the walk there and back; the rows are beside each other."""
    width, height = columns[0][0].size
    zoom = max(1, 96 // max(width, height))
    frames = []
    for column in [*columns, *columns[-2:0:-1]]:
        frame = Image.new("RGB", (len(column) * width, height))
        for i, image in enumerate(column):
            frame.paste(image.convert("RGB"), (i * width, 0))
        frames.append(frame.resize((frame.width * zoom, frame.height * zoom), Image.Resampling.NEAREST))
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=GIF_MILLISECONDS, loop=0)
    return buffer.getvalue()


def _written(source: Path) -> float:
    """Return the time at which a model was saved; 0 for one on the Hub."""
    try:
        return (source / "config.json").stat().st_mtime
    except OSError:
        return 0.0
