"""Measure a tokenizer on real images: PSNR of encode and decode, spread of the latents, images per second.

    python results/tokenizer-taef2/measure.py --tiny-encoder taef2_encoder.pth \\
        --tiny-decoder taef2_decoder.pth --images tiny_imagenet.npz [--count 1000] [--out FOLDER]

``--vae FOLDER`` measures an SD-VAE instead. The images are the validation set of an npz of concatenated JPEG
files (``val_jpeg``, ``val_off``).
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

import driftgen
from driftgen.support.atomic_write import atomic_write
from driftgen.tokenizers import SDVAE, TinyVAE, Tokenizer


def read_images(path: Path, count: int) -> Tensor:
    """Return ``[N, 3, H, W]`` uint8, ``count`` images spread evenly over the file sorted by class."""
    with np.load(path) as archive:
        data, offsets = archive["val_jpeg"], archive["val_off"]
    total = len(offsets) - 1
    chosen = np.linspace(0, total - 1, min(count, total)).round().astype(int)
    files = (io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes()) for i in chosen)
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Return 10 log10(255² / mean squared error) of each image."""
    error = (images.double() - others.double()).square().mean((1, 2, 3))
    return 10 * torch.log10(255**2 / error)


def summary(values: Tensor) -> dict[str, float]:
    return {
        "mean": values.mean().item(),
        "std": values.std().item(),
        "min": values.min().item(),
        "max": values.max().item(),
    }


def measure(tokenizer: Tokenizer, images: Tensor, device: str) -> tuple[dict[str, Any], Tensor]:
    """Return the figures, and the reconstructions as uint8."""
    x = (images.float() / 127.5 - 1).to(device)

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with torch.inference_mode():
        tokenizer.decode(tokenizer.encode(x[:4]))  # warm up
        start = now()
        latents = tokenizer.encode(x, torch.Generator().manual_seed(0))
        encoded = now()
        decoded = tokenizer.decode(latents)
        end = now()
    values = ((decoded.float().cpu() + 1) * 127.5).clamp(0, 255)
    rounded = values.round().to(torch.uint8)
    flat = latents.float().cpu().transpose(0, 1).flatten(1)
    figures = {
        "images": len(images),
        "size": list(images.shape[2:]),
        "latent": list(latents.shape[1:]),
        "psnr_db": summary(psnr(images, values)),
        "psnr_uint8_db": summary(psnr(images, rounded)),
        "latents": {"mean": flat.mean().item(), "std": flat.std().item(), "max_abs": flat.abs().max().item()},
        "latent_mean_of_channels": summary(flat.mean(1)),
        "latent_std_of_channels": summary(flat.std(1)),
        "encoded_images_per_second": len(images) / (encoded - start),
        "decoded_images_per_second": len(images) / (end - encoded),
    }
    return figures, rounded


def strip(images: Tensor, others: Tensor, zoom: int = 2) -> Image.Image:
    """Return the originals above the reconstructions."""
    rows = [torch.cat(list(row), dim=2) for row in (images, others)]
    pixels = torch.cat(rows, dim=1).permute(1, 2, 0).numpy()
    return Image.fromarray(pixels).resize(
        (pixels.shape[1] * zoom, pixels.shape[0] * zoom), Image.Resampling.NEAREST
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny-encoder", type=Path)
    parser.add_argument("--tiny-decoder", type=Path)
    parser.add_argument("--vae", help="folder or Hub name of an SD-VAE, in place of the two files")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for metrics.json and reconstructions.png")
    args = parser.parse_args()
    if args.vae is None and None in (args.tiny_encoder, args.tiny_decoder):
        parser.error("give --tiny-encoder and --tiny-decoder, or --vae")
    tokenizer: SDVAE | TinyVAE
    if args.vae is not None:
        tokenizer = SDVAE(args.vae, batch_size=args.batch_size)
    else:
        tokenizer = TinyVAE.from_files(args.tiny_encoder, args.tiny_decoder, batch_size=args.batch_size)
    images = read_images(args.images, args.count)
    figures, decoded = measure(tokenizer.to(args.device), images, args.device)
    table = Table(title=f"{figures['images']} images {figures['size']}, latents {figures['latent']}")
    for column in ("what", "mean", "std", "least", "most"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, key in {
        "PSNR, dB": "psnr_db",
        "PSNR rounded to uint8, dB": "psnr_uint8_db",
        "mean of a latent channel": "latent_mean_of_channels",
        "std of a latent channel": "latent_std_of_channels",
    }.items():
        table.add_row(what, *(f"{figures[key][part]:.3f}" for part in ("mean", "std", "min", "max")))
    console = Console(width=110)
    console.print(table)
    rates = [figures[f"{what}_images_per_second"] for what in ("encoded", "decoded")]
    console.print(f"encodes {rates[0]:.1f} and decodes {rates[1]:.1f} images a second")
    if args.out is None:
        return
    # File names only, without the folders of this machine.
    shown = {key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()}
    shown["out"] = args.out.as_posix() if not args.out.is_absolute() else args.out.name
    if args.vae is not None and Path(args.vae).exists():
        shown["vae"] = Path(args.vae).name
    given = (f"--{key.replace('_', '-')} {value}" for key, value in shown.items() if value is not None)
    cpu = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    record = {
        "command": f"python results/tokenizer-taef2/measure.py {' '.join(given)}",
        "driftgen": driftgen.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name() if args.device == "cuda" else cpu,
        "evaluator": "PSNR of each image over its pixels and channels, on 0 ... 255, clipped; then the mean",
        "tokenizer": tokenizer.options(),
        "figures": figures,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.out / "metrics.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    chosen = torch.linspace(0, len(images) - 1, min(12, len(images))).round().long()
    with atomic_write(args.out / "reconstructions.png") as scratch:
        strip(images[chosen], decoded[chosen]).save(scratch)


if __name__ == "__main__":
    main()
