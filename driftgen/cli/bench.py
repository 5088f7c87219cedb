"""Speed and memory on this machine: ``bench loss``, ``bench step``, ``bench sampling``, ``bench scaling``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from driftgen.cli.options import Device
from driftgen.errors import InputError, unknown_name

__all__ = ["bench"]

Json = Annotated[Path | None, typer.Option(help="File to write the figures to, too.")]
Repeats = Annotated[int, typer.Option(help="Calls by the clock; their median counts.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16; bfloat16 on a GPU if not given.")]

bench = typer.Typer(help="Measure time and memory beside references of the same run.", no_args_is_help=True)


@bench.command()
def loss(
    groups: Annotated[int | None, typer.Option(help="Groups; cases of its own if no size is given.")] = None,
    generated: Annotated[int | None, typer.Option(help="Generated samples of a group.")] = None,
    positives: Annotated[int | None, typer.Option(help="Positives of a group.")] = None,
    negatives: Annotated[int | None, typer.Option(help="Further negatives of a group.")] = None,
    width: Annotated[int | None, typer.Option(help="Numbers of a vector.")] = None,
    base: Annotated[
        int | None, typer.Option(help="The encoder's 86 features, its first stage so wide, not one.")
    ] = None,
    dtype: Dtype = None,
    repeats: Repeats = 5,
    device: Device = None,
    json: Json = None,
) -> None:
    """The drifting loss, forward and gradient: kernels, PyTorch path, plain implementation."""
    arguments = _arguments(locals())
    from driftgen.bench.clock import find_device
    from driftgen.bench.loss_bench import Case, default_cases, measure_loss
    from driftgen.bench.record import Row, check_json, machine, make_record, show_rows, write_json
    from driftgen.support.progress import track

    place = find_device(device)
    numbers = _dtype(dtype, place)
    given = groups, generated, positives, negatives
    if base is not None and width is not None:
        raise InputError("base and width are given: the features of an encoder have widths of their own")
    if base is not None:
        cases = [Case.paper(base, *_or(given, (2, 16, 16, 4)))]
    elif width is not None or any(value is not None for value in given):
        cases = [Case.single(*_or((*given, width), (64, 64, 64, 16, 256)))]
    else:
        cases = default_cases(place)
    _check_repeats(repeats)
    check_json(json)
    rows: list[Row] = []
    with track("loss", len(cases), "ms") as on_step:
        for done, case in enumerate(cases, 1):
            rows += measure_loss(case, numbers, place, repeats)
            on_step(done, 1000 * (rows[-1].timing.seconds if rows[-1].timing else 0))
    show_rows(rows, f"Drifting loss, forward + gradient\n{machine(place)}")
    if json is not None:
        write_json(json, make_record(_command(), arguments, place, [row.as_record() for row in rows]))


@bench.command()
def step(
    classes: Annotated[int | None, typer.Option(help="Classes of a step; 8 on a GPU.")] = None,
    generated: Annotated[int | None, typer.Option(help="Generated samples of a class; 64 on a GPU.")] = None,
    positives: Annotated[int | None, typer.Option(help="Positives of a class; 64 on a GPU.")] = None,
    unconditional: Annotated[int | None, typer.Option(help="Unconditional samples; 16 on a GPU.")] = None,
    preset: Annotated[str | None, typer.Option(help="The generator, a DiT; B/2 on a GPU.")] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks of the generator; 12 on a GPU.")] = None,
    base: Annotated[
        int | None, typer.Option(help="Width of the encoder's first stage; 256 on a GPU.")
    ] = None,
    micro: Annotated[list[int] | None, typer.Option(help="Parts of a step; may be repeated.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="exact, previous: statistics of parts; may be repeated.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the networks.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Record the step as a CUDA graph, as training does.")
    ] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Lay convolutions out so.")] = False,
    attention_16: Annotated[
        bool, typer.Option("--attention-16", help="Attention in 16 bits; float32 if not given.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show the 20 most costly kernels.")] = False,
    dtype: Dtype = None,
    repeats: Repeats = 5,
    device: Device = None,
    json: Json = None,
) -> None:
    """One training step of the paper's ablation on synthetic latents, random weights."""
    arguments = _arguments(locals())
    from dataclasses import asdict

    from driftgen.bench.clock import find_device
    from driftgen.bench.profiler import show_costs
    from driftgen.bench.record import check_json, machine, make_record, show_rows, write_json
    from driftgen.bench.step_bench import default_sizes, measure_steps, profile_sizes
    from driftgen.support.progress import track

    place = find_device(device)
    values = {
        "classes": classes,
        "generated": generated,
        "positives": positives,
        "unconditional": unconditional,
        "preset": preset,
        "depth": depth,
        "base": base,
        "dtype": _dtype(dtype, place),
    }
    chosen: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    chosen |= {"compile": compiled, "graph": graph}
    chosen |= {"channels_last": channels_last, "attention_float32": not attention_16}
    sizes = replace(default_sizes(place), **chosen)
    ways: list[Any] = [(m, how) for how in mode or ["exact"] for m in micro or [1]]
    variants = [replace(sizes, micro=m, mode=how) for m, how in ways]
    if graph and place.type != "cuda":
        raise InputError("--graph needs an NVIDIA GPU: CUDA graphs are a thing of theirs")
    _check_repeats(repeats)
    check_json(json)
    with track("step", 1 + len(variants), "s") as on_step:
        rows = measure_steps(variants, place, repeats, on_step)
    title = f"Training step, DiT {sizes.preset} depth {sizes.depth}, encoder {sizes.base}\n{machine(place)}"
    show_rows(rows, title)
    records = [row.as_record() for row in rows]
    if profile:
        for variant, row, record in zip(variants, rows, records, strict=True):
            if row.timing is None:
                continue
            found = profile_sizes(variant, place)
            print(f"\n{row.what}, {row.detail}")
            show_costs(found)
            record["profile"] = [asdict(cost) for cost in found[:100]]
    if json is not None:
        write_json(json, make_record(_command(), arguments, place, records))


