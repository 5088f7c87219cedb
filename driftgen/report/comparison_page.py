"""One page for several runs: curves overlaid, samples side by side, differences of their configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.report.chart import Chart, make_chart
from driftgen.report.curves import GROUPS, Line, Panel, run_panels
from driftgen.report.page import write_page
from driftgen.report.run_files import RunFiles, open_run
from driftgen.report.run_page import FRAMES, read_frames, read_real, write_report
from driftgen.report.toy_page import read_toy, write_toy_page
from driftgen.support.atomic_write import make_folder

__all__ = ["compared_charts", "compared_table", "folder_names", "write_comparison", "write_reports"]

PAGE = "comparison.html"
MISSING = "—"
LEAST_FRAMES = 4  # sheets per timeline, however many runs there are
MOST_RUNS = 16


def write_reports(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run again, or a page that compares several; return its path.

    Args:
        folders: runs of ``driftgen train`` or ``driftgen pretrain``; a single one may be of ``driftgen toy``.
        out: the page. Default: ``report.html`` in the folder of a single run, ``comparison.html`` in the
            current folder for several.
    """
    if not folders:
        raise InputError("no run given: name at least one folder, such as runs/digits")
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise InputError(f"{folder} is given twice: name every run once")
    if len(folders) > MOST_RUNS:
        raise InputError(f"{len(folders)} runs given: a page compares at most {MOST_RUNS}")
    if out is not None:
        if out.is_dir() or out.suffix.lower() not in (".html", ".htm"):
            raise InputError(f"--out {out} is not an HTML file: give a name such as {PAGE}")
        make_folder(out.parent)
    if len(folders) == 1:
        if read_toy(folders[0]) is not None:
            return write_toy_page(folders[0], out)
        open_run(folders[0])
        return write_report(folders[0], out)
    return write_comparison([open_run(folder) for folder in folders], out or Path(PAGE))


def write_comparison(runs: Sequence[RunFiles], out: Path) -> Path:
    """Write the page that compares runs and return its path."""
    names = folder_names(runs)
    samples = []
    for color, (name, run) in enumerate(zip(names, runs, strict=True)):
        frames = read_frames(run, max(LEAST_FRAMES, FRAMES // len(runs)))
        if frames:
            samples.append({"name": name, "color": color % 8, "frames": frames})
    warnings = {name: list_ for name, run in zip(names, runs, strict=True) if (list_ := run.warnings())}
    environments = [run.environment() for run in runs]
    found = [run.header.get("command") for run in runs]
    values: dict[str, Any] = {
        "summary": True,
        "warnings": warnings,
        "samples": samples,
        "charts": compared_charts(names, runs),
        "differences": compared_table([run.options() for run in runs], all_rows=False),
        "environment": compared_table(environments),
        "commands": {n: c for n, c in zip(names, found, strict=True) if isinstance(c, str) and c},
    }
    contents = {"summary": "Summary"}
    for key, text in (("warnings", "Warnings"), ("samples", "Samples")):
        if values[key]:
            contents[key] = text
    if values["charts"]:
        contents["curves"] = "Curves"
    contents["configuration"] = "Configuration"
    if values["environment"] or values["commands"]:
        contents["environment"] = "Commands and environment"
    return write_page(
        out,
        "comparison.html",
        title=f"Comparison of {len(runs)} runs",
        subtitle=" · ".join(names),
        contents=contents,
        origin="from the files of the runs",
        names=names,
        facts=compared_table([run.facts() for run in runs]),
        reals=_reals(names, runs),
        notes=[f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes],
        **values,
    )


def folder_names(runs: Sequence[RunFiles]) -> list[str]:
    """Return the names of the folders, with as many parents as tell equal names apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("folders are different")


def compared_charts(names: Sequence[str], runs: Sequence[RunFiles]) -> list[Chart]:
    """Return one chart per quantity, with a curve for each run that has it.

    A panel of several curves, such as one per temperature, becomes a chart for each.
    """
    merged: dict[str, tuple[Panel, dict[str, Line]]] = {}
    for name, run in zip(names, runs, strict=True):
        for panel in run_panels(run.header, run.rows):
            if panel.title == GROUPS:
                continue
            for curve, line in panel.lines.items():
                merged.setdefault(panel.title_of(curve), (panel, {}))[1][name] = line
    charts = []
    for title, (panel, lines) in merged.items():
        chart = make_chart(
            panel._replace(title=title, lines={name: lines.get(name, ([], [])) for name in names})
        )
        charts.append(chart)
    return charts


def _reals(names: Sequence[str], runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return the real images of each different dataset of the generators."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        data = run.config.get("data")
        groups.setdefault(str(data), []).append(i)
    reals = []
    for members in groups.values():
        picture = next((p for i in members if (p := read_real(runs[i])) is not None), None)
        if picture is not None:
            several = f" of {', '.join(names[i] for i in members)}" if len(groups) > 1 else ""
            reals.append({"title": f"Real images{several}", "picture": picture})
    return reals


def compared_table(columns: Sequence[Mapping[str, str]], all_rows: bool = True) -> dict[str, list[str]]:
    """Return the rows of a table of several mappings; without ``all_rows`` those with different values."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = {key: [column.get(key, MISSING) for column in columns] for key in keys}
    return {key: row for key, row in rows.items() if all_rows or len(set(row)) > 1}
