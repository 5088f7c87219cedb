"""Draw the noise of many samples in several threads, with the bits of one thread.

A seed gives one stream of numbers, in which sample follows sample. Most of the time goes into turning uniform
numbers into normal ones, not into the stream itself. So this thread runs ahead through the stream, notes the
state of the generator at every few samples, and other threads draw these samples from there.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["draw_rows"]

LEAST = 2**18  # values below which threads do not pay off
ROWS = 8  # samples that a thread draws at a time
FEW = 3  # threads, beside the one that runs ahead, below which they bring little
BLOCK = 16  # PyTorch draws normal values in blocks of this size, from one number of the stream each


def draw_rows(
    gaussian: Tensor, style: Tensor, entries: int, generator: torch.Generator, threads: int | None = None
) -> None:
    """Fill ``gaussian`` ``[n, ...]`` and ``style`` ``[n, K]`` row by row: ε ~ N(0, I), then style indices.

    Results and the final state of ``generator`` do not depend on ``threads``, by default those of PyTorch.
    """
    threads = torch.get_num_threads() if threads is None else threads
    regular = gaussian.device.type == "cpu" and gaussian[:1].numel() % BLOCK == 0
    if threads < FEW or gaussian.numel() < LEAST or not regular or entries > 2**31:
        _draw(gaussian, style, entries, generator)
        return
    before = generator.get_state()
    if not _draw_in_threads(gaussian, style, entries, generator, threads):
        generator.set_state(before)
        _draw(gaussian, style, entries, generator)


def _draw(gaussian: Tensor, style: Tensor, entries: int, generator: torch.Generator) -> None:
    for normal, indices in zip(gaussian, style, strict=True):
        normal.normal_(generator=generator)
        indices.random_(entries, generator=generator)


def _draw_in_threads(
    gaussian: Tensor, style: Tensor, entries: int, generator: torch.Generator, threads: int
) -> bool:
    """Return True if every thread ended where the next one began, which proves the result."""
    states, drawn = [], []
    inference = torch.is_inference_mode_enabled()  # of this thread alone: the others must enter it too
    skipped = torch.empty(ROWS * (gaussian[0].numel() + style[0].numel()), dtype=torch.int32)

    def draw(first: int, state: Tensor) -> Tensor:
        with torch.inference_mode(inference):
            own = torch.Generator()
            own.set_state(state)
            _draw(gaussian[first : first + ROWS], style[first : first + ROWS], entries, own)
            return own.get_state()

    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(gaussian), ROWS):
            state = generator.get_state()
            states.append(state)
            future: Future[Tensor] = pool.submit(draw, first, state)
            drawn.append(future)
            if first + ROWS < len(gaussian):
                skipped.random_(generator=generator)  # as many numbers of the stream as the rows take
        ends = [future.result() for future in drawn]
    generator.set_state(ends[-1])
    return all(torch.equal(end, begin) for end, begin in zip(ends, states[1:], strict=False))
