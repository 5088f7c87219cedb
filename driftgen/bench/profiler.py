"""Where the time of a training step goes: the most costly kernels, by the part of the step they belong to."""

from __future__ import annotations

import bisect
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
    """Marks in a profile where each part of a step begins, forward and backward.

    A step is one thing after the other, so a part lasts until the next mark, on whatever thread its backward
    pass runs.
    """

    def begin(self, name: str) -> None:
        """From here on the work is that of part ``name``."""
        with record_function(MARK + name):
            pass

    def watch(self, generator: nn.Module, features: FeatureStack, loss: nn.Module) -> None:
        """Marks the beginnings of these three from now on."""
        generator.register_forward_pre_hook(lambda *_: self.begin("generator"))
        generator.register_forward_hook(lambda _module, _args, out: self._backward("generator", [out]))
        loss.register_forward_pre_hook(lambda *_: self.begin("loss"))
        encode = features.features

        def marked(x: Tensor) -> dict[str, Tensor]:
            self.begin("encoder")
            found = encode(x)
            self._backward("encoder", found.values())
            return found

        features.features = marked  # type: ignore[method-assign]

    def _backward(self, name: str, outputs: Iterable[Tensor]) -> None:
        """The backward pass of a part begins when the gradient of an output is there."""
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda _: self.begin(name))


@dataclass(frozen=True)
class Cost:
    """One kernel (on the CPU: operator) within one part of a step."""

    phase: str
    name: str
    calls: float  # of one step
    seconds: float


def profile_step(run: Callable[[], Any], device: torch.device, steps: int = 1) -> list[Cost]:
    """Costs of one step, the largest first. ``run`` has been run before, so that nothing is compiled now."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(steps):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return costs(found.events() or [], gpu=device.type == "cuda", steps=steps)


def costs(events: Iterable[Any], *, gpu: bool, steps: int) -> list[Cost]:
    """Groups the events of a profile by part and name.

    A kernel belongs to the part in which it was launched, however much later it ran.
    """
    events = list(events)
    marks = sorted((e.time_range.start, e.name.removeprefix(MARK)) for e in events if e.name.startswith(MARK))
    times = [time for time, _ in marks]
    # The call that launched a kernel (cudaLaunchKernel, ...) has its number. Operators have numbers of their
    # own, and names such as aten::mm.
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
    found = [Cost(phase, name, n / steps, s / steps) for (phase, name), (n, s) in total.items()]
    return sorted(found, key=lambda cost: -cost.seconds)


def _on_host(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CPU)


def show_costs(found: list[Cost], console: Console | None = None) -> None:
    """The parts, and the most costly kernels of all."""
    console, whole = console or Console(), sum(cost.seconds for cost in found) or 1.0
    totals: dict[str, float] = defaultdict(float)
    for cost in found:
        totals[cost.phase] += cost.seconds
    parts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rest = sorted(totals.keys() - set(PHASES))
    for column in ("part", "ms", "share"):
        parts.add_column(column, justify="left" if column == "part" else "right")
    for phase in (*PHASES, *rest):
        parts.add_row(phase, f"{totals[phase] * 1000:.2f}", f"{totals[phase] / whole:.0%}")
    console.print(parts, "")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("kernel", no_wrap=True, overflow="ellipsis", max_width=40)
    for column in ("calls", "ms", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for cost in found[:SHOWN]:
        figures = f"{cost.calls:g}", f"{cost.seconds * 1000:.2f}", f"{cost.seconds / whole:.1%}"
        table.add_row(cost.phase, escape(cost.name), *figures)
    console.print(table)
