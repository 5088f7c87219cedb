"""The ``studio`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftgen.cli.options import Device

__all__ = ["studio"]


def studio(
    runs: Annotated[Path, typer.Option(help="Folder of runs to show; new runs go there.")] = Path("runs"),
    data: Annotated[
        Path, typer.Option(help="Folder of folders of images, to train on and to compare with.")
    ] = Path("."),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than this machine's needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 7860,
    token: Annotated[
        str | None, typer.Option(help="Token that a browser must have. Default: generated if needed.")
    ] = None,
    device: Device = None,
) -> None:
    """Open a page to sample models, watch and start runs, and roll out policies.

    No file outside the two folders can be read through it, and nothing can be
    uploaded. Needs gradio.
    """
    from driftgen.studio.app.studio_server import run_studio

    run_studio(runs, data, host, port, token, device)
