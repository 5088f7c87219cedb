"""``driftgen pretrain``: the masked autoencoder whose encoder becomes φ (appendix "Implementation of
ResNet-style MAE")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from driftgen.model_io import RUN_MODEL, save_model
from driftgen.ops.compile import compile_parts, to_channels_last
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.images import contact_sheet, to_pil, to_uint8
from driftgen.support.rng import derive_generator, derive_seed
from driftgen.training.build import NO_PARTS, Parts, build_mae, make_tokenizer, open_data
from driftgen.training.config import Masking, PretrainConfig
from driftgen.training.distributed import Distributed
from driftgen.training.loop import Loop, View, check_run, create_run
from driftgen.training.sharding import make_mesh

__all__ = ["Pretraining", "classification_weight", "pretrain"]

# Which randomness of a step it is.
ORDER, AUGMENT, MASK, WEIGHTS, PICTURE, LATENT = range(6)
SHOWN = 10


def classification_weight(config: Masking, step: int, steps: int) -> float:
    """λ: 0, then over the last ``finetune_steps`` a ramp up to ``finetune_weight``."""
    since = step - (steps - config.finetune_steps)
    if config.finetune_steps == 0 or since < 0:
        return 0.0
    return config.finetune_weight * min(1.0, since / config.finetune_ramp)


class Pretraining:
    """The task of the loop: masked images in, reconstruction (and classification) loss out."""

    def __init__(self, config: PretrainConfig, processes: Distributed, parts: Parts = NO_PARTS) -> None:
        self.config, self.processes = config, processes
        self.data = open_data(config.data, parts.data)
        torch.manual_seed(derive_seed(config.seed, WEIGHTS))
        self.tokenizer = make_tokenizer(config.tokenizer, processes.device)
        shape = self.data.shape
        if self.tokenizer is not None:
            # Images are cropped at random before they become latents, so no cache of latents would do.
            f = self.tokenizer.factor
            shape = (self.tokenizer.latent_channels, shape[1] // f, shape[2] // f)
        self.mae = build_mae(config.mae, shape, len(self.data.class_names))
        mesh = make_mesh(config, processes)
        if mesh is None:
            self.mae.to(processes.device)  # else the loop moves it, share by share
        self.model: nn.Module = self.mae
        if config.compile:
            compile_parts(self.mae)
            if mesh is None:
                to_channels_last(self.mae)
        if processes.group is not None and mesh is None:
            # The classifier has no gradient before fine-tuning begins.
            self.model = DistributedDataParallel(
                self.model, find_unused_parameters=config.mae.finetune_steps > 0
            )
        self.rows = processes.shard(config.batch_size, "batch_size")
        self.autocast = torch.bfloat16 if config.precision == "bfloat16" else None
        self.found: dict[str, Tensor] = {}

    def samples_per_step(self) -> int:
        return self.config.batch_size

    def indices(self, step: int) -> Tensor:
        """Which images the step takes: epoch after epoch, each in an order of its own."""
        n, size = len(self.data.labels), self.config.batch_size
        first, found = step * size, torch.empty(0, dtype=torch.int64)
        while len(found) < size:
            epoch, start = divmod(first + len(found), n)
            order = torch.randperm(n, generator=derive_generator(self.config.seed, ORDER, epoch))
            found = torch.cat([found, order[start : start + size - len(found)]])
        return found

    def gradient(self, step: int) -> Tensor:
        config, device = self.config, self.processes.device
        chosen = self.indices(step)[self.rows]
        seed = derive_seed(config.seed, step, AUGMENT)
        images = self._load(chosen, seed, self.rows.start)
        labels = self.data.labels[chosen].to(device)
        weight = classification_weight(config.mae, step, config.optim.steps)
        height, width = (side // self.mae.patchify for side in images.shape[2:])
        random = derive_generator(config.seed, step, MASK)
        mask = self.mae.sample_mask(config.batch_size, random, size=(height, width))[self.rows]
        total = images.new_zeros(())
        self.found = {}
        parts = list(zip(*(t.chunk(config.micro) for t in (images, mask, labels)), strict=True))
        for part_images, part_mask, part_labels in parts:
            share = len(part_images) / len(images)
            with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                out = self.model(
                    part_images, part_mask, part_labels if self.mae.classifier is not None else None, weight
                )
            (out.loss * share).backward()
            total += out.loss.detach() * share
            for name in ("recon_loss", "cls_loss", "accuracy"):
                value = getattr(out, name)
                if value is not None:
                    self.found[name] = self.found.get(name, 0.0) + value.detach().mean() * share
        return total

    def _load(self, chosen: Tensor, seed: int, first: int = 0) -> Tensor:
        images = self.data.load(chosen, seed, first).to(self.processes.device)
        if self.tokenizer is None:
            return images
        with torch.no_grad():
            return self.tokenizer.encode(images, derive_generator(seed, first, LATENT))

    def measure(self) -> dict[str, Any]:
        found = {name: value.item() for name, value in self.found.items()}
        return {
            "reconstruction": found["recon_loss"],
            "classification": found.get("cls_loss"),
            "accuracy": found.get("accuracy"),
        }

    @torch.no_grad()
    def save_samples(self, model: nn.Module, path: Path) -> None:
        """Images, what the encoder sees of them, and what the decoder makes of that."""
        images = self._load(torch.arange(min(SHOWN, len(self.data.labels))), 0)
        if images.shape[1] not in (1, 3):
            return
        mae: Any = model
        size = (images.shape[2] // mae.patchify, images.shape[3] // mae.patchify)
        mask = mae.sample_mask(len(images), derive_generator(self.config.seed, PICTURE), size=size)
        p = mae.patchify
        seen = mask.repeat_interleave(p, 2).repeat_interleave(p, 3)
        made = mae.unpatchify(mae.reconstruct(images, mask))
        rows = [images, images * (1 - seen), images * (1 - seen) + made.float() * seen]
        make_folder(path.parent)
        with atomic_write(path) as scratch:
            contact_sheet(to_pil(to_uint8(torch.cat(rows))), columns=len(images)).save(scratch)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing: step and seed decide everything."""


def pretrain(
    config: PretrainConfig,
    folder: Path,
    processes: Distributed,
    view: View,
    *,
    name: str = "",
    override: bool = False,
    report: Callable[[Path], object] | None = None,
    parts: Parts = NO_PARTS,
) -> bool:
    """Trains, or goes on with, the encoder in ``folder``; whether it is complete. It ends as ``model/``.

    ``report(folder)`` is called now and then and at the end.
    """
    check_run(folder, config, override=override)
    task = Pretraining(config, processes, parts)

    def finish(averages: Mapping[str, nn.Module], step: int) -> None:
        decay, first = next(iter(averages.items()))
        source = {"recipe": name, "step": step, "ema": decay}
        save_model(first, folder / RUN_MODEL, source=source, class_names=task.data.class_names)

    if processes.is_main:
        create_run(folder, config, task="pretrain", recipe=name)
    processes.barrier()
    try:
        return Loop(folder, config, task, processes, view, finish, report).run()
    finally:
        task.data.close()
