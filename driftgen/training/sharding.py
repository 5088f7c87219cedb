"""FSDP2: weights, gradients, averages and optimizer state sharded over processes.

Files hold whole tensors, so that a run can be resumed without FSDP or with another number of processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from driftgen.features.stack import DecodeFirst, FeatureStack
from driftgen.support.distributed import Distributed
from driftgen.training.task import LoopConfig

__all__ = ["copy_like", "gather_state", "make_mesh", "reshard", "shard", "shard_features", "shard_like"]


def make_mesh(config: LoopConfig, distributed: Distributed) -> DeviceMesh | None:
    """Return the mesh to shard over; None if every process holds everything."""
    if not config.fsdp or distributed.group is None:
        return None
    return init_device_mesh(distributed.device.type, (distributed.world_size,))


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module over the mesh, on the mesh's device.

    Blocks are sharded one by one, and gathered one by one when they are called. A module on the CPU is never
    whole on the device.
    """
    for block in _blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters of a sharded module that was called without a backward pass."""
    if isinstance(module, FSDPModule):
        module.reshard()


def shard_features(phi: FeatureStack, mesh: DeviceMesh) -> None:
    """Shard every encoder of φ; encoders are called by ``features``."""
    # FSDP warns about in-place changes of features that are views; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for _, part, _ in phi.parts:
        encoder = part.encoder if isinstance(part, DecodeFirst) else part
        if isinstance(encoder, nn.Module):
            shard(encoder, mesh)
            register_fsdp_forward_method(encoder, "features")


def gather_state(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Gather sharded tensors in host memory; other tensors stay where they are.

    A collective of all processes. Those that do not ``keep`` the tensors get an empty dict.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # One at a time: together they may exceed the memory of the device.
        whole = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if keep:
            state[name] = whole
    return state


def copy_like(whole: Tensor, parameter: Tensor | None) -> Tensor:
    """Return a copy of an optimizer state from a file, with the strides of its parameter.

    Updates must not write to pages mapped from the file, and fused Adam needs moments with the strides of
    the parameters, which are channels-last in convolutional networks on a GPU.
    """
    if parameter is None or isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole.clone()
    return torch.empty_like(parameter, dtype=whole.dtype, device=whole.device).copy_(whole)


def shard_like(whole: Tensor, example: Tensor | None) -> Tensor:
    """Return this process's shard of a whole tensor if ``example`` is sharded, else the tensor."""
    if not isinstance(example, DTensor) or whole.shape != example.shape:
        return whole
    with torch.no_grad():
        return distribute_tensor(whole, example.device_mesh, example.placements, src_data_rank=None)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the innermost repeated modules: of the classes that occur in module lists and have children.

    Innermost, because an entry of a list may be a container whose ``forward`` is never called.
    """
    plain = (nn.ModuleList, nn.Sequential)
    lists = [m for m in module.modules() if isinstance(m, plain)]
    kinds = {type(m) for parts in lists for m in parts if type(m) not in plain and list(m.children())}
    blocks = [m for m in module.modules() if m is not module and type(m) in kinds and list(m.parameters())]
    return [m for m in blocks if not any(type(inner) in kinds for inner in m.modules() if inner is not m)]
