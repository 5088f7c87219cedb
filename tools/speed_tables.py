"""Tables of results/speed-h200/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.records import Results, fill, markdown, select

__all__ = [
    "cifar10",
    "cifar10_parts",
    "cifar10_variants",
    "large_groups",
    "loss",
    "parts",
    "pretrain",
    "sampling",
    "step",
    "step64",
]

FOLDER = "speed-h200"


def loss(results: Results) -> str:
    """Loss and gradient, by number of groups and width."""
    rows = []
    for row in results.load(f"{FOLDER}/loss.json")["rows"]:
        groups, _, width = row["what"].split(" x ")
        others = (row["references"]["eager"], row["release"], row["floor"])
        times = (row["seconds"], row["queued_seconds"], *(other["seconds"] for other in others))
        rows.append(
            (
                f"{groups} x {width}" + (", CUDA graph" if "CUDA graph" in row["detail"] else ""),
                *(fill("{seconds:.3g ms}", {"seconds": seconds}) for seconds in times),
                fill("{peak_ratio:.2f}", row),
            )
        )
    header = ("groups x width", "ours", "queued", "PyTorch path", "release", "floor")
    return markdown((*header, "peak / (inputs + outputs)"), rows)


def step(results: Results) -> str:
    """The paper's ablation step with 8 of its 64 classes."""
    now, third, half = (results.row(f"{FOLDER}/{name}.json") for name in ("step", "step-third", "step-16"))
    rows = [
        _time_and_peak("PyTorch, not compiled, in the same run", now["references"]["eager"], digits=2),
        _time_and_peak("release", now["release"]),
        _bold(_time_and_peak("ours", now)),
        _time_and_peak(
            "ours with more kernels of our own, on another H200 ([step-third](step-third.json))", third
        ),
        _time_and_peak("ours, attention in bfloat16 ([step-16](step-16.json))", half),
        (fill("floor ({operations:.0f TFLOP})", now["floor"]), fill("{seconds:.3f s}", now["floor"]), ""),
    ]
    return markdown(("", "time", "peak"), rows)


def parts(results: Results) -> str:
    """Milliseconds of the parts of that step, version by version."""
    columns = []
    for name in ("step-first", "step-second", "step-third", "step"):
        whole = results.row(f"{FOLDER}/{name}.json")
        seconds = {"whole": whole["seconds"]}
        for cost in whole["profile"]:
            seconds[cost["phase"]] = seconds.get(cost["phase"], 0) + cost["seconds"]
        columns.append(seconds)
    labels = {
        "generator": "generator, forward and backward",
        "encoder": "encoder, generated (forward, backward) and real samples",
        "loss": "loss",
        "optimizer": "optimizer, EMA, clipping",
        "whole": "whole step",
    }
    rows = [(label, *(f"{1000 * column[part]:.0f}" for column in columns)) for part, label in labels.items()]
    versions = (f"{name} ([step-{name}](step-{name}.json))" for name in ("first", "second", "third"))
    return markdown(("part, in ms", *versions, "now"), rows)


def step64(results: Results) -> str:
    """All 64 classes of the paper on one GPU."""
    exact, previous = results.load(f"{FOLDER}/step64.json")["rows"]
    rows = [
        ("release, extrapolated from an eighth of the batch", "4.5 s", "970 GiB"),
        _bold(_time_and_peak("ours, exact", exact, digits=2), " (`--micro 8 --mode exact`)"),
        _bold(
            _time_and_peak("ours, statistics of the previous step", previous, digits=2),
            " (`--mode previous`)",
        ),
        ("floor", fill("{seconds:.2f s}", exact["floor"]), ""),
    ]
    return markdown(("", "time", "peak"), rows)


def cifar10(results: Results) -> str:
    """The recipe ``cifar10``, version by version."""
    first = results.load("cifar10-first/summary.json")["generator"]

    def cells(run: Mapping[str, Any]) -> tuple[str, str]:
        return fill("{steps_per_second:.1f}", run), fill("{peak_bytes:.1f GiB}", run)

    rows = [
        (
            "[first version](../cifar10-first/summary.json)",
            *cells({**first, "peak_bytes": first["memory_gib"] * 2**30}),
        ),
        (
            "[without CUDA graph](cifar10-launches.json)",
            *cells(results.load(f"{FOLDER}/cifar10-launches.json")),
        ),
        (
            "[CUDA graph, real samples loaded ahead](cifar10-third.json)",
            *cells(results.load(f"{FOLDER}/cifar10-third.json")),
        ),
        _bold(("[later](cifar10.json)", *cells(results.row(f"{FOLDER}/cifar10.json")))),
    ]
    return markdown(("", "steps per second", "peak"), rows)


