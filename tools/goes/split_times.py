"""Time a sampling call of one batch by the size of its first part, beside the host's share of it.

python tools/goes/split_times.py [--preset B/2] [--batch 256] [--device cuda]
"""

from __future__ import annotations

import argparse
import functools

import torch

from driftgen.bench.clock import timed
from driftgen.bench.sampling_bench import make_generator
from driftgen.generators import batched_call
from driftgen.pipeline import DriftPipeline


def main() -> None:
    """Print milliseconds, medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="B/2")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device, batch = torch.device(options.device), options.batch
    network = make_generator(options.preset).to(device, torch.bfloat16).eval()
    for rows in (16, 32, 64, batch):
        draw = functools.partial(network.sample_noise, rows, torch.Generator().manual_seed(0))
        noise = timed(draw, device, 10)
        print(f"noise of {rows}: {1e3 * noise.seconds:.2f} ms", flush=True)
    pipe = DriftPipeline(network, batch_size=batch).compile()
    # Each compiles its sizes: today's first, and again at the end, when the clock of the GPU is up.
    for rows in (32, batch, 64, 16, 32):
        batched_call.FIRST[device.type] = rows
        for output in ("latent", "tensor"):
            call = functools.partial(pipe, [0] * batch, seed=0, output=output)
            if output == "tensor" and network.config.in_channels == 4:
                continue  # the tokenizer's time is not the pipeline's
            each = timed(call, device, 10, warmup=3)
            print(f"{batch}, {rows} first, {output}: {1e3 * each.seconds:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
