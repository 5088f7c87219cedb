"""Call a generator at few batch sizes, each compiled or captured once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.base import Noise
from driftgen.ops.compile import compile_parts
from driftgen.ops.cuda_graphs import GraphedFunction, check_compiler, static_shapes
from driftgen.ops.padding import batches, pad_rows

__all__ = ["BatchedCall"]

# Samples of the first part of a captured call that has one batch: the noise of the others is drawn while the
# device computes it. Calls that are not captured are host-bound, so more of them would take longer.
FIRST = {"cuda": 32}


class BatchedCall:
    """x = f(ε, c, α) in float32, with batches padded to given sizes.

    Args:
        generator: f, whose blocks are compiled in place if ``compiled``.
        compiled: compile; Python's errors of the compiler become InputError.
        graphs: on an NVIDIA GPU, capture the call of each size in a CUDA graph and replay it.
        max_graphs: number of sizes whose graphs are kept, the most recent ones.
    """

    def __init__(self, generator: nn.Module, *, compiled: bool, graphs: bool, max_graphs: int) -> None:
        self.generator, self.compiled = generator, compiled
        if compiled:
            try:
                check_compiler(next(generator.parameters()).device)
                compile_parts(generator)
            except RuntimeError as error:
                raise _not_compiled(error) from None
        self.graphed = GraphedFunction(self._evaluate, max_graphs) if graphs else None

    def __call__(self, noise: Noise, labels: Tensor, alpha: Tensor, size: int) -> Tensor:
        """Return samples for the rows of the noise, computed in a batch of ``size`` rows."""
        call: Any = self._evaluate if self.graphed is None or not labels.is_cuda else self.graphed
        try:
            samples: Tensor = call(*(pad_rows(x, size) for x in (*noise, labels, alpha)))
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _not_compiled(error) from None
        return samples[: len(labels)]

    def batches(self, count: int, most: int) -> list[int]:
        """Return the sizes of the batches of a call with ``count`` samples, at most ``most`` each."""
        first = FIRST.get(next(self.generator.parameters()).device.type)
        if first is None or self.graphed is None or not 4 * first <= count <= most:
            return batches(count, most)
        if count == most:
            return [first, most - first]
        return batches(count, 2 * first)  # few sizes, each of which is compiled, and little padding

    def forget(self) -> None:
        """Drop all captured graphs, when the weights move."""
        if self.graphed is not None:
            self.graphed.forget()

    def _evaluate(self, gaussian: Tensor, style: Tensor, labels: Tensor, alpha: Tensor) -> Tensor:
        if not self.compiled:
            return self.generator(Noise(gaussian, style), labels, alpha).float()  # type: ignore[no-any-return]
        with static_shapes():
            return self.generator(Noise(gaussian, style), labels, alpha).float()  # type: ignore[no-any-return]


def _not_compiled(error: RuntimeError) -> InputError:
    why = next(iter(str(error).splitlines()), type(error).__name__)
    return InputError(f"torch.compile fails: {why}; sample without compile")
