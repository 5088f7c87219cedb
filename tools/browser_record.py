"""Measure images in Chromium, compare them with PyTorch, take a picture: ``python -m tools.browser_record``.

Writes ``browser.json`` and ``browser.png`` to results/browser.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from driftgen.generators import Noise
from driftgen.pipeline import DriftPipeline
from driftgen.studio.browser_page import RECORD, write_page
from driftgen.studio.page_server import open_server
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.images import to_uint8
from driftgen.support.portable_noise import portable_noise
from driftgen.support.provenance import provenance
from tools.chromium import open_chromium

__all__ = ["main"]

OUT = Path(__file__).parents[1] / "results" / "browser"
SIZE = (1360, 780)
REPEATS = 20
# The stored weights of cifar10 have 8 bits.
MODELS = (("cifar10", "int8"), ("cifar10", "float32"), ("digits", "float32"))
DONE = "page.ready && page.images.length === page.settings.number"


@torch.no_grad()
def _by_python(pipe: DriftPipeline, record: dict[str, Any], n: int) -> torch.Tensor:
    """Compute the page's first images in PyTorch: seed 0, each class in turn."""
    noise = portable_noise(record["noise"]["tensors"], n, seed=0)
    style = torch.from_numpy(noise["style"]) if "style" in noise else torch.zeros(n, 0, dtype=torch.long)
    labels = torch.arange(n) % record["classes"]["number"]
    alpha = torch.full((n,), float(record["guidance"]["default"]))
    samples = pipe.generator(Noise(torch.from_numpy(noise["noise"]), style), labels, alpha)
    return pipe.tokenizer.decode(samples).float().clamp(-1, 1)


def _measure(
    browser: Any, pipe: DriftPipeline, name: str, dtype: str, picture: Path | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_page(pipe, Path(temporary) / "page", name=name, dtype=dtype).parent
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        with open_server(folder) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_function(DONE, timeout=300_000)
            number = page.evaluate("page.settings.number")
            values = page.evaluate("page.values.flatMap((batch) => [...batch])")
            right = _by_python(pipe, record, number)
            found = torch.tensor(np.array(values, np.float32)).view_as(right)
            page.wait_for_function("page.walk.last !== null")
            if picture:
                page.screenshot(path=picture)
            each = []
            for _ in range(REPEATS):
                before = page.evaluate("page.request")
                page.click("#again")
                page.wait_for_function(f"page.request > {before} && {DONE}", timeout=300_000)
                each.append(page.evaluate("page.report.milliseconds") / number)
            page.click("#play")
            page.wait_for_timeout(2000)
            frames, rates = [], []
            for _ in range(REPEATS):
                page.wait_for_timeout(250)
                frames.append(page.evaluate("page.walk.last.milliseconds"))
                rates.append(page.evaluate("page.walk.frames.length"))
            facts = page.inner_text("#facts")
            page.close()
            server.shutdown()
        pixels = np.abs(to_uint8(found).astype(int) - to_uint8(right))
        return {
            "model_megabytes": round(record["bytes"] / 1e6, 1),
            "dtype": dtype,
            "images_per_click": number,
            "ms_per_image": round(statistics.median(each), 2),
            "ms_per_frame": round(statistics.median(frames), 2),
            "frames_per_second": round(statistics.median(rates), 1),
            "largest_difference": float((found - right).abs().max()),
            "largest_pixel_difference": int(pixels.max()),
            "different_pixels": int((pixels > 0).sum()),
            "pixels": int(pixels.size),
            "page_says": facts,
        }


def main() -> None:
    """Measure the generators of images that ship with the package."""
    make_folder(OUT)
    with open_chromium() as browser, atomic_write(OUT / "browser.png") as scratch:
        rows = {
            f"{name}, {dtype}": _measure(
                browser, DriftPipeline.from_pretrained(name), name, dtype, scratch if i == 0 else None
            )
            for i, (name, dtype) in enumerate(MODELS)
        }
        version = browser.version
    record = provenance("python -m tools.browser_record") | {
        "browser": f"Chromium {version}, headless, without a GPU",
        "load_average": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "evaluator": f"median of {REPEATS} clicks, time of the network in the worker; "
        "difference from PyTorch for the images of seed 0, pixels from 0 to 255",
        "figures": rows,
    }
    with atomic_write(OUT / "browser.json") as scratch:
        scratch.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
