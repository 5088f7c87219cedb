"""``driftgen bench``: time and memory of the loss, training steps, pretraining and sampling; their growth."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftgen.cli.help_format import App
from driftgen.cli.options import Device
from driftgen.errors import InputError, unknown_name

if TYPE_CHECKING:
    from driftgen.bench.profiler import Cost
    from driftgen.bench.record import Row

__all__ = ["bench"]

Json = Annotated[Path | None, typer.Option(help="JSON file for the results.")]
Repeats = Annotated[int, typer.Option(help="Timed calls; the median is shown.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; default: bfloat16 on a GPU.")]
Profile = Annotated[bool, typer.Option("--profile", help="Show the 20 most expensive kernels.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change of the recipe: compile=false; repeatable.")
]
Without = Annotated[
    list[str] | None,
    typer.Option(help="Add a row with this op switched off: attention, adaln, loss, ...; repeatable."),
]

bench = App(help="Measure time and memory beside references of the same run.", no_args_is_help=True)


@bench.command()
def loss(
    groups: Annotated[
        int | None, typer.Option(help="Groups (classes). Without any size, run the default cases.")
    ] = None,
    generated: Annotated[int | None, typer.Option(help="Generated samples per group.")] = None,
    positives: Annotated[int | None, typer.Option(help="Positives per group.")] = None,
    negatives: Annotated[
        int | None,
        typer.Option("--negatives", "--unconditional", help="Unconditional negatives per group."),
    ] = None,
    width: Annotated[
        str | None, typer.Option(help="Width of one feature vector, or several: 64,256,1024.")
    ] = None,
    base: Annotated[
        int | None, typer.Option(help="Benchmark the encoder's 86 features at this base width.")
    ] = None,
    dtype: Dtype = None,
    repeats: Repeats = 5,
    device: Device = None,
    json: Json = None,
) -> None:
    """Drifting loss, forward and gradient: kernels, PyTorch path, literal implementation.

    Groups larger than 64/64/16 are measured beside such groups, to compare the time per pair.
    """
    arguments = _arguments(locals())
    from driftgen.bench.clock import check_repeats, find_device
    from driftgen.bench.loss_bench import Case, default_cases, measure_beside_small_groups
    from driftgen.bench.record import check_json, machine
    from driftgen.support.progress import track

    place = find_device(device)
    measured_dtype = _dtype(dtype, place)
    given = groups, generated, positives, negatives
    if base is not None and width is not None:
        raise InputError("base and width are given: --base sets the widths of all 86 features, drop one")
    if base is not None:
        cases = [Case.paper(base, *_or(given, (2, 16, 16, 4)))]
    elif width is not None or any(value is not None for value in given):
        usual = 64, 64, 64, 16, 256
        cases = [Case.single(*_or((*given, each), usual)) for each in _widths(width)]
    else:
        cases = default_cases(place)
    check_repeats(repeats)
    check_json(json)
    rows: list[Row] = []
    with track("loss", len(cases), "ms") as on_step:
        for done, case in enumerate(cases, 1):
            rows += measure_beside_small_groups(case, measured_dtype, place, repeats)
            on_step(done, 1000 * (rows[-1].timing.seconds if rows[-1].timing else 0))
    _finish(rows, f"Drifting loss, forward + gradient\n{machine(place)}", json, arguments, place)


@bench.command()
def step(
    recipe: Annotated[
        str | None, typer.Option(help="Benchmark the step of this recipe, such as cifar10, on random images.")
    ] = None,
    changes: Changes = None,
    classes: Annotated[int | None, typer.Option(help="Classes per step; 8 on a GPU.")] = None,
    generated: Annotated[int | None, typer.Option(help="Generated samples per class; 64 on a GPU.")] = None,
    positives: Annotated[int | None, typer.Option(help="Positives per class; 64 on a GPU.")] = None,
    unconditional: Annotated[
        int | None, typer.Option(help="Unconditional samples per class; 16 on a GPU.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the DiT generator; B/2 on a GPU.")] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks of the generator; 12 on a GPU.")] = None,
    base: Annotated[int | None, typer.Option(help="Base width of the encoder; 256 on a GPU.")] = None,
    micro: Annotated[list[int] | None, typer.Option(help="Micro-batches of a step; repeatable.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="Loss statistics with micro-batches: exact, previous; repeatable."),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the networks.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Capture the step as a CUDA graph.")] = False,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Channels-last convolutions; --compile implies it.")
    ] = False,
    checkpoint_blocks: Annotated[
        bool, typer.Option("--checkpoint-blocks", help="Recompute the generator's blocks in backward.")
    ] = False,
    attention_16: Annotated[
        bool, typer.Option("--attention-16", help="Attention in bfloat16 instead of float32.")
    ] = False,
    without: Without = None,
    profile: Profile = False,
    dtype: Dtype = None,
    repeats: Repeats = 5,
    device: Device = None,
    json: Json = None,
) -> None:
    """One training step: the paper's ablation on synthetic latents, or a recipe (--recipe)."""
    arguments = _arguments(locals())
    if recipe is not None:
        _check_no_sizes(arguments)
        _measure_recipe("train", recipe, changes, without, profile, repeats, device, json, arguments)
        return
    if changes:
        raise InputError(f"--set {changes[0]}: there is no recipe to change; give --recipe")
    from driftgen.bench.clock import check_repeats, find_device
    from driftgen.bench.record import check_json, machine
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
    chosen |= {"compile": compiled, "graph": graph, "checkpoint_blocks": checkpoint_blocks}
    chosen |= {"channels_last": channels_last, "attention_float32": not attention_16}
    sizes = replace(default_sizes(place), **chosen)
    parts: list[Any] = [(m, statistics) for statistics in mode or ["exact"] for m in micro or [1]]
    variants = [replace(sizes, micro=m, mode=statistics) for m, statistics in parts]
    variants += [replace(variants[0], without=op) for op in without or []]
    if graph and place.type != "cuda":
        raise InputError(f"--graph needs an NVIDIA GPU: device={place.type} has no CUDA graphs")
    check_repeats(repeats)
    check_json(json)
    with track("step", 1 + len(variants), "s") as on_step:
        rows = measure_steps(variants, place, repeats, on_step)
    title = f"Training step, DiT {sizes.preset} depth {sizes.depth}, encoder {sizes.base}\n{machine(place)}"
    profiles = [lambda v=variant: profile_sizes(v, place) for variant in variants] if profile else []
    _finish(rows, title, json, arguments, place, profiles)


