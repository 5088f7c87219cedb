"""A run, or two side by side, as a part of another page: what is known now, without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from driftgen.report.chart import make_chart
from driftgen.report.comparison_page import compared_charts, compared_table, folder_names
from driftgen.report.curves import run_panels
from driftgen.report.page import render
from driftgen.report.run_files import RunFiles
from driftgen.report.run_page import Frame, describe_run, evaluation_rows, read_frames, read_real

__all__ = ["show_comparison", "show_run"]


def show_run(run: RunFiles, state: str, commands: dict[str, str]) -> str:
    """Return the HTML of a run.

    Args:
        run: its files.
        state: whether it continues, in words.
        commands: what to type, by purpose.
    """
    return render(
        "fragments/run.html",
        title=run.name,
        subtitle=describe_run(run),
        state=state,
        tiles=run.tiles(),
        notes=run.notes,
        warnings=run.warnings(),
        unreadable=run.unreadable(),
        frame=_newest(run),
        what="Reconstructions" if run.pretrains else "Newest samples",
        real=read_real(run),
        charts=[make_chart(panel) for panel in run_panels(run.header, run.rows)],
        evaluation=evaluation_rows(run.evaluation),
        facts=run.facts(),
        commands=commands,
    )


def show_comparison(runs: Sequence[RunFiles]) -> str:
    """Return the HTML of several runs: their figures, newest samples, curves and different options."""
    names = folder_names(runs)
    samples: list[dict[str, Any]] = []
    for color, (name, run) in enumerate(zip(names, runs, strict=True)):
        frame = _newest(run)
        if frame is not None:
            samples.append({"name": name, "color": color % 8, "frame": frame})
    return render(
        "fragments/comparison.html",
        names=names,
        notes=[f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes],
        warnings={name: found for name, run in zip(names, runs, strict=True) if (found := run.warnings())},
        facts=compared_table([run.facts() for run in runs]),
        samples=samples,
        charts=compared_charts(names, runs),
        differences=compared_table([run.options() for run in runs], all_rows=False),
    )


def _newest(run: RunFiles) -> Frame | None:
    """Return the sheet of the last step; None if there is none, or if it is being written."""
    frames = read_frames(replace(run, sheets=dict(list(run.sheets.items())[-1:])))
    return frames[0] if frames else None
