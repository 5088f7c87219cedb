"""Tables of results/policy: chunks from one ambiguous observation, and time per chunk."""

from __future__ import annotations

from tools.records import Results, fill, markdown

__all__ = ["latency", "spread"]

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
