"""Tables of results/serve: requests per second and latencies, and what became of requests under faults."""

from __future__ import annotations

from tools.records import Results, fill, markdown, select

__all__ = ["faults", "load"]

RECORD = "serve/cpu.json"
FAULTS = {
    "overload": "twice the requests that the server can answer",
    "killed model": "`kill -9` of the model's process",
    "hang-ups": "{hung_up} further clients hang up",
    "SIGTERM": "SIGTERM",
}


def load(results: Results) -> str:
    """Requests per second and latencies at several numbers of clients."""
    rows = results.load(RECORD)["rows"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    cells = []
    for clients in dict.fromkeys(row["clients"] for row in rows):
        line = [str(clients)]
        for mode in modes:
            row = select(rows, mode=mode, clients=clients)
            line.append(fill("{requests_per_second:,.0f}", row))
            line.append(fill("{p50_seconds:.3g ms}, {p99_seconds:.3g ms}", row))
        cells.append(line)
    header = ["clients"]
    for mode in modes:
        header += [f"{mode}: requests/s", "p50, p99"]
    return markdown(header, cells)


def faults(results: Results) -> str:
    """Answers to requests while something goes wrong."""
    cells = []
    for row in results.load(RECORD)["faults"]:
        counts = [str(row["statuses"].get(status, 0)) for status in ("200", "429", "503")]
        cells.append((fill(FAULTS[row["fault"]], row), str(row["requests"]), *counts, str(row["lost"])))
    return markdown(("fault", "requests", "200", "429", "503", "without an answer"), cells)
