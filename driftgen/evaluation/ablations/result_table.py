"""The table of a study, as JSON and Markdown: mean and spread over seeds beside the paper's figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from driftgen.evaluation.ablations.seed_statistics import Spread, judge, spread
from driftgen.evaluation.ablations.study import DISTANCE, Case, Column, Study

__all__ = ["RunResult", "TableHead", "table_markdown", "table_record"]

Figures = Mapping[str, Mapping[str, float]]  # guidance α, as text -> metric -> value


@dataclass(frozen=True)
class RunResult:
    """Result of one case with one seed.

    Attributes:
        case: label of the case.
        seed: of the run.
        figures: metrics by guidance α; empty if the run diverged or could not run.
        seconds: training time.
        failed: why the run diverged; None if it did not.
        warnings: health warnings of the run.
        error: why the run could not be trained or scored; None if it could. It then counts in no statistic.
    """

    case: str
    seed: int
    figures: Figures
    seconds: float = 0.0
    failed: str | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class TableHead:
    """Everything about a table but its figures.

    Attributes:
        name: of the study.
        base: name of the base.
        distance: name of the Fréchet distance, such as FD-pixels.
        facts: command, hardware, evaluator, configuration: entries of ``table.json``.
        notes: lines below the table.
    """

    name: str
    base: str
    distance: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def table_record(study: Study, cases: Sequence[Case], results: Sequence[RunResult], head: TableHead) -> Any:
    """Return the table as JSON data: every run, the statistics of every case, and the paper's ordering."""
    rows = []
    for case in cases:
        runs = [result for result in results if result.case == case.label]
        statistics = {
            _heading(study, column, head): _as_json(_spread(runs, column, head))
            for column in _columns(study, results, head)
        }
        rows.append(
            {
                "case": case.label,
                "paper": case.paper,
                "changes": case.changes_on(head.base),
                "encoders": case.encoders_on(head.base),
                "metrics": statistics,
                "runs": [
                    {
                        "seed": run.seed,
                        "figures": {alpha: dict(metrics) for alpha, metrics in run.figures.items()},
                        "seconds": round(run.seconds, 1),
                        "failed": run.failed,
                        "warnings": list(run.warnings),
                        **({} if run.error is None else {"error": run.error}),
                    }
                    for run in sorted(runs, key=lambda run: run.seed)
                ],
            }
        )
    order = [{"better": a, "worse": b, "verdict": v} for a, b, v in _verdicts(study, results, head)]
    paper = None if study.paper is None else study.paper.model_dump()
    identity = {"study": head.name, "title": study.title, "base": head.base}
    return {**identity, **head.facts, "paper": paper, "rows": rows, "order": order}


def table_markdown(study: Study, cases: Sequence[Case], results: Sequence[RunResult], head: TableHead) -> str:
    """Return the table as Markdown: a row for each case, the verdict on the paper's ordering, the command."""
    columns = _columns(study, results, head)
    spreads = {
        case.label: [
            _spread([r for r in results if r.case == case.label], column, head) for column in columns
        ]
        for case in cases
    }
    digits = [_digits([spreads[case.label][i] for case in cases]) for i in range(len(columns))]
    headings = [study.varies, *(_heading(study, column, head) for column in columns), "seeds"]
    figures = study.paper is not None and any(case.paper is not None for case in cases)
    if study.paper is not None and figures:
        headings.append(f"paper: {study.paper.metric.partition(',')[0]}")
    lines = [f"# {study.title}", ""]
    lines += [study.about, ""] if study.about else []
    lines += [_row(headings), _row(["---", *["---:"] * (len(headings) - 1)])]
    failures: list[str] = []  # of single seeds
    for case in cases:
        runs = [result for result in results if result.case == case.label]
        cells = [_cell(s, d) for s, d in zip(spreads[case.label], digits, strict=True)]
        errors = [run for run in runs if run.error is not None]
        if errors and len(errors) == len(runs):
            cells[0] = f"failed: {'; '.join(dict.fromkeys(str(run.error) for run in errors))}"
        elif errors:
            failures += [f"{case.label}, seed {run.seed} failed: {run.error}" for run in errors]
        paper = ["" if case.paper is None else f"{case.paper:.2f}"] if figures else []
        lines.append(_row([case.label, *cells, str(len(runs) - len(errors)), *paper]))
    notes = [f"{case.label}: {case.note}" for case in cases if case.note]
    general = ["Mean ± standard deviation over seeds."]
    if any(run.failed for run in results):
        general.append("Diverged: gradients or samples were not finite.")
    lines += ["", *(f"- {note}" for note in (*general, *failures, *head.notes, *notes))]
    if study.paper is not None:
        source = f"{study.paper.table}; {study.paper.metric}; {study.paper.setting}"
        lines.append(f"- Paper: {source}. Compare the ordering, not the values.")
    lines += _ordering(study, results, head)
    command = head.facts.get("command")
    lines += ["", "```sh", str(command), "```"] if command else []
    return "\n".join(lines) + "\n"