@bench.command()
def pretrain(
    recipe: Annotated[
        str | None, typer.Option(help="Pretraining recipe; mae-cifar10 on a GPU, mae-digits on the CPU.")
    ] = None,
    changes: Changes = None,
    profile: Profile = False,
    repeats: Repeats = 10,
    device: Device = None,
    json: Json = None,
) -> None:
    """One step of MAE pretraining on random images: samples per second, memory, references."""
    arguments = _arguments(locals())
    _measure_recipe("pretrain", recipe, changes, None, profile, repeats, device, json, arguments)


@bench.command()
def sampling(
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset: B/2, L/2, S/2-32px, 32px, ...; repeatable.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; repeatable.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="eager, compiled, graph, fp8, pipeline, stream; repeatable; default: all that apply."
        ),
    ] = None,
    dtype: Dtype = None,
    repeats: Repeats = 10,
    device: Device = None,
    json: Json = None,
) -> None:
    """Sampled images per second: eager, compiled, CUDA graph, fp8, whole pipeline of one and of 8 batches."""
    arguments = _arguments(locals())
    from driftgen.bench.clock import check_repeats, find_device
    from driftgen.bench.record import check_json, machine
    from driftgen.bench.sampling_bench import check_sampling, default_modes, default_presets, measure_sampling
    from driftgen.support.progress import track

    place = find_device(device)
    measured_dtype = _dtype(dtype, place)
    presets, batches = default_presets(place)
    presets, batches = preset or presets, batch or batches
    modes = mode or default_modes(place, presets)
    check_sampling(presets, batches, modes, place)
    check_repeats(repeats)
    check_json(json)
    rows, done = [], 0
    with track("sampling", len(presets) * len(batches) * len({"eager", *modes}), "ms") as on_step:

        def count(seconds: float) -> None:
            nonlocal done
            done += 1
            on_step(done, 1000 * seconds)

        for name in presets:
            rows += measure_sampling(name, batches, modes, measured_dtype, place, repeats, count)
    title = f"One-step sampling, {str(measured_dtype).removeprefix('torch.')}\n{machine(place)}"
    _finish(rows, title, json, arguments, place)


