"""The command ``page``: images inside a browser."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from driftgen.cli.options import Tokenizer, Weights

__all__ = ["page"]


def page(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Packaged model, saved model, run, artifact, owner/repository, hf://name. "
            "Default: the best packaged one.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the page to. Default: serve it until Ctrl-C.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it, too, where --out is given.")] = False,
    port: Annotated[int | None, typer.Option(help="Port on 127.0.0.1. Default: 0, any free one.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Stored weights: float32, float16 or int8. The network computes in float32.")
    ] = "float32",
    weights: Weights = None,
    tokenizer: Tokenizer = None,
    runtime: Annotated[
        Path | None,
        typer.Option(
            help="node_modules with onnxruntime-web. Default: downloaded once, from npm's registry."
        ),
    ] = None,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Skip the checksums of the weights: saves about a second per 1-2 GB."
        ),
    ] = False,
) -> None:
    """Generate images inside a browser: writes or serves a page with the model in it."""
    from driftgen.interop.packaged import best_packaged
    from driftgen.pipeline import DriftPipeline
    from driftgen.studio.browser_page import check_page, write_page
    from driftgen.studio.onnxruntime_web import find_runtime
    from driftgen.studio.page_server import open_server
    from driftgen.studio.playground_page import open_page

    name = best_packaged() if model is None else model
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "page" if out is None else out
        check_page(folder, dtype)
        files = find_runtime(runtime, partial(print, file=sys.stderr))
        with open_server(folder, port) as server:  # before the work of the export: the port may be in use
            pipe = DriftPipeline.from_pretrained(
                name, weights=weights, tokenizer=tokenizer, verify=not no_verify
            )
            written = write_page(pipe, folder, name=Path(name).name, dtype=dtype, runtime=files)
            if out is not None:
                print(written)
            if out is not None and not serve:
                return
            url = f"http://127.0.0.1:{server.server_port}/"
            print(f"{url} (Ctrl-C ends)", flush=True)
            open_page(url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print()
