"""What sampling does between the matrix products of a feed-forward layer in 8-bit numbers, as a GPU kernel
without gradients.

The modules in PyTorch do the same wherever it does not run; ``covers_swiglu`` says where it does. To
``torch.compile`` it is one operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.devices import power_of_two
from driftgen.generators.shared_ops import has_kernels

__all__ = ["covers_swiglu", "swiglu_in_eight_bits"]

MOST_WIDTH = 8192
SWIGLU_WARPS = 4
SWIGLU_ROWS = 1


def covers_swiglu(both: Tensor) -> bool:
    """Whether :func:`swiglu_in_eight_bits` takes these rows ``[..., 2 · width]``: width up to 8192, without
    gradient.
    """
    return not torch.is_grad_enabled() and has_kernels(both) and both.shape[-1] <= 2 * MOST_WIDTH


@torch.library.custom_op("driftgen::swiglu_in_eight_bits", mutates_args=())
def swiglu_in_eight_bits(both: Tensor) -> tuple[Tensor, Tensor]:
    """``fp8.quantize`` of silu(gate) · value, from ``[rows, 2 · width]``: ``[rows, width]`` and the scales
    ``[rows, 1]``.
    """
    from driftgen.generators.sampling_kernels import swiglu_kernel

    both = both.contiguous()
    rows, width = both.shape[0], both.shape[1] // 2
    eights = both.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = both.new_empty(rows, 1, dtype=torch.float32)
    block = power_of_two(width)
    warps = SWIGLU_WARPS if block <= 2048 else 2 * SWIGLU_WARPS
    with torch.cuda.device_of(both):
        swiglu_kernel[(-(-rows // SWIGLU_ROWS),)](
            both, eights, scales, rows, WIDTH=width, BLOCK=block, ROWS=SWIGLU_ROWS, num_warps=warps
        )
    return eights, scales


@swiglu_in_eight_bits.register_fake
def _(both: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = both.shape[0], both.shape[1] // 2
    eights = both.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return eights, both.new_empty(rows, 1, dtype=torch.float32)