@bench.command()
def scaling(
    what: Annotated[str, typer.Option(help="loss, step, processes or all.")] = "all",
    points: Annotated[int, typer.Option(help="Points per axis; each value is twice the previous one.")] = 5,
    repeats: Repeats = 3,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Folder for scaling.png and scaling.json.")] = Path(
        "runs/scaling"
    ),
) -> None:
    """Growth of time and memory with classes, samples, features, width and processes."""
    arguments = _arguments(locals())
    from driftgen.bench import scaling_bench as growth
    from driftgen.bench.clock import check_repeats, find_device
    from driftgen.bench.figure import draw_growth
    from driftgen.bench.record import machine, make_record, write_json
    from driftgen.support.atomic_write import make_folder
    from driftgen.support.progress import track

    if what not in (*growth.PARTS, "all"):
        raise unknown_name("what", what, (*growth.PARTS, "all"))
    growth.check_points(points)
    check_repeats(repeats)
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


def _check_no_sizes(arguments: dict[str, Any]) -> None:
    """Refuse options of the ablation's step beside ``--recipe``."""
    sizes = ("classes", "generated", "positives", "unconditional", "preset", "depth", "base", "micro", "mode")
    switches = ("compiled", "graph", "channels_last", "checkpoint_blocks", "attention_16", "dtype")
    for name in (*sizes, *switches):
        if arguments[name]:
            option = "compile" if name == "compiled" else name.replace("_", "-")
            raise InputError(f"--{option} does not apply to --recipe: change the recipe with --set KEY=VALUE")


def _measure_recipe(
    task: Any,
    recipe: str | None,
    changes: list[str] | None,
    without: list[str] | None,
    profile: bool,
    repeats: int,
    device: str | None,
    json: Path | None,
    arguments: dict[str, Any],
) -> None:
    from driftgen.bench import recipe_bench
    from driftgen.bench.clock import check_repeats, find_device
    from driftgen.bench.record import check_json, machine
    from driftgen.bench.switches import op_names
    from driftgen.support.progress import track

    place = find_device(device)
    recipe = recipe or recipe_bench.default_recipe(task, place)
    for op in without or []:
        if op not in op_names():
            raise unknown_name("without", op, op_names())
    cases = [
        recipe_bench.RecipeCase(recipe, task, tuple(changes or []), op) for op in [None, *(without or [])]
    ]
    cases[0].check()
    check_repeats(repeats)
    check_json(json)
    with track(recipe, recipe_bench.count_references(task, place) + len(cases), "s") as on_step:
        rows = recipe_bench.measure_recipe(cases, place, repeats, on_step)
    title = f"{'Training' if task == 'train' else 'Pretraining'} step of {recipe}\n{machine(place)}"
    profiles = [lambda c=case: recipe_bench.profile_recipe(c, place) for case in cases] if profile else []
    _finish(rows, title, json, arguments, place, profiles)


def _finish(
    rows: Sequence[Row],
    title: str,
    json: Path | None,
    arguments: dict[str, Any],
    place: Any,
    profiles: Sequence[Callable[[], list[Cost]]] = (),
) -> None:
    """Print the table and the profiles, and write the JSON record."""
    from driftgen.bench.profiler import show_costs
    from driftgen.bench.record import make_record, show_rows, write_json

    show_rows(rows, title)
    records = [row.as_record() for row in rows]
    for row, record, run_profile in zip(rows, records, profiles, strict=False):
        if row.timing is None:
            continue
        costs = run_profile()
        print(f"\n{row.what}, {row.detail}")
        show_costs(costs)
        record["profile"] = [asdict(cost) for cost in costs[:100]]
    if json is not None:
        write_json(json, make_record(_command(), arguments, place, records))


def _dtype(name: str | None, place: Any) -> Any:
    import torch

    if name is None:
        return torch.bfloat16 if place.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16"):
        raise unknown_name("dtype", name, ("float32", "bfloat16"))
    return getattr(torch, name)


def _or(given: Any, otherwise: Any) -> list[int]:
    return [default if value is None else value for value, default in zip(given, otherwise, strict=True)]


def _widths(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"width={text!r}: give a whole number or several, such as 64,256,1024") from None


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options for the record, without the output path."""
    return {name: value for name, value in given.items() if name not in ("json", "out")}


def _command() -> str:
    return shlex.join(["driftgen", *sys.argv[1:]])