def cifar10_variants(results: Results) -> str:
    """Samples per second of the step of ``cifar10`` and of variants of it."""
    rows = [
        (row["label"], fill("{seconds:.1f ms}", row), f"{row['samples_per_second']:,.0f}")
        for row in results.load(f"{FOLDER}/cifar10-variants.json")["rows"]
    ]
    return markdown(("step", "time", "samples per second"), rows)


def cifar10_parts(results: Results) -> str:
    """Milliseconds that the GPU computes for each part of that step."""
    profiles = results.load(f"{FOLDER}/cifar10-variants.json")["profile"]
    rows = [
        (part, *(fill(f"{{{part}:.1f ms}}", profile) for profile in profiles.values()))
        for part in ("generator", "encoder", "loss", "optimizer")
    ]
    return markdown(("part", *profiles), rows)


def large_groups(results: Results) -> str:
    """Time per pair and element of groups beyond 64/64/16, relative to such groups, and the peak."""
    rows = []
    names = {
        "256-256-32": "256/256/32",
        "256-256-32-many": "256/256/32, 256 groups",
        "640-640-0": "640/640/0",
        "512-2048-64": "512/2048/64",
    }
    for name, label in names.items():
        graphs = [
            row
            for row in results.load(f"{FOLDER}/groups-{name}.json")["rows"]
            if row["pair_ratio"] is not None and "CUDA graph" in row["detail"]
        ]
        ratios = (fill("{pair_ratio:.2f}", row) for row in graphs)
        rows.append((label, *ratios, f"{max(row['peak_ratio'] for row in graphs):.2f}"))
    header = ("generated/positives/negatives", "width 64", "width 256", "width 1,024")
    return markdown((*header, "peak / (inputs + outputs)"), rows)


def pretrain(results: Results) -> str:
    """Pretraining of the encoder."""
    now = results.row(f"{FOLDER}/pretrain.json")

    def cells(label: str, run: Mapping[str, Any]) -> tuple[str, str, str, str]:
        rate = now["samples_per_step"] / run["queued_seconds"]
        return label, f"{rate:,.0f}", fill("{queued_seconds:.1f ms}", run), fill("{peak_bytes:.1f GiB}", run)

    rows = [
        cells("compiled, CUDA graph, upsampling of contiguous maps", now["references"]["contiguous"]),
        cells("`compile=false`, `cuda_graph=false`", now["references"]["eager"]),
        _bold(cells("compiled, CUDA graph", now)),
    ]
    return markdown(("", "samples per second", "step", "peak"), rows)


def sampling(results: Results) -> str:
    """Sampling, by mode and batch."""
    small = results.load(f"{FOLDER}/sampling.json")["rows"]
    large = results.load(f"{FOLDER}/sampling-large.json")["rows"]
    time, rate = "{seconds:.3g ms}", "{seconds:.3g ms} ({images_per_second:,.0f images/s})"

    def cells(label: str, mode: str, batched: str) -> tuple[str, str, str, str]:
        return (
            label,
            fill(time, select(small, batch=1, mode=mode)),
            fill(batched, select(small, batch=256, mode=mode)),
            fill(batched, select(large, batch=256, mode=mode)),
        )

    one, many, largest = (
        select(rows, batch=batch, mode="graph") for rows, batch in ((small, 1), (small, 256), (large, 256))
    )
    many_fp8, largest_fp8 = (select(rows, batch=256, mode="fp8") for rows in (small, large))
    release = many["release"]
    rows = [
        ("PyTorch", *(fill(time, row["references"]["eager"]) for row in (one, many, largest))),
        cells("compiled", "compiled", time),
        cells("compiled, CUDA graph", "graph", rate),
        cells("fp8, CUDA graph", "fp8", rate),
        (
            "`DriftPipeline`, labels to latents on the host",
            *(fill(time, select(small, batch=batch, mode="pipeline")) for batch in (1, 256)),
            "",
        ),
        ("release", "", fill(rate, release, images_per_second=256 / release["seconds"]), ""),
        (
            "floor",
            fill("{floor[seconds]:.1g ms}", one),
            *(
                fill("{floor[seconds]:.3g ms}, ", row) + fill("{floor[seconds]:.2g ms} in fp8", in_fp8)
                for row, in_fp8 in ((many, many_fp8), (largest, largest_fp8))
            ),
        ),
    ]
    return markdown(("", "batch 1", "batch 256", "L/2, batch 256"), rows)


def _time_and_peak(label: str, row: Mapping[str, Any], digits: int = 3) -> tuple[str, str, str]:
    return label, f"{row['seconds']:.{digits}f} s", fill("{peak_bytes:.0f GiB}", row)


def _bold(cells: tuple[str, ...], after_label: str = "") -> tuple[str, ...]:
    label, *others = (f"**{cell}**" for cell in cells)
    return label + after_label, *others
