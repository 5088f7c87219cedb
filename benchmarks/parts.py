"""Rates of what a training step and a sampler are made of, in PyTorch's own kernels: the limits of ours.

    python -m benchmarks.parts [--json FILE]

On an NVIDIA GPU, bfloat16: the products of DiT B/2 and L/2 at 256 images (also in 8 bits where the card can),
attention, and the convolutions of the paper's encoder by layout and number of samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.results import save
from driftgen.bench.clock import timed

TOKENS = 256 * 272
PRODUCTS = {
    "B/2": [(768, 2304), (768, 768), (768, 4096), (2048, 768)],
    "L/2": [(1024, 3072), (1024, 1024), (1024, 5504), (2752, 1024)],
}
MAPS = [(256, 32), (512, 16), (1024, 8), (2048, 4)]
EIGHT_BITS = (8, 9)  # capability from which on cards have them


def seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """Of one call, when calls follow each other."""
    return timed(call, torch.device("cuda"), repeats).queued_seconds or 0.0


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def row(what: str, time: float, operations: float) -> dict[str, Any]:
    found = {"what": what, "seconds": time, "tflops": operations / time / 1e12}
    print(f"{what:48} {time * 1000:8.3f} ms {found['tflops']:7.0f} TFLOP/s", flush=True)
    return found


def products() -> list[dict[str, Any]]:
    rows = []
    for preset, sizes in PRODUCTS.items():
        for inputs, outputs in sizes:
            x, w, b = draw(TOKENS, inputs), draw(outputs, inputs), draw(outputs)
            count, name = 2 * TOKENS * inputs * outputs, f"{preset} {inputs} -> {outputs}"
            rows.append(row(f"{name}, bfloat16", seconds(lambda x=x, w=w, b=b: F.linear(x, w, b)), count))
            if torch.cuda.get_device_capability() < EIGHT_BITS:
                continue
            x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
            scales = torch.ones(TOKENS, 1, device="cuda"), torch.ones(1, outputs, device="cuda")

            def eight(x8: Any = x8, w8: Any = w8, s: Any = scales, b: Any = b) -> torch.Tensor:
                return torch._scaled_mm(x8, w8, *s, bias=b, out_dtype=torch.bfloat16, use_fast_accum=True)

            rows.append(row(f"{name}, 8 bits, scales by row", seconds(eight), count))
    return rows


def attention() -> list[dict[str, Any]]:
    rows = []
    q, k, v = (draw(256, 12, 272, 64) for _ in range(3))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            time = seconds(lambda: F.scaled_dot_product_attention(q, k, v))
        rows.append(row(f"attention, {backend.name.lower()}", time, 4 * 256 * 12 * 272**2 * 64))
    return rows


def convolutions() -> list[dict[str, Any]]:
    rows, last = [], torch.channels_last
    for channels, side in MAPS:
        w = draw(channels, channels, 3, 3)
        for samples in (256, 512, 640):
            x = draw(samples, channels, side, side)
            count = 2 * samples * channels**2 * 9 * side**2
            for name, layout in (("NCHW", torch.contiguous_format), ("NHWC", last)):
                inputs = x.to(memory_format=layout), w.to(memory_format=layout)
                time = seconds(lambda i=inputs: F.conv2d(*i, padding=1), 5)
                rows.append(row(f"conv {samples} x {channels} x {side} x {side}, {name}", time, count))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.parts needs an NVIDIA GPU")
    rows = products() + attention() + convolutions()
    save(args.json, "seconds of a call among others that do not wait for each other", {"rows": rows})


if __name__ == "__main__":
    main()
