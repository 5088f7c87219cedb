"""Measure the studio and take its pictures for results/studio: ``python -m tools.studio_record``.

Needs Chromium for the pictures, and an idle machine for the times.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.provenance import provenance
from tools.chromium import open_chromium

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "studio"
PORT = 7877
MODELS = ("cifar10", "digits")  # of the package; the first one is chosen when the page opens
STARTS, REQUESTS, IMAGES = 5, 50, 64
RUN = ("optim.steps=600", "output.metrics_every=10", "output.samples_every=200")  # shown on the Runs tab
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


def _request(method: str, path: str, body: str | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


def _ask(model: str, seed: int, images: int) -> str:
    """Begin a request for images and return its event."""
    data = [model, [], 1.5, seed, 1, images, "Images", "sample"]
    answer = _request("POST", "/gradio_api/call/sample", json.dumps({"data": data}))
    return str(json.loads(answer)["event_id"])


def _finish(event: str) -> bool:
    """Wait for an answer; return True if it holds images."""
    return b"network call" in _request("GET", f"/gradio_api/call/sample/{event}")


@contextmanager
def _studio(folder: str, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Start the studio; yield its process and when it was started."""
    command = [sys.executable, "-m", "driftgen", "studio", "--port", str(PORT), "--device", "cpu", *words]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        yield process, started
    finally:
        process.terminate()
        process.wait()


def _first_image(folder: str, model: str) -> tuple[float, dict[str, float]]:
    """Return the seconds from the start of the process to the first image answered, and CPU seconds."""
    with _studio(folder) as (process, started):
        while True:
            try:
                if _finish(_ask(model, 0, 1)):
                    seconds = time.perf_counter() - started
                    return seconds, {kind: _cpu_seconds(pid) for kind, pid in _processes(process.pid).items()}
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                time.sleep(0.02)


def _processes(pid: int) -> dict[str, int]:
    """Return the ids of the server and of the process that samples."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    spawned = [c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return {"server": pid, "sampling process": spawned[-1]}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return round((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 2)


def _peaks(pid: int) -> dict[str, float]:
    """Return the peak resident memory of both processes, in MB."""
    found = {}
    for kind, process in _processes(pid).items():
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        row = next(line for line in lines if line.startswith("VmHWM"))
        found[kind] = round(int(row.split()[1]) / 1024, 1)
    return found


def _concurrent(folder: str, model: str) -> dict[str, Any]:
    """Ask many times at once; return the order of the answers and the peaks of memory before and after."""
    with _studio(folder) as (process, _):
        while True:
            try:
                _finish(_ask(model, 0, IMAGES))
                break
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                time.sleep(0.1)
        before, finished, lock = _peaks(process.pid), list[tuple[int, bool]](), threading.Lock()

        def wait(i: int, event: str) -> None:
            answered = _finish(event)
            with lock:
                finished.append((i, answered))

        started, threads = time.perf_counter(), []
        for i in range(REQUESTS):
            threads.append(threading.Thread(target=wait, args=(i, _ask(model, i, IMAGES))))
            threads[-1].start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        moved = max(abs(place - i) for place, (i, _) in enumerate(finished))
        return {
            "requests": REQUESTS,
            "images_per_request": IMAGES,
            "answered": sum(answered for _, answered in finished),
            "largest_shift_in_order": moved,
            "seconds": round(seconds, 2),
            "peak_mb_after_one_request": before,
            "peak_mb_after_all": _peaks(process.pid),
        }


def _pictures(folder: str) -> dict[str, str]:
    """Take the pictures of the Sample and Runs tabs; return what they show."""
    changes = [word for change in RUN for word in ("--set", change)]
    subprocess.run(
        [sys.executable, "-m", "driftgen", "train", "digits", *changes, "--device", "cpu"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        stderr=subprocess.DEVNULL,
    )
    with _studio(folder), open_chromium() as browser:
        while True:
            try:
                _request("GET", "/")
                break
            except OSError:
                time.sleep(0.1)
        for name, (width, height) in SIZES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{PORT}/")
            page.wait_for_function("document.querySelector('#model input')?.value.includes('cifar10')")
            page.click("#generate")
            page.wait_for_selector("#images .grid img")
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(500)
            with atomic_write(OUT / f"sample-{name}.png") as scratch:
                page.screenshot(path=scratch)
            page.get_by_role("tab", name="Runs").click()
            page.wait_for_selector("#run-page h2", timeout=120_000)
            page.set_viewport_size({"width": width, "height": 1300})
            page.wait_for_timeout(500)
            with atomic_write(OUT / f"runs-{name}.png") as scratch:
                page.screenshot(path=scratch)
            context.close()
        return {"browser": f"Chromium {browser.version}, headless", "run": " ".join(("digits", *RUN))}


def _starts(folder: str, model: str) -> dict[str, Any]:
    """Start the studio several times."""
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    group = Path("/proc/self/autogroup")  # niceness counts within a session, that of the session among all
    if group.is_file() and not group.read_text().endswith("nice 0\n"):
        load += ", these processes before all others"
    measured = [_first_image(folder, model) for _ in range(STARTS)]
    seconds = [round(value, 2) for value, _ in measured]
    return {
        "seconds_to_first_image": statistics.median(seconds),
        "all": seconds,
        "cpu_seconds": measured[-1][1],
        "load_average_before": load,
    }


def main() -> None:
    """Measure the start and concurrent requests, and take the pictures: all of it, or the parts named."""
    parts: dict[str, Callable[[str], Any]] = {
        "start": lambda folder: {model: _starts(folder, model) for model in MODELS},
        "concurrent": lambda folder: {model: _concurrent(folder, model) for model in MODELS},
        "pictures": _pictures,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="Default: all of them.")
    chosen = parser.parse_args().parts or list(parts)
    make_folder(OUT)
    path = OUT / "studio.json"
    figures = json.loads(path.read_text())["figures"] if path.is_file() else {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = parts[name](folder)
    record = provenance("python -m tools.studio_record") | {
        "evaluator": "seconds from the start of the process to the HTTP answer with the first image, "
        f"median of {STARTS} starts; {REQUESTS} requests over HTTP, each sent without waiting for an answer; "
        "peak resident memory",
        "figures": figures,
    }
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
