"""What single measures bring to a whole training step: the step as it is, and with one thing changed.

    python -m benchmarks.levers [--json FILE]

On a GPU; the paper's ablation configuration with 8 classes, compiled, as ``driftgen bench step --compile``
measures it. "overlapped": real samples are encoded on a second stream while the generator runs.
"checkpoint_blocks": every block of the generator runs a second time instead of keeping its activations.
"PyTorch's attention": without kernels of our own for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import save
from driftgen.bench import step_bench as bench
from driftgen.bench.clock import find_device, free, timed
from driftgen.generators import dit
from driftgen.training.step import DriftStep, Features


def overlapping(real: Callable[..., Any], side: torch.cuda.Stream) -> Callable[..., Any]:
    """``DriftStep.__call__`` with the real samples encoded first, on another stream."""

    def whole(self: DriftStep, drawn: Any) -> Any:
        here = torch.cuda.current_stream()
        side.wait_stream(here)  # with all that was done with the memory it uses anew
        with torch.cuda.stream(side):
            found = self.encode_real(drawn)

        def encoded(_: Any) -> tuple[Features, Features]:
            here.wait_stream(side)
            return found

        self.encode_real = encoded  # type: ignore[method-assign]
        try:
            return real(self, drawn)
        finally:
            del self.encode_real

    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = find_device("cuda")
    sizes = replace(bench.default_sizes(device), compile=True)
    rows: list[dict[str, Any]] = []

    def measure(what: str, built: bench.Built) -> None:
        found = timed(built.run, device, args.repeats, warmup=2, meter=False)
        peak = None if found.peak_bytes is None else found.peak_bytes + built.held_bytes
        rows.append({"what": what, "seconds": found.seconds, "queued_seconds": found.queued_seconds})
        rows[-1] |= {"peak_bytes": peak, "first_call_seconds": found.first_call_seconds}
        print(json.dumps(rows[-1]), flush=True)

    built = bench.build_step(sizes, device)
    measure("as it is", built)
    whole = DriftStep.__call__
    DriftStep.__call__ = overlapping(whole, torch.cuda.Stream())  # type: ignore[method-assign]
    measure("overlapped", built)
    DriftStep.__call__ = whole  # type: ignore[method-assign]
    measure("as it is", built)
    built.generator.checkpoint_blocks = True
    measure("checkpoint_blocks", built)
    del built
    free(device)
    covers = dit.supports_attention
    dit.supports_attention = lambda *_: False
    torch.compiler.reset()
    measure("PyTorch's attention", bench.build_step(sizes, device))
    dit.supports_attention = covers
    evaluator = "seconds of a step: median of the repeats after three; queued: a step among others"
    save(args.json, evaluator, {"attention_float32": sizes.attention_float32, "rows": rows})


if __name__ == "__main__":
    main()
