"""Compile networks part by part, so that a repeated block is compiled once and not once per repetition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["compile_blocks", "compile_parts", "new_parameters", "to_channels_last"]

# Recompilations of one function for other shapes and dtypes, beyond which PyTorch silently stops compiling.
RECOMPILE_LIMIT = 64


def compile_blocks(network: nn.Module, *kinds: type[nn.Module]) -> None:
    """Compile the outermost modules of these classes in place; names and weights stay the same.

    Shapes are static: compiling blocks of several widths for dynamic shapes would take longer and run slower.
    ``copy.deepcopy``, as for an EMA, returns modules that are not compiled.
    """
    for child in network.children():
        if isinstance(child, kinds):
            child.compile(dynamic=False)
        else:
            compile_blocks(child, *kinds)


def compile_parts(network: nn.Module) -> None:
    """Compile a network in place: by its own ``compile_parts`` method if it has one, else as a whole."""
    limit = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, RECOMPILE_LIMIT)
    # Recompute cheap elementwise results in the backward pass even if a matrix product reads them: they are a
    # large part of a block's activations.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # No autocast in the backward pass, as without a compiler: gates would get 16-bit gradients.
    torch._functorch.config.backward_pass_autocast = "off"
    # Products that are left in float32 need its precision.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    own = getattr(network, "compile_parts", None)
    if callable(own):
        own()
    else:
        network.compile(dynamic=False)


def to_channels_last(network: nn.Module) -> None:
    """Convert the weights to channels-last memory format, the fastest for compiled convolutions on a GPU."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@contextmanager
def new_parameters() -> Iterator[None]:
    """Make dtype and device conversions create new parameters.

    PyTorch 2.11 does not notice parameters converted in place: compiled code would keep their former dtype.
    """
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
