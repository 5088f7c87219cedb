"""Networks compiled piece by piece: what a network repeats is compiled once, not once for each repetition."""

from __future__ import annotations

import warnings

import torch
from torch import nn

__all__ = ["compile_blocks", "compile_parts", "to_channels_last"]

# Compiled forms of one piece of code, by shape and type: more than this, and PyTorch would silently stop
# compiling.
MOST_FORMS = 64


def compile_blocks(network: nn.Module, *kinds: type[nn.Module]) -> None:
    """Compiles every module of these kinds in place, the outermost ones; names and weights stay.

    For the sizes they get: blocks of other widths are no reason to compile for any size, which takes longer
    and gives slower code. ``copy.deepcopy`` (such as that of averaged weights) gives plain modules.
    """
    for child in network.children():
        if isinstance(child, kinds):
            child.compile(dynamic=False)
        else:
            compile_blocks(child, *kinds)


def compile_parts(network: nn.Module) -> None:
    """Compiles a network in place: by its own ``compile_parts`` if it has one, else as a whole."""
    limit = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, MOST_FORMS)
    # What one kernel makes of saved tensors is made again in the backward pass, even if a product wants it
    # written: silu(gate) · value takes a seventh of a DiT block's activations, and 1% of its time.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # Off on the way back, as without a compiler: else gates would get the gradients of 16-bit products.
    torch._functorch.config.backward_pass_autocast = "off"
    # What is in float32 here is so on purpose.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    own = getattr(network, "compile_parts", None)
    if callable(own):
        own()
    else:
        network.compile(dynamic=False)


def to_channels_last(network: nn.Module) -> None:
    """Lays weights out as compiled convolutions on a GPU are fastest with; the numbers stay."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