def _ordering(study: Study, results: Sequence[RunResult], head: TableHead) -> list[str]:
    verdicts = _verdicts(study, results, head)
    if not verdicts:
        return []
    source = "The paper's ordering" if study.paper is not None else "Expected ordering"
    finding = f": {study.paper.finding}" if study.paper is not None else ""
    lines = ["", f"## {source}", "", f"By {head.distance}, lower is better{finding}", ""]
    lines += [_row(["better", "worse", "here"]), _row(["---"] * 3)]
    lines += [_row(verdict) for verdict in verdicts]
    return [
        *lines,
        "",
        "Holds and reversed: the means differ by more than twice the standard error of their difference.",
    ]


def _verdicts(study: Study, results: Sequence[RunResult], head: TableHead) -> list[tuple[str, str, str]]:
    """Return whether the paper's ordering holds: for the best case with every other, and for neighbors."""
    first = Column(DISTANCE, study.guidance[0])
    spreads = {label: _spread([r for r in results if r.case == label], first, head) for label in study.labels}
    groups = study.groups
    with_best = [(above, below) for above in groups[:1] for below in groups[1:]]
    pairs = [
        pair
        for above, below in (*with_best, *itertools.pairwise(groups))
        for pair in itertools.product(above, below)
    ]
    return [(a, b, judge(spreads[a], spreads[b])) for a, b in dict.fromkeys(pairs)]


def _columns(study: Study, results: Sequence[RunResult], head: TableHead) -> list[Column]:
    """Return the distances, and the other columns that any run has figures for."""
    return [
        column
        for column in study.parsed_columns
        if column.metric == DISTANCE or any(_figure(run, column, head) is not None for run in results)
    ]


def _figure(run: RunResult, column: Column, head: TableHead) -> float | None:
    metric = head.distance if column.metric == DISTANCE else column.metric
    return run.figures.get(f"{column.guidance:g}", {}).get(metric)


def _spread(runs: Sequence[RunResult], column: Column, head: TableHead) -> Spread | None:
    values = [math.inf if run.failed else _figure(run, column, head) for run in runs]
    return spread([value for value in values if value is not None])


def _heading(study: Study, column: Column, head: TableHead) -> str:
    name = head.distance if column.metric == DISTANCE else column.metric
    return name if len(study.guidance) == 1 else f"{name}, α={column.guidance:g}"


def _as_json(value: Spread | None) -> dict[str, Any] | None:
    if value is None:
        return None
    mean = value.mean if math.isfinite(value.mean) else None  # JSON has no infinity
    return {"mean": mean, "deviation": value.deviation, "count": value.count}


def _digits(spreads: Sequence[Spread | None]) -> int:
    """Return the decimals of a column, so that its smallest mean has about three digits."""
    means = [abs(s.mean) for s in spreads if s is not None and math.isfinite(s.mean)]
    smallest = min(means, default=0.0)
    return 3 if smallest < 1 else 2 if smallest < 10 else 1


def _cell(value: Spread | None, digits: int) -> str:
    if value is None:
        return ""
    if math.isinf(value.mean):
        return "diverged"
    deviation = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{deviation}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
