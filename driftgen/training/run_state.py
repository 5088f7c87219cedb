"""The tensors of a checkpoint: collected from a run, and restored into one."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.training.checkpoint import Checkpoint
from driftgen.training.ema import EMA, unwrapped
from driftgen.training.optimizer import state_names
from driftgen.training.sharding import copy_like, shard_like
from driftgen.training.task import Task
from driftgen.training.update import Update

__all__ = ["restore_tensors", "state_tensors"]

PARTS = "model", "ema", "task", "optimizer", "random"


def state_tensors(task: Task, ema: EMA, update: Update, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint; those of a sharded model are sharded.

    Names begin with the part of the run: model, ema, task, optimizer or random.
    """
    tensors: dict[str, Tensor] = {}
    tensors |= {f"model/{k}": v for k, v in unwrapped(task.model).state_dict().items()}
    tensors |= {f"ema/{k}": v for k, v in ema.state_dict().items()}
    tensors |= {f"task/{k}": v for k, v in task.state_dict().items()}
    for index, state in update.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{k}": torch.as_tensor(v) for k, v in state.items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_tensors(
    checkpoint: Checkpoint, task: Task, ema: EMA, update: Update, device: torch.device
) -> list[str]:
    """Restore the tensors of :func:`state_tensors`, sharded where the model is; return notes.

    Parameters that another optimizer has updated, before ``optim.kind`` was changed, start without state.
    """
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for name, tensor in checkpoint.tensors.items():
        part, rest = name.split("/", 1)
        parts[part][rest] = tensor
    for part, holder in (("model", unwrapped(task.model)), ("ema", ema)):
        own = holder.state_dict()
        holder.load_state_dict({k: shard_like(v, own.get(k)) for k, v in parts[part].items()})
    task.load_state_dict(parts["task"])
    state: dict[int, dict[str, Tensor]] = {}
    parameters = update.parameters
    for name, tensor in parts["optimizer"].items():
        index, key = name.split("/", 1)
        parameter = None if key == "step" else parameters[int(index)]
        state.setdefault(int(index), {})[key] = shard_like(copy_like(tensor, parameter), parameter)
    others = [i for i, held in state.items() if held.keys() != state_names(update.optimizer, parameters[i])]
    for other in others:
        del state[other]
    groups = update.optimizer.state_dict()["param_groups"]
    update.optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(parts["random"]["cpu"].clone())
    if device.type == "cuda" and "cuda" in parts["random"]:
        torch.cuda.set_rng_state(parts["random"]["cuda"].clone(), device)
    if not others:
        return []
    return [
        f"{len(others)} of {len(parameters)} parameters were updated by another optimizer in "
        f"{checkpoint.path.name} (optim.kind): their moments start at zero"
    ]
