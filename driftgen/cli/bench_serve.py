"""``driftgen bench serve``: load and faults of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from driftgen.cli.bench import bench
from driftgen.cli.options import Device
from driftgen.errors import InputError

__all__ = ["serve"]


@bench.command()
def serve(
    model: Annotated[str, typer.Argument(help="As in driftgen serve.")] = "digits",
    clients: Annotated[
        list[int] | None, typer.Option(help="Clients at once; repeatable. Default: 1, 16, 64, 256.")
    ] = None,
    images: Annotated[int, typer.Option(help="Images per request.")] = 1,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 5.0,
    batch_size: Annotated[int, typer.Option(help="Largest batch of the server.")] = 64,
    faults: Annotated[
        bool,
        typer.Option(
            help="Also overload the server, kill its model, hang up on it, and stop it, under load."
        ),
    ] = True,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the generator.")] = False,
    device: Device = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Requests per second and latencies of driftgen serve on this machine, beside one request at a time."""
    import os

    from driftgen.bench.clock import find_device
    from driftgen.bench.record import check_json, machine, write_json
    from driftgen.bench.serve_bench import EVALUATOR, Plan, measure_faults, measure_modes, show_row
    from driftgen.interop.model_sources import find_model
    from driftgen.support.provenance import command_line, environment, provenance
    from driftgen.support.whole_numbers import check_count

    counts = tuple(clients or (1, 16, 64, 256))
    for name, value, most in (
        ("clients", max(counts), 1000),
        ("images", images, 4096),
        ("seconds", seconds, 600),
    ):
        if not 0 < value <= most or min(counts) < 1:
            raise InputError(f"{name}={value:g} must be above 0, at most {most}")
    check_count("batch-size", batch_size, most=2**16)
    place = find_device(device)
    find_model(model)
    check_json(json)
    options = ["--device", str(place), "--batch-size", str(batch_size), "--max-images", str(max(images, 64))]
    options += ["--queue", str(max(512, 2 * max(counts) * images)), *["--compile"] * compiled]
    plan = Plan(model, tuple(options), counts, seconds, images)
    before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print(f"{model} as a service: {machine(place)}")
    rows: list[dict[str, Any]] = measure_modes(plan, lambda row: print(show_row(row), flush=True))
    broken = measure_faults(plan, lambda row: print(show_row(row), flush=True)) if faults else []
    if json is not None:
        about: dict[str, Any] = {**provenance(command_line()), "device": machine(place)}
        about |= {"system": environment(place)["system"], "cores": os.cpu_count()}
        about |= {"load_average_before": before, "evaluator": EVALUATOR, "model": model, "images": images}
        write_json(json, about | {"rows": rows, "faults": broken})
