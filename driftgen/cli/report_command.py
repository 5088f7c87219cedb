"""The ``report`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, such as runs/digits.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file. Default: report.html of the run, or comparison.html for several."),
    ] = None,
) -> None:
    """Write the report of a run again, or one page that compares several runs."""
    from driftgen.report.comparison_page import write_reports

    print(write_reports(runs, out))
