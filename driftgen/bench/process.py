"""One process of a distributed training step; started by ``driftgen bench scaling``.

    python -m torch.distributed.run --nproc-per-node 2 -m driftgen.bench.process OUT REPEATS

A small UNet without encoder, float32, gloo. Counts the collectives of a step and their bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from driftgen.bench.clock import timed
from driftgen.drift.loss import DriftingLoss
from driftgen.features.stack import FeatureStack
from driftgen.generators.unet import UNet2D
from driftgen.support.distributed import Distributed
from driftgen.training.config import Optimizer
from driftgen.training.optimizer import clip, make_optimizer
from driftgen.training.step import DriftStep, guided_inputs

__all__ = ["Collectives", "main"]

CLASSES, SAMPLES, SIDE = 8, 16, 16
# Less than 1 MiB of weights: all gradients fit into the first bucket of DistributedDataParallel.
SMALL: dict[str, Any] = {
    "input_size": SIDE,
    "widths": (16, 32),
    "blocks": (1, 1),
    "attention_levels": (),
    "condition_size": 64,
    "style_codebooks": 4,
}


class Collectives(TorchDispatchMode):
    """Records names and bytes of collectives, and whether a call of ``loss`` made them."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = False
        self.seen: list[tuple[bool, str, int]] = []
        loss.register_forward_pre_hook(lambda *_: self._inside(True))
        loss.register_forward_hook(lambda *_: self._inside(False))

    def _inside(self, inside: bool) -> None:
        self.inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            self.seen.append((self.inside, func.name(), sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


def main(out: Path, repeats: int) -> None:
    """Time a step that all processes share; the first process writes the record."""
    processes = Distributed.start("cpu")
    torch.manual_seed(0)
    generator = UNet2D(num_classes=CLASSES, **SMALL)
    phi = FeatureStack()
    model = DistributedDataParallel(generator) if processes.group is not None else generator
    loss = DriftingLoss(process_group=processes.group)
    step = DriftStep(model, phi.features, loss, generated=SAMPLES)
    optimizer = make_optimizer(generator.parameters(), Optimizer())
    part = processes.shard(CLASSES, "classes")
    labels = torch.arange(CLASSES)[part]
    alpha = torch.ones(len(labels))
    inputs = guided_inputs(
        generator.sample_noise(len(labels) * SAMPLES),
        labels,
        alpha,
        torch.randn(len(labels), SAMPLES, *generator.sample_shape),
        torch.randn(len(labels), 4, *generator.sample_shape),
        generated=SAMPLES,
    )

    def run() -> None:
        optimizer.zero_grad()
        step(inputs)
        clip(generator.parameters(), 2.0)
        optimizer.step()

    timing = timed(run, processes.device, repeats, least_seconds=0)
    with Collectives(loss) as collectives:
        run()
    in_loss = [name for inside, name, _ in collectives.seen if inside]
    if processes.is_main:
        record = {
            "processes": processes.world_size,
            "seconds": timing.seconds,
            "first_call_seconds": timing.first_call_seconds,
            "peak_bytes": timing.peak_bytes,
            "loss_collectives": len(in_loss),
            "gradient_collectives": len(collectives.seen) - len(in_loss),
            "collective_bytes": sum(size for _, _, size in collectives.seen),
            "collectives": [name for _, name, _ in collectives.seen],
            "parameters": sum(p.numel() for p in generator.parameters()),
        }
        out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
