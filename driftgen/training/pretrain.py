"""``driftgen pretrain``: train the masked autoencoder whose encoder becomes φ (appendix "Implementation of
ResNet-style MAE")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from driftgen.data.images import RealData
from driftgen.data.placement import is_on_gpu, place_data
from driftgen.data.prefetch import Prefetcher
from driftgen.errors import InputError
from driftgen.evaluation.knn_accuracy import knn_accuracy
from driftgen.evaluation.real_images import open_in_shape
from driftgen.features.resnet_mae import MAEOutput
from driftgen.model_io import RUN_MODEL, save_model
from driftgen.ops.compile import compile_parts, to_channels_last
from driftgen.support.atomic_write import atomic_folder
from driftgen.support.distributed import Distributed
from driftgen.support.images import to_pil, to_uint8
from driftgen.support.rng import derive_generator, derive_seed
from driftgen.support.sheets import Sheet, write_sheet
from driftgen.training.build import NO_PARTS, Parts, build_mae, make_tokenizer, open_data
from driftgen.training.config import Masking, PretrainConfig
from driftgen.training.graphed_step import GraphedStep, can_capture
from driftgen.training.health import Health
from driftgen.training.loop import run_task
from driftgen.training.microbatch import reduce_gradients
from driftgen.training.run_evaluation import open_without_augmentation
from driftgen.training.run_folder import check_run
from driftgen.training.sharding import make_mesh
from driftgen.training.step_memory import check_samples
from driftgen.training.summary import describe_pretraining
from driftgen.training.unreadable_images import UnreadableImages
from driftgen.training.view import View

__all__ = ["Pretraining", "classification_weight", "pretrain"]

# RNG stream ids
ORDER, AUGMENT, MASK, WEIGHTS, PREVIEW, LATENT, PROBE = range(7)
PREVIEW_IMAGES, PREVIEW_ROWS = 10, ("original", "masked", "reconstructed")
PROBE_IMAGES = 64  # fixed images that the averaged weights are measured on


def classification_weight(config: Masking, step: int, steps: int) -> float:
    """Return λ: 0, then a linear ramp up to ``finetune_weight`` over the last ``finetune_steps``."""
    since = step - (steps - config.finetune_steps)
    if config.finetune_steps == 0 or since < 0:
        return 0.0
    return config.finetune_weight * min(1.0, since / config.finetune_ramp)


class MaskedBatch(NamedTuple):
    """Images, masks and labels of one step, and the weight λ of the classification loss."""

    images: Tensor
    mask: Tensor
    labels: Tensor
    cls_weight: Tensor | float = 0.0


class Pretraining:
    """Task that trains a masked autoencoder by reconstruction, and by classification at the end.

    Attributes:
        name: of the recipe, for the record of the saved model.
    """

    def __init__(
        self,
        config: PretrainConfig,
        distributed: Distributed,
        info: Callable[[str], None] = lambda text: None,
        *,
        name: str = "",
        parts: Parts = NO_PARTS,
    ) -> None:
        self.config, self.distributed, self.name = config, distributed, name
        device = distributed.device
        self.data = place_data(open_data(config.data, parts.data), config.data, device)
        self.evaluation = _open_evaluation(config, parts.data)
        torch.manual_seed(derive_seed(config.seed, WEIGHTS))
        self.tokenizer = make_tokenizer(config.tokenizer, distributed.device)
        shape = self.data.shape
        if self.tokenizer is not None:
            # Images are cropped at random before they are encoded, so latents cannot be cached.
            f = self.tokenizer.factor
            shape = (self.tokenizer.latent_channels, shape[1] // f, shape[2] // f)
        check_samples(f"batch_size={config.batch_size}", config.batch_size, math.prod(shape), distributed)
        self.mae = build_mae(config.mae, shape, len(self.data.class_names))
        mesh = make_mesh(config, distributed)
        if mesh is None:
            self.mae.to(distributed.device)  # with a mesh, the loop moves it shard by shard
        self.model: nn.Module = self.mae
        if config.compile:
            compile_parts(self.mae)
        on_gpu = distributed.device.type == "cuda"
        if mesh is None and (config.compile or on_gpu):
            to_channels_last(self.mae)
        if distributed.group is not None and mesh is None:
            # The classifier has a gradient of zero before fine-tuning begins: every parameter is used.
            self.model = DistributedDataParallel(self.model)
        self.rows = distributed.shard(config.batch_size, "batch_size")
        self.samples_per_step = config.batch_size
        self.autocast = torch.bfloat16 if config.precision == "bfloat16" else None
        self.health = Health(ema_warmup=config.ema_warmup)
        self.unreadable = UnreadableImages(self.data, distributed)
        self.batch_metrics: dict[str, Tensor] = {}
        self.probe = self._draw_probe()
        self._ahead: tuple[int, MaskedBatch] | None = None  # the step drawn ahead
        # A thread loads the next batch while the GPU computes, or while worker processes decode files.
        ahead = (on_gpu and not is_on_gpu(self.data)) or getattr(self.data, "decodes", False)
        self.prefetcher: Prefetcher[MaskedBatch] | None = Prefetcher() if ahead else None
        # The host needs longer for about 800 launches than the GPU for their work.
        self.graphed: GraphedStep[MaskedBatch, MAEOutput] | None = None
        if can_capture(config, distributed):
            self.graphed = GraphedStep(self._step, self.mae.parameters(), info)

    def describe(self) -> dict[str, str]:
        """See :class:`~driftgen.training.task.Describes`."""
        return describe_pretraining(self.config, self.data, self.mae)

    def indices(self, step: int) -> Tensor:
        """Return the images of a step: every epoch in an order of its own."""
        n, size = len(self.data.labels), self.config.batch_size
        first, chosen = step * size, torch.empty(0, dtype=torch.int64)
        while len(chosen) < size:
            epoch, start = divmod(first + len(chosen), n)
            order = torch.randperm(n, generator=derive_generator(self.config.seed, ORDER, epoch))
            chosen = torch.cat([chosen, order[start : start + size - len(chosen)]])
        return chosen

    def compute_gradient(self, step: int) -> Tensor:
        """See :class:`~driftgen.training.task.Task`, here and below."""
        config = self.config
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == step else self._draw(step)
        weight = classification_weight(config.mae, step, config.optim.steps)
        self.batch_metrics = {}
        if self.graphed is not None:
            out = self.graphed(batch._replace(cls_weight=batch.images.new_tensor(weight)))
            self._add_metrics(out, 1.0)
            return out.loss.detach()
        total = batch.images.new_zeros(())
        parts = list(zip(*(t.chunk(config.micro) for t in batch[:3]), strict=True))
        for i, (images, mask, labels) in enumerate(parts):
            share = len(images) / len(batch.images)
            with reduce_gradients(self.model, when=i == len(parts) - 1):
                out = self._step(MaskedBatch(images, mask, labels, weight), share)
            total += out.loss.detach() * share
            self._add_metrics(out, share)
        return self._average(total)

    def draw_ahead(self, step: int) -> None:
        """See :class:`~driftgen.training.task.DrawsAhead`; nothing is drawn from default generators."""
        self._ahead = step, self._draw(step)

    def _step(self, batch: MaskedBatch, share: float = 1.0) -> MAEOutput:
        """Add the gradient of the loss, times ``share``, to ``.grad``."""
        out = self._forward(self.model, batch)
        (out.loss * share).backward()
        return out

    def _add_metrics(self, out: MAEOutput, share: float) -> None:
        for name in ("recon_loss", "accuracy"):
            value = getattr(out, name)
            if value is not None:
                self.batch_metrics[name] = self.batch_metrics.get(name, 0.0) + value.detach().mean() * share

    def _average(self, loss: Tensor) -> Tensor:
        """Return the mean loss over all processes, and average the metrics of the batch with it."""
        if self.distributed.group is None:
            return loss
        values = torch.stack([loss, *self.batch_metrics.values()])
        dist.all_reduce(values, group=self.distributed.group)
        loss, *metrics = (values / self.distributed.world_size).unbind()
        self.batch_metrics = dict(zip(self.batch_metrics, metrics, strict=True))
        return loss

    @torch.no_grad()
    def measure(self, averaged: nn.Module) -> dict[str, Any]:
        """Return metrics of the averaged weights on fixed images, and of the last batch.

        ``reconstruction``, ``classification`` and ``accuracy`` describe the weights that the run saves;
        ``batch_reconstruction`` and ``batch_accuracy`` describe the trained weights.
        """
        out = self._forward(averaged, self.probe)
        return {
            "reconstruction": out.recon_loss.mean().item(),
            "classification": None if out.cls_loss is None else out.cls_loss.mean().item(),
            "accuracy": None if out.accuracy is None else out.accuracy.mean().item(),
            "batch_reconstruction": self.batch_metrics["recon_loss"].item(),
            "batch_accuracy": self.batch_metrics["accuracy"].item() if out.accuracy is not None else None,
            **self.unreadable.update(),
        }

    def check_health(self, row: Mapping[str, Any]) -> list[str]:
        return self.health.update(row)

    @torch.no_grad()
    def save_preview(self, averaged: nn.Module, path: Path) -> Path | None:
        """Save images, their visible patches, and the reconstruction of the others."""
        if self.prefetcher is not None:
            self.prefetcher.wait()  # data must not be loaded by two threads at once
        chosen = torch.arange(min(PREVIEW_IMAGES, len(self.data.labels)))
        images = self.data.load(chosen, 0)
        mask = self._draw_mask(len(images), images, PREVIEW)
        images, mask, *_ = self._move(MaskedBatch(images, mask, self.data.labels[chosen]), 0)
        if images.shape[1] not in (1, 3):
            return None
        mae: Any = averaged
        p = mae.patchify
        masked = mask.repeat_interleave(p, 2).repeat_interleave(p, 3)
        reconstructed = mae.unpatchify(mae.reconstruct(images, mask))
        rows = [images, images * (1 - masked), images * (1 - masked) + reconstructed.float() * masked]
        pictures = to_pil(to_uint8(torch.cat(rows)))
        return write_sheet(path.with_suffix(".png"), Sheet(pictures, len(images), PREVIEW_ROWS))

    def save_models(self, models: Mapping[str, nn.Module], folder: Path, step: int) -> None:
        """Save the first average as ``model/``."""
        decay, model = next(iter(models.items()))
        source = {"recipe": self.name, "step": step, "ema": decay}
        with atomic_folder(folder / RUN_MODEL) as scratch:
            save_model(model, scratch, source=source, class_names=self.data.class_names)

    def evaluate(self, averaged: Mapping[str, nn.Module], folder: Path, step: int) -> dict[str, Any]:
        """Return the accuracy of a k-NN classifier of held-out images, on the last stage's mean features."""
        if self.evaluation is None or not averaged:
            return {}
        mae: Any = next(iter(averaged.values()))

        def encode(images: Tensor) -> Tensor:
            with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
                *_, last = mae.encode(self._to_latents(images, 0), every_k_block=0).values()
            vectors: Tensor = last.mean((2, 3)).float()
            return vectors

        # Compiled blocks would be compiled again for these batch sizes.
        with torch.compiler.set_stance("force_eager"):
            accuracy = knn_accuracy(encode, *self.evaluation, device=self.distributed.device)
        return {"knn_accuracy": accuracy}

    def memory_advice(self) -> str:
        return memory_advice(self.config)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore nothing: step and seed determine every draw."""

    def _draw(self, step: int) -> MaskedBatch:
        """Return the batch of a step on the device."""
        seed = derive_seed(self.config.seed, step, AUGMENT)
        return self._move(self._take(step), seed, self.rows.start)

    def _take(self, step: int) -> MaskedBatch:
        """Return the batch of a step on the host, and start to load the next one."""
        if self.prefetcher is None:
            return self._load(step)
        batch = self.prefetcher.get((step,), lambda: self._load(step))
        if step + 1 < self.config.optim.steps:
            self.prefetcher.start((step + 1,), lambda: self._load(step + 1))
        return batch

    def _load(self, step: int) -> MaskedBatch:
        config = self.config
        chosen = self.indices(step)[self.rows]
        images = self.data.load(chosen, derive_seed(config.seed, step, AUGMENT), self.rows.start)
        mask = self._draw_mask(config.batch_size, images, step, MASK)[self.rows]
        labels = self.data.labels[chosen]
        if self.distributed.device.type == "cuda":
            batch = (t if t.is_cuda else t.pin_memory() for t in (images, mask, labels))
            return MaskedBatch(*batch)
        return MaskedBatch(images, mask, labels)

    def _draw_probe(self) -> MaskedBatch:
        """Return fixed images, masks and labels to measure the averaged weights on."""
        seed = self.config.seed
        order = torch.randperm(len(self.data.labels), generator=derive_generator(seed, PROBE))
        chosen, augment = order[:PROBE_IMAGES], derive_seed(seed, PROBE, AUGMENT)
        images = self.data.load(chosen, augment)
        mask = self._draw_mask(len(images), images, PROBE, MASK)
        return self._move(MaskedBatch(images, mask, self.data.labels[chosen]), augment)

    def _draw_mask(self, n: int, images: Tensor, *stream: int) -> Tensor:
        """Draw n masks for images of this size, on the host."""
        factor = self.mae.patchify * (1 if self.tokenizer is None else self.tokenizer.factor)
        size = (images.shape[2] // factor, images.shape[3] // factor)
        random = derive_generator(self.config.seed, *stream)
        return self.mae.sample_mask(n, random, size=size, device=torch.device("cpu"))

    def _move(self, batch: MaskedBatch, seed: int, first: int = 0) -> MaskedBatch:
        """Move a batch to the device, as latents if there is a tokenizer."""
        device = self.distributed.device
        images, mask, labels = (tensor.to(device, non_blocking=True) for tensor in batch[:3])
        return MaskedBatch(self._to_latents(images, seed, first), mask, labels)

    @torch.no_grad()
    def _to_latents(self, images: Tensor, seed: int, first: int = 0) -> Tensor:
        """Return latents of images if there is a tokenizer, else the images."""
        if self.tokenizer is None:
            return images
        latents: Tensor = self.tokenizer.encode(images, derive_generator(seed, first, LATENT))
        return latents

    def _forward(self, model: nn.Module, batch: MaskedBatch) -> MAEOutput:
        images, mask, labels, weight = batch
        with torch.autocast(images.device.type, self.autocast, enabled=self.autocast is not None):
            out: MAEOutput = (
                model(images, mask) if self.mae.classifier is None else model(images, mask, labels, weight)
            )
        return out


def pretrain(
    config: PretrainConfig,
    folder: Path,
    distributed: Distributed,
    view: View,
    *,
    name: str = "",
    override: bool = False,
    report: Callable[[Path], object] | None = None,
    parts: Parts = NO_PARTS,
) -> bool:
    """Train an encoder in ``folder``, or resume its training; return True if the run is complete.

    The folder receives ``model/`` (the first average), ``samples/``, ``metrics.jsonl`` and whatever
    ``report(folder)`` writes.
    """
    config = check_run(folder, config, override=override)
    task = Pretraining(config, distributed, view.info, name=name, parts=parts)
    for note in getattr(task.data, "notes", []):
        view.info(note)
    try:
        header = {"task": "pretrain", "recipe": name}
        return run_task(folder, config, task, distributed, view, header, report)
    finally:
        task.data.close()


def _open_evaluation(config: PretrainConfig, given: RealData | None) -> tuple[RealData, RealData] | None:
    """Open the images that vote and the held-out images of the k-NN classifier."""
    output = config.output
    if output.eval_every is None:
        return None
    if output.eval_data is None:
        raise InputError(
            "output.eval_every of an encoder needs labeled images that it does not train on: set "
            "output.eval_data=test.npz"
        )
    training = open_without_augmentation(config, given)
    return training, open_in_shape(output.eval_data, training.shape)


def memory_advice(config: PretrainConfig) -> str:
    """Return the change that reduces the memory of a step."""
    return f"use --set micro={2 * config.micro} (the same step in micro-batches)"
