"""Measure the playground in Chromium and take its picture: ``python -m tools.playground_record``.

Writes ``frames.json`` and ``playground.png`` to results/playground.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from driftgen.studio.playground_page import playground_url
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.provenance import provenance
from tools.chromium import open_chromium

__all__ = ["main"]

OUT = Path(__file__).parents[1] / "results" / "playground"
FRAMES = 300
SIZE = (1360, 1000)
PICTURE = {"target": "two-moons", "start": "between", "temperature": 0.35}


def _play(page: Any, **settings: object) -> dict[str, float]:
    """Play until ``FRAMES`` frames are drawn. Return medians and the 95th percentile in milliseconds."""
    page.goto("about:blank")
    page.goto(playground_url(settings))
    page.click("#play")
    page.wait_for_function("playground.report.steps >= 20", timeout=60_000)  # compiled by then
    page.evaluate(
        "playground.frames.length = 0; playground.from = [performance.now(), playground.report.steps]"
    )
    page.wait_for_function(f"playground.frames.length >= {FRAMES}", timeout=120_000)
    frames, seconds, steps = page.evaluate(
        f"""[playground.frames.slice(0, {FRAMES}), (performance.now() - playground.from[0]) / 1000,
        playground.report.steps - playground.from[1]]"""
    )
    return {
        "script_ms_per_frame": round(statistics.median(frames), 2),
        "script_ms_per_frame_95_percent": round(statistics.quantiles(frames, n=20)[-1], 2),
        "steps_per_second": round(steps / seconds, 1),
    }


def main() -> None:
    """Measure both ways to move q, then take the picture."""
    make_folder(OUT)
    with open_chromium() as browser:
        context = browser.new_context(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page = context.new_page()
        rows = {
            "points": _play(page, mover="points"),
            "points, new data at every step": _play(page, mover="points", fresh="true"),
            "generator": _play(page, mover="generator"),
        }
        page.goto("about:blank")
        page.goto(playground_url(PICTURE))
        page.wait_for_function("playground.report.x.length === 1000")
        for _ in range(8):
            page.click("#once")
        page.wait_for_function("playground.report.steps === 8")
        box = page.locator("#plane").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.38 * box["width"], box["y"] + 0.45 * box["height"])
        page.wait_for_function("playground.report.parts !== null")
        page.wait_for_timeout(300)
        with atomic_write(OUT / "playground.png") as scratch:
            page.screenshot(path=scratch)
        version = browser.version
    record = provenance("python -m tools.playground_record") | {
        "browser": f"Chromium {version}, headless, without a GPU",
        "load_average": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "evaluator": f"{FRAMES} frames at 500 points of p and q; script of the page's main thread, including "
        "messages of the worker that computes steps; median",
        "figures": rows,
    }
    with atomic_write(OUT / "frames.json") as scratch:
        scratch.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