@bench.command()
def sampling(
    preset: Annotated[
        list[str] | None, typer.Option(help="B/2, L/2, S/2-32px, 32px, ...; may be repeated.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Images at a time; may be repeated.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="eager, compiled, graph, fp8, pipeline; may be repeated; all that fit."),
    ] = None,
    dtype: Dtype = None,
    repeats: Repeats = 10,
    device: Device = None,
    json: Json = None,
) -> None:
    """Images a second: eager, compiled, as a CUDA graph, in 8 bits, from label to host."""
    arguments = _arguments(locals())
    from driftgen.bench.clock import find_device
    from driftgen.bench.record import check_json, machine, make_record, show_rows, write_json
    from driftgen.bench.sampling_bench import check_sampling, default_modes, default_presets, measure_sampling
    from driftgen.support.progress import track

    place = find_device(device)
    numbers = _dtype(dtype, place)
    presets, batches = default_presets(place)
    presets, batches = preset or presets, batch or batches
    modes = mode or default_modes(place, presets)
    check_sampling(presets, batches, modes, place)
    _check_repeats(repeats)
    check_json(json)
    rows, done = [], 0
    with track("sampling", len(presets) * len(batches) * len({"eager", *modes}), "ms") as on_step:

        def count(seconds: float) -> None:
            nonlocal done
            done += 1
            on_step(done, 1000 * seconds)

        for name in presets:
            rows += measure_sampling(name, batches, modes, numbers, place, repeats, count)
    show_rows(rows, f"One-step sampling, {str(numbers).removeprefix('torch.')}\n{machine(place)}")
    if json is not None:
        write_json(json, make_record(_command(), arguments, place, [row.as_record() for row in rows]))


@bench.command()
def scaling(
    what: Annotated[str, typer.Option(help="loss, step, processes, all.")] = "all",
    points: Annotated[int, typer.Option(help="Of each axis, each twice the one before.")] = 5,
    repeats: Repeats = 3,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Folder of scaling.png and scaling.json.")] = Path("runs/scaling"),
) -> None:
    """Growth with classes, samples, features, width and processes: powers and a figure."""
    arguments = _arguments(locals())
    from driftgen.bench import scaling_bench as growth
    from driftgen.bench.clock import find_device
    from driftgen.bench.figure import draw_growth
    from driftgen.bench.record import machine, make_record, write_json
    from driftgen.support.atomic_write import make_folder
    from driftgen.support.progress import track

    if what not in (*growth.PARTS, "all"):
        raise unknown_name("what", what, (*growth.PARTS, "all"))
    if points < 2:
        raise InputError(f"points={points} must be at least 2")
    _check_repeats(repeats)
    place = find_device(device)
    make_folder(out)
    parts = [part for part in growth.PARTS if what in (part, "all")]
    curves, processes, done = [], [], 0
    with track("scaling", growth.count_points(parts, place, points), "ms") as on_step:

        def count(seconds: float) -> None:
            nonlocal done
            done += 1
            on_step(done, 1000 * seconds)

        for part in parts:
            if part == "processes":
                processes = growth.measure_processes((1, 2), repeats, count)
            else:
                curves += growth.measure_growth(part, place, points, repeats, count)
    growth.show_growth(curves, processes, place)
    records = [curve.as_record() for curve in curves]
    record = make_record(_command(), arguments, place, records) | {"processes": processes}
    write_json(out / "scaling.json", record)
    if curves:
        draw_growth(curves, out / "scaling.png", machine(place))
        print(out / "scaling.png")
    print(out / "scaling.json")


def _dtype(name: str | None, place: Any) -> Any:
    import torch

    if name is None:
        return torch.bfloat16 if place.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16"):
        raise unknown_name("dtype", name, ("float32", "bfloat16"))
    return getattr(torch, name)


def _or(given: Any, otherwise: Any) -> list[int]:
    return [default if value is None else value for value, default in zip(given, otherwise, strict=True)]


def _check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise InputError(f"repeats={repeats} must be at least 1")


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The options as a record holds them: without the place it is written to."""
    return {name: value for name, value in given.items() if name not in ("json", "out")}


def _command() -> str:
    return shlex.join(["driftgen", *sys.argv[1:]])
