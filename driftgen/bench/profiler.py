"""Profile of a training step: the most expensive kernels, by part of the step."""

from __future__ import annotations

import bisect
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from driftgen.features.stack import FeatureStack

__all__ = ["PHASES", "Cost", "Phases", "costs", "profile_step", "show_costs"]

PHASES = ("generator", "encoder", "loss", "optimizer")
MARK = "bench phase: "
SHOWN = 20


class Phases:
    """Marks the beginning of each part of a step in a profile, forward and backward.

    The parts of a step run one after the other, so a part ends at the next mark, on any thread.
    """

    def begin(self, name: str) -> None:
        """Mark the beginning of part ``name``."""
        with record_function(MARK + name):
            pass

    def watch(self, generator: nn.Module, features: FeatureStack, loss: nn.Module) -> None:
        """Mark the calls of these three from now on."""
        generator.register_forward_pre_hook(lambda *_: self.begin("generator"))
        generator.register_forward_hook(lambda _module, _args, out: self._backward("generator", [out]))
        loss.register_forward_pre_hook(lambda *_: self.begin("loss"))
        encode = features.features

        def marked(x: Tensor, **options: Any) -> dict[str, Tensor]:
            self.begin("encoder")
            vectors = encode(x, **options)
            self._backward("encoder", vectors.values())
            return vectors

        features.features = marked  # type: ignore[method-assign]

    def _backward(self, name: str, outputs: Iterable[Tensor]) -> None:
        """Mark the backward pass of a part, which begins with the gradient of an output."""
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda _: self.begin(name))


@dataclass(frozen=True)
class Cost:
    """Calls and time of one kernel (on the CPU: one operator) in one part of a step."""

    phase: str
    name: str
    calls: float  # per step
    seconds: float


def profile_step(run: Callable[[], Any], device: torch.device, steps: int = 1) -> list[Cost]:
    """Return the costs of one step, the largest first. Warm ``run`` up before: compilation counts too."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its log lines would stand between the tables
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, acc_events=True) as recorded:
        for _ in range(steps):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return costs(recorded.events() or [], gpu=device.type == "cuda", steps=steps)


def costs(events: Iterable[Any], *, gpu: bool, steps: int) -> list[Cost]:
    """Sum the events of a profile by part and name.

    A kernel belongs to the part that launched it, also if it runs later.
    """
    events = list(events)
    marks = sorted((e.time_range.start, e.name.removeprefix(MARK)) for e in events if e.name.startswith(MARK))
    times = [time for time, _ in marks]
    # A kernel has the id of the call that launched it (cudaLaunchKernel, ...). Operators (aten::mm, ...) have
    # ids of their own.
    launches = {e.id: e.time_range.start for e in events if _on_host(e) and e.name.startswith("cu")}
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event.is_user_annotation or event.name.startswith(MARK) or _on_host(event) == gpu:
            continue
        start = launches.get(event.id) if gpu else event.time_range.start
        spent = event.time_range.end - event.time_range.start if gpu else event.self_cpu_time_total
        place = -1 if start is None else bisect.bisect_right(times, start) - 1
        entry = total[marks[place][1] if place >= 0 else "other", event.name]
        entry[0] += 1
        entry[1] += spent / 1e6
    sums = [Cost(phase, name, n / steps, s / steps) for (phase, name), (n, s) in total.items()]
    return sorted(sums, key=lambda cost: -cost.seconds)


def _on_host(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CPU)


def show_costs(costs: list[Cost], console: Console | None = None) -> None:
    """Print the time of each part and the most expensive kernels."""
    console, whole = console or Console(), sum(cost.seconds for cost in costs) or 1.0
    totals: dict[str, float] = defaultdict(float)
    for cost in costs:
        totals[cost.phase] += cost.seconds
    parts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    phases = [*(phase for phase in PHASES if phase in totals), *sorted(totals.keys() - set(PHASES))]
    for column in ("part", "ms", "share"):
        parts.add_column(column, justify="left" if column == "part" else "right")
    for phase in phases:
        parts.add_row(phase, f"{totals[phase] * 1000:.2f}", f"{totals[phase] / whole:.0%}")
    console.print(parts, "")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("kernel", no_wrap=True, overflow="ellipsis", max_width=40)
    for column in ("calls", "ms", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for cost in costs[:SHOWN]:
        figures = f"{cost.calls:g}", f"{cost.seconds * 1000:.2f}", f"{cost.seconds / whole:.1%}"
        table.add_row(cost.phase, escape(cost.name), *figures)
    console.print(table)
