"""Tables of results/policy: scores, trials, chunks from one ambiguous observation, and time per chunk."""

from __future__ import annotations

from tools.records import Results, fill, markdown

__all__ = ["latency", "scores", "spread", "trials"]

SCORED = {
    "pusht/drifting-first-seeds": ("PushT", "drifting"),
    "pusht/drifting": ("PushT", "drifting"),
    "pusht/diffusion-ddim": ("PushT", "diffusion, DDIM"),
    "pusht/regression": ("PushT", "regression"),
    "lift/drifting": ("Lift", "drifting"),
}
CALLS = {"drifting": 1, "diffusion, DDIM": 10, "regression": 1}
LATENCY = {"policy/latency-cpu.json": "CPU", "policy/latency-h200.json": "GPU"}


def spread(results: Results) -> str:
    """Chunks of three methods in the toy with two ways."""
    rows = [
        (
            fill("{method}", row),
            fill("{network_calls}", row),
            fill("{energy_score:.3f}", row),
            fill("{chunk_spread:.3f}", row),
            f"{row['ways'][0]:.0%} and {row['ways'][1]:.0%}",
            fill("{between:.0%}", row),
            fill("{rollouts[success]:.0%}", row),
        )
        for row in results.load("policy/two-ways/spread.json")["policies"]
    ]
    header = ("method", "calls", "energy score", "spread", "ways", "between the ways", "goal reached")
    return markdown(header, rows)


def scores(results: Results) -> str:
    """Score, network calls and time of each method with the same network and data."""
    rows = []
    for name, (task, method) in SCORED.items():
        record = results.load(f"policy/{name}.json")
        last = record["checkpoints"][-1]
        timed = [c["latency"][0] for c in record["checkpoints"] if "latency" in c]
        calls, first, final = CALLS[method], record["seeds"][0], record["seeds"][-1]
        rows.append(
            (
                task,
                method,
                f"{int(last['model'].rpartition(' ')[2]):,}",
                str(calls),
                f"{first:,} to {final:,}",
                fill("{mean:.3f} ± {standard_error:.3f}", record),
                fill("{success_rate:.0%}", record),
                f"{timed[-1]['milliseconds']:.2g} ms" if timed else "",
            )
        )
    header = ("task", "method", "steps", "calls per chunk", "seeds", "score", "success", "time per chunk")
    return markdown(header, rows)


def trials(results: Results) -> str:
    """Short runs on PushT that differ in the loss."""
    rows = [
        (
            trial["settings"],
            fill("{energy_score:.4f}", trial["last"]),
            fill("{chunk_error:.3f}", trial["last"]),
            fill("{chunk_spread:.3f}", trial["last"]),
            fill("{mean:.3f} ± {standard_error:.3f}", trial["score"]),
        )
        for trial in results.load("policy/pusht/trials.json")["trials"]
    ]
    return markdown(("loss", "energy score", "chunk error", "chunk spread", "score"), rows)


def latency(results: Results) -> str:
    """Milliseconds per chunk of each method with the same network, on each measured device."""
    records = {
        name: results.load(path) for path, name in LATENCY.items() if (results.folder / path).is_file()
    }
    devices: dict[str, dict[tuple[str, str, int], float]] = {}
    calls: dict[tuple[str, str, int], int] = {}
    for record in records.values():
        for row in record["rows"]:
            key = (row["recipe"], row["method"], row["batch"])
            devices.setdefault(row["device"].replace("1 threads", "1 thread"), {})[key] = row["milliseconds"]
            calls[key] = row["network_calls"]
    rows = []
    for key in calls:
        times = [times.get(key) for times in devices.values()]
        cells = [
            "" if time is None else f"{time:.3g} ms" if time < 1000 else f"{time / 1000:.3g} s"
            for time in times
        ]
        rows.append((key[0], key[1], str(calls[key]), str(key[2]), *cells))
    return markdown(("network", "method", "network calls", "batch", *devices), rows)
