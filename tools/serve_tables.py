"""Tables of results/serve: requests per second and latencies, and what became of requests under faults."""

from __future__ import annotations

from tools.records import Results, fill, markdown, select

__all__ = ["faults", "faults_gpu", "load", "load_cifar10_gpu", "load_gpu"]

RECORD, RECORD_GPU = "serve/cpu.json", "serve/h200-digits.json"
FAULTS = {
    "overload": "twice the requests that the server can answer",
    "killed model": "`kill -9` of the model's process",
    "hang-ups": "{hung_up} further clients hang up",
    "SIGTERM": "SIGTERM",
}


def load(results: Results) -> str:
    """Requests per second and latencies at several numbers of clients, on a CPU."""
    return _load(results, RECORD)


def load_gpu(results: Results) -> str:
    """The same on a GPU."""
    return _load(results, RECORD_GPU)


def load_cifar10_gpu(results: Results) -> str:
    """The same on a GPU, with the packaged model of CIFAR-10."""
    return _load(results, "serve/h200-cifar10.json")


def _load(results: Results, record: str) -> str:
    rows = results.load(record)["rows"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    cells = []
    for clients in dict.fromkeys(row["clients"] for row in rows):
        line = [str(clients)]
        for mode in modes:
            row = select(rows, mode=mode, clients=clients)
            line.append(fill("{requests_per_second:,.0f}", row))
            line.append(f"{_time(row['p50_seconds'])}, {_time(row['p99_seconds'])}")
        cells.append(line)
    header = ["clients"]
    for mode in modes:
        header += [f"{mode}: requests/s", "p50, p99"]
    return markdown(header, cells)


def faults(results: Results) -> str:
    """Answers to requests while something goes wrong, on a CPU."""
    return _faults(results, RECORD)


def faults_gpu(results: Results) -> str:
    """The same on a GPU."""
    return _faults(results, RECORD_GPU)


def _faults(results: Results, record: str) -> str:
    cells = []
    for row in results.load(record)["faults"]:
        counts = [row["requests"], *(row["statuses"].get(status, 0) for status in ("200", "429", "503"))]
        cells.append((fill(FAULTS[row["fault"]], row), *(f"{n:,}" for n in (*counts, row["lost"]))))
    return markdown(("fault", "requests", "200", "429", "503", "without an answer"), cells)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
