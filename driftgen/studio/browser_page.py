"""A folder of static files that generates images inside a browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from driftgen.interop.onnx import check_export, export_onnx, read_metadata
from driftgen.studio.onnxruntime_web import FILES, LICENSE, find_runtime
from driftgen.support.atomic_write import atomic_folder, check_free

__all__ = ["MODEL", "RECORD", "check_page", "write_page"]

STUDIO = Path(__file__).parent
MODEL, RECORD, RUNTIME = "model.onnx", "model.json", "ort"


def check_page(folder: Path, dtype: str) -> None:
    """Raise InputError unless a page can be written to this folder."""
    check_free(folder)
    check_export(folder / MODEL, "onnx", dtype)


def write_page(
    pipe: Any, folder: Path, *, name: str, dtype: str = "float32", runtime: Path | None = None
) -> Path:
    """Write a page that samples from a pipeline inside a browser, and return its ``index.html``.

    Args:
        pipe: a :class:`~driftgen.DriftPipeline`.
        folder: new or empty.
        name: of the model, as the page shows it.
        dtype: of the stored weights, see :func:`~driftgen.interop.onnx.export_onnx`.
        runtime: see :func:`~driftgen.studio.onnxruntime_web.find_runtime`.
    """
    check_page(folder, dtype)
    files = find_runtime(runtime)
    with atomic_folder(folder) as scratch:
        model = export_onnx(pipe, scratch / MODEL, dtype=dtype)
        record = read_metadata(model)
        record |= {"name": name, "bytes": model.stat().st_size}
        (scratch / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.copytree(STUDIO / "browser", scratch / "browser")
        (scratch / "browser" / "index.html").replace(scratch / "index.html")
        for shared in ("base.css", "portable_noise.mjs"):
            shutil.copyfile(STUDIO / shared, scratch / shared)
        (scratch / RUNTIME).mkdir()
        for part in FILES:
            shutil.copyfile(files / part, scratch / RUNTIME / part)
        shutil.copyfile(LICENSE, scratch / RUNTIME / "LICENSE.txt")
    return folder / "index.html"
