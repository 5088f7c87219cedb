"""Tables of results/policy: scores, trials, chunks from one ambiguous observation, and time per chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from driftgen.policy.score import summarize
from tools.records import Results, fill, markdown

__all__ = ["headline", "latency", "pusht_spread", "scores", "shipped_policy", "spread", "trials"]

# Task and method of a row, folder of its records, runs, and number of checkpoints of each.
DRIFTING = [f"drifting-{seed}" for seed in range(4)]
ROWS = (
    ("PushT", "drifting, U-Net in 8 bits, the policy that ships", "pusht", ["unet-8-bits"], 1),
    ("PushT", "diffusion, DDIM, U-Net", "pusht", ["unet-diffusion"], 1),
    ("PushT", "drifting, MLP", "pusht", DRIFTING, 10),
    ("PushT", "diffusion, DDIM, MLP", "pusht", ["diffusion"], 10),
    ("PushT", "diffusion, DDPM, MLP", "pusht", ["diffusion-ddpm"], 10),
    ("PushT", "regression, MLP", "pusht", ["regression"], 10),
    ("PushT from images", "drifting, U-Net", "pusht-image", ["unet"], 10),
    ("PushT from images", "drifting, MLP", "pusht-image", ["mlp"], 6),
    ("Lift", "drifting, MLP", "lift", ["drifting"], 10),
)
EPISODES = {"first": "seeds 100,000 to 100,049", "fresh": "seeds 300,000 to 300,049"}
LATENCY = {"policy/latency-cpu.json": "CPU", "policy/latency-h200.json": "GPU"}


def spread(results: Results, task: str = "two-ways") -> str:
    """Chunks of three methods from one ambiguous observation."""
    header = ["method", "calls", "energy score", "spread", "ways", "between the ways"]
    rows = []
    for row in results.load(f"policy/{task}/spread.json")["policies"]:
        cells = [
            fill("{method}", row),
            fill("{network_calls}", row),
            fill("{energy_score:.3f}", row),
            fill("{chunk_spread:.3f}", row),
            f"{row['ways'][0]:.0%} and {row['ways'][1]:.0%}",
            fill("{between:.0%}", row),
        ]
        if "rollouts" in row:
            cells.append(fill("{rollouts[success]:.0%}", row))
        rows.append(cells)
    return markdown([*header, "goal reached"][: len(rows[0])], rows)


def pusht_spread(results: Results) -> str:
    """The same for PushT, without the toy's goal."""
    return spread(results, "pusht")


def _load(results: Results, folder: str, names: list[str], episodes: str) -> list[dict[str, Any]]:
    """Return the records of these runs on one set of episodes, if they are there."""
    paths = [f"policy/{folder}/{episodes}/{name}.json" for name in names]
    return [results.load(path) for path in paths if (results.folder / path).is_file()]


def _score(runs: list[dict[str, Any]], last: int = 10) -> str:
    """Mean over runs, their last checkpoints and episodes, with the standard error over episodes."""
    scores = [[entry["scores"] for entry in run["checkpoints"][-last:]] for run in runs]
    summary = summarize(np.concatenate(scores))
    text = f"{summary.mean:.3f} ± {summary.standard_error:.3f}"
    if len(runs) > 1:
        means = [np.mean(table) for table in scores]
        text += f" ({min(means):.3f} to {max(means):.3f})"
    return text


def headline(results: Results) -> tuple[str, str]:
    """Scores of other networks on PushT: a U-Net from images, and an MLP from states."""
    images, first, small = (
        _score(_load(results, folder, names, episodes))
        for folder, names, episodes in (
            ("pusht-image", ["unet"], "fresh"),
            ("pusht-image", ["unet"], "first"),
            ("pusht", DRIFTING, "fresh"),
        )
    )
    return (
        f"score {images} on fresh seeds; {first} on Diffusion Policy's own",
        f"score {small} on fresh seeds",
    )


def shipped_policy(results: Results) -> str:
    """Scores of the PushT policy that ships, on every set of episodes."""
    fresh, third, first = (
        _score(_load(results, "pusht", ["unet-8-bits"], episodes)) for episodes in ("fresh", "third", "first")
    )
    return (
        f"score {fresh} and {third} on two fresh sets; {first} on Diffusion Policy's own, which we used to "
        "choose the loss"
    )


def scores(results: Results) -> str:
    """Score and network calls of each method with the same network and data."""
    rows = []
    for task, method, folder, names, last in ROWS:
        by_set = [_load(results, folder, names, episodes) for episodes in EPISODES]
        runs = by_set[0]
        entries = [entry for run in runs for entry in run["checkpoints"][-last:]]
        rows.append(
            (
                task,
                method,
                f"{int(entries[-1]['model'].rpartition(' ')[2]):,}",
                f"{len(runs)} × {last}",
                entries[-1]["weights"].rpartition(", ")[2].removesuffix(" calls"),
                *(_score(runs, last) if runs else "" for runs in by_set),
                f"{np.mean([entry['success_rate'] for entry in entries]):.0%}",
            )
        )
    header = ("task", "method", "steps", "runs × checkpoints", "calls per chunk")
    return markdown((*header, *EPISODES.values(), "success"), rows)


def trials(results: Results) -> str:
    """Short runs on PushT that differ in the loss: the last checkpoint on two sets of episodes."""
    rows = []
    for trial in results.load("policy/pusht/trials.json")["trials"]:
        by_set = [trial["scores"].get(episodes) for episodes in ("100000", "200000")]
        rows.append(
            (
                trial["settings"],
                fill("{energy_score:.4f}", trial["last"]),
                fill("{chunk_error:.3f}", trial["last"]),
                fill("{chunk_spread:.3f}", trial["last"]),
                *(fill("{mean:.3f} ± {standard_error:.3f}", score) if score else "" for score in by_set),
            )
        )
    header = ("loss", "energy score", "chunk error", "chunk spread", "seeds 100,000 on", "seeds 200,000 on")
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
