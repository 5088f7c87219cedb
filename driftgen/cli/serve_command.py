"""``driftgen serve``: sampling as a service."""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated

import typer

from driftgen.cli.options import Device, SavedDtype, Tokenizer, Weights
from driftgen.errors import InputError

__all__ = ["TOKEN", "serve"]

TOKEN = "DRIFTGEN_TOKEN"


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Packaged model (cifar10, digits), saved model or policy, run, artifact, owner/repository, hf://name.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help=f"Bearer token that requests must carry. Default: the variable {TOKEN}, if set."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Images or action chunks per batch; 1 computes one at a time.")
    ] = 64,
    window: Annotated[
        float, typer.Option(help="Milliseconds that a request may wait for others of its batch.")
    ] = 4.0,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Pad all batches to the largest size: the same bits in every batch, but slower."
        ),
    ] = False,
    queue: Annotated[
        int, typer.Option(help="Images or action chunks that may wait; status 429 beyond that.")
    ] = 512,
    max_images: Annotated[
        int | None, typer.Option(help="Images per request. Default: 64, or the queue if that is smaller.")
    ] = None,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 2**24,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds of a batch after which the model counts as stuck, and is restarted."),
    ] = 120.0,
    weights: Weights = None,
    tokenizer: Tokenizer = None,
    device: Device = None,
    dtype: SavedDtype = "as saved",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile the generator: the start takes a minute per batch size."),
    ] = False,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="FP8 matrix products of a DiT, on NVIDIA GPUs with FP8.")
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Skip the checksums of the weights: saves about a second per 1-2 GB."
        ),
    ] = False,
) -> None:
    """Answer HTTP requests for images (POST /v1/images) or a policy's actions (POST /v1/actions).

    Requests are computed in batches. /docs describes the interface, /healthz and /metrics the state.
    """
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            from driftgen.doctor import install_command

            raise InputError(f"serve needs {name}: {install_command('serve')}")
    from driftgen.serve.http_server import ServeOptions, run_server
    from driftgen.serve.served_model import ModelOptions
    from driftgen.serve.web_app import Limits
    from driftgen.support.distributed import choose_device
    from driftgen.support.dtype_names import parse_dtype

    # A queue below 1 is refused with a message of its own.
    most = max(min(64, queue), 1) if max_images is None else max_images
    options = ServeOptions(
        ModelOptions(
            model=model,
            batch_size=batch_size,
            exact=exact,
            weights=weights,
            device=device,
            dtype=dtype,
            tokenizer=tokenizer,
            compiled=compiled,
            fp8=fp8,
            verify=not no_verify,
        ),
        Limits(most, max_body, token if token is not None else os.environ.get(TOKEN) or None),
        host=host,
        port=port,
        window=window / 1000,
        queue=queue,
        timeout=timeout,
    )
    options.check()
    parse_dtype(dtype)
    choose_device(device)
    options.model.check()  # before a process is started for the model
    run_server(options, lambda text: print(text, flush=True))
