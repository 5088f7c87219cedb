"""FSDP2: weights, gradients, averages and the optimiser's state in shares, one in each process.

Whatever is written holds whole tensors, so that a run may go on without it or with more processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from driftgen.features.stack import DecodeFirst, FeatureStack
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.distributed import Distributed

__all__ = ["gather_state", "make_mesh", "shard", "shard_features", "shard_like"]


def make_mesh(config: TrainConfig | PretrainConfig, processes: Distributed) -> DeviceMesh | None:
    """Who holds the shares; None where every process holds everything."""
    if not config.fsdp or processes.group is None:
        return None
    return init_device_mesh(processes.device.type, (processes.world_size,))


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves this process its share, on the mesh's device; only one block is there whole at a time.

    Blocks are shared one by one, and gathered one by one when they are called. A module that is still on the
    CPU is never whole on the device.
    """
    for block in _blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def shard_features(phi: FeatureStack, mesh: DeviceMesh) -> None:
    """Shares every encoder of φ, which is called by ``features``."""
    # Said of features that are views, lest they be changed in place; none is.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for _, part, _ in phi.parts:
        encoder = part.encoder if isinstance(part, DecodeFirst) else part
        if isinstance(encoder, nn.Module):
            shard(encoder, mesh)
            register_fsdp_forward_method(encoder, "features")


def gather_state(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors, in main memory where they were shared. All processes must call it; those that do not
    ``keep`` them get none.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # One at a time: all of them may be more than the device can hold.
        whole = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole
    return found


def shard_like(whole: Tensor, example: Tensor | None) -> Tensor:
    """This process's share of a tensor that all of them have, if that is how ``example`` is held."""
    if not isinstance(example, DTensor) or whole.shape != example.shape:
        return whole
    with torch.no_grad():
        return distribute_tensor(whole, example.device_mesh, example.placements, src_data_rank=None)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The innermost modules that a network repeats: of the kinds that stand in its lists and have parts.

    Innermost, as a list's entry may be a mere container whose own ``forward`` nobody calls.
    """
    plain = (nn.ModuleList, nn.Sequential)
    lists = [m for m in module.modules() if isinstance(m, plain)]
    kinds = {type(m) for parts in lists for m in parts if type(m) not in plain and list(m.children())}
    found = [m for m in module.modules() if m is not module and type(m) in kinds and list(m.parameters())]
    return [m for m in found if not any(type(inner) in kinds for inner in m.modules() if inner is not m)]
