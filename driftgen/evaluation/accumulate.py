"""Stream images through an encoder and sum what the metrics need, over any number of processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from driftgen.errors import InputError
from driftgen.evaluation.encoders import Encoder
from driftgen.evaluation.frechet import Moments
from driftgen.evaluation.image_sources import BLOCK, ImageSource, block_digest
from driftgen.evaluation.inception_score import InceptionScore, ScoreSums
from driftgen.support.atomic_write import atomic_write
from driftgen.support.checksum import tensors_checksum
from driftgen.support.distributed import Distributed
from driftgen.support.signals import handle_signals
from driftgen.support.untrusted_files import open_safetensors

__all__ = ["KEPT", "Sums", "accumulate"]

KEPT = 10_000  # images whose features are stored, for KID, precision, recall, density and coverage
SAVE_SECONDS = 20.0


class Sums:
    """Moments (float64), Inception score sums and stored features of a set of images.

    All of them add up over processes.

    Args:
        count: number of images.
        stored: indices of the images whose features are stored, in the order of the stored features.
        device: of the sums.
    """

    def __init__(self, count: int, stored: Tensor, device: torch.device) -> None:
        # float64 sums do not exist on Apple GPUs.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.count, self.stored = count, stored
        self.position = torch.full((count,), -1)
        self.position[stored] = torch.arange(len(stored))
        self.moments = Moments(0, torch.zeros(0), torch.zeros(0, 0))
        self.features: Tensor | None = None  # [len(stored), D]
        self.score: ScoreSums | None = None
        self.blocks: dict[int, str] = {}  # finished block -> digest of its pixels

    def update(self, block: int, images: Tensor, features: Tensor, logits: Tensor | None) -> None:
        """Add one block."""
        features = features.to(self.device)
        if self.features is None:
            self._allocate(features.shape[1])
        if not bool(features.isfinite().all()):
            raise InputError(f"features of images {block * BLOCK} ... hold NaN or infinite values")
        self.moments += Moments.of(features)
        indices = torch.arange(block * BLOCK, block * BLOCK + len(features))
        position = self.position[indices]
        chosen = position >= 0
        assert self.features is not None
        self.features[position[chosen].to(self.device)] = features[chosen.to(self.device)]
        if logits is not None:
            self.score = self.score or ScoreSums(self.count)
            self.score.update(logits.to(self.device), indices)
        self.blocks[block] = block_digest(images)

    def _allocate(self, width: int) -> None:
        zeros = torch.zeros(width, width, dtype=torch.float64, device=self.device)
        self.moments = Moments(0, zeros[0].clone(), zeros)
        self.features = torch.zeros(len(self.stored), width, device=self.device)

    @property
    def inception_score(self) -> InceptionScore | None:
        """Inception score, or None without logits."""
        return None if self.score is None else self.score.compute()

    @property
    def checksum(self) -> str:
        """SHA-256 of the pixels of all images, in order."""
        return hashlib.sha256("".join(d for _, d in sorted(self.blocks.items())).encode()).hexdigest()

    def reduce(self, processes: Distributed) -> None:
        """Sum over processes, so that each holds the result of all."""
        if processes.group is None:
            return
        gathered: list[Any] = [None] * processes.world_size
        has_score = None if self.score is None else self.score.probabilities
        facts = (
            self.blocks,
            None if self.features is None else self.features.shape[1],
            has_score is not None,
        )
        dist.all_gather_object(gathered, facts, group=processes.group)
        self.blocks = {block: digest for blocks, *_ in gathered for block, digest in blocks.items()}
        widths = [width for _, width, _ in gathered if width is not None]
        if self.features is None:  # a process without a block
            self._allocate(widths[0])
        for tensor in self._sums(any(scored for *_, scored in gathered)):
            dist.all_reduce(tensor, group=processes.group)
        count = sum(min(BLOCK, self.count - block * BLOCK) for block in self.blocks)
        self.moments = replace(self.moments, count=count)

    def _sums(self, scored: bool) -> list[Tensor]:
        assert self.features is not None
        sums = [self.moments.total, self.moments.outer, self.features]
        if scored:
            from driftgen.evaluation.inception import CLASSES

            self.score = self.score or ScoreSums(self.count)
            if self.score.probabilities is None:
                shape = (len(self.score.entropies), CLASSES)
                self.score.probabilities = torch.zeros(shape, dtype=torch.float64, device=self.device)
            self.score.entropies = self.score.entropies.to(self.device)
            sums += [self.score.probabilities, self.score.entropies]
        return sums

    def save(self, path: Path, key: str) -> None:
        """Save the sums of the finished blocks, to resume from."""
        if self.features is None:
            return
        moments, score = self.moments, self.score
        tensors = {
            "count": torch.tensor([moments.count]),
            "total": moments.total,
            "outer": moments.outer,
            "features": self.features,
        }
        if score is not None and score.probabilities is not None:
            tensors |= {"probabilities": score.probabilities, "entropies": score.entropies}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        blocks = " ".join(f"{block}:{digest}" for block, digest in self.blocks.items())
        with atomic_write(path) as scratch:
            checksum = tensors_checksum(sorted(tensors.items()), blocks)
            save_file(tensors, scratch, {"key": key, "blocks": blocks, "checksum": checksum})

    def load(self, path: Path, key: str) -> bool:
        """Restore saved sums; return False if there are none of the same evaluation."""
        try:
            with open_safetensors(path, "sums of an evaluation") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != key:
                    return False
                tensors = {name: file.get_tensor(name).to(self.device) for name in file.keys()}  # noqa: SIM118
                saved = metadata["blocks"]
                if metadata["checksum"] != tensors_checksum(sorted(tensors.items()), saved):
                    return False
                blocks = {int(b): d for b, d in (e.split(":") for e in saved.split())}
        except InputError:  # none, or damaged: computed again
            return False
        self.moments = Moments(int(tensors["count"]), tensors["total"], tensors["outer"])
        self.features = tensors["features"]
        if "probabilities" in tensors:
            self.score = ScoreSums(self.count)
            self.score.probabilities, self.score.entropies = tensors["probabilities"], tensors["entropies"]
        self.blocks = blocks
        return True


def accumulate(
    images: ImageSource,
    encoder: Encoder,
    processes: Distributed,
    *,
    stored: Tensor | None = None,
    partial: Path | None = None,
    key: str = "",
    on_block: Callable[[int, float], None] = lambda done, seconds: None,
) -> Sums:
    """Encode all images and return their sums; every process returns those of all.

    Args:
        images: read block by block, in turn by the processes.
        encoder: of this process.
        processes: that share the work.
        stored: indices of the images whose features are stored; the first ``KEPT`` if None.
        partial: file for the sums of an interrupted evaluation; each process adds its rank.
        key: identity of the evaluation; a partial file of another one is ignored.
        on_block: called with the number of images that this process has finished and the seconds spent.
    """
    if stored is None:
        stored = torch.arange(min(KEPT, images.count))
    sums = Sums(images.count, stored, encoder.device)
    file = None
    if partial is not None:
        file = partial.with_name(f"{partial.name}-{processes.rank}-of-{processes.world_size}.safetensors")
        sums.load(file, key)
    blocks = range(-(-images.count // BLOCK))[processes.rank :: processes.world_size]
    started = saved = time.monotonic()
    done, stopping = 0, False

    def stop(name: str) -> None:
        nonlocal stopping
        stopping = True

    with handle_signals(stop):
        for block in blocks:
            done += min(BLOCK, images.count - block * BLOCK)
            if block in sums.blocks:
                continue
            pixels = images.load(block)
            sums.update(block, pixels, *encoder.encode(pixels))
            on_block(done, time.monotonic() - started)
            if file is not None and (stopping or time.monotonic() - saved > SAVE_SECONDS):
                sums.save(file, key)
                saved = time.monotonic()
            if stopping:
                raise KeyboardInterrupt
    sums.reduce(processes)
    return sums
