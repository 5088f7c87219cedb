"""The tables in results/ablations agree with their records."""

import json
import re
from pathlib import Path

import pytest

from driftgen.evaluation.ablations.result_table import RunResult, TableHead, table_record
from driftgen.training.ablation_config import load_study, study_names

RESULTS = Path(__file__).parents[2] / "results" / "ablations"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/table.json"))


def load(folder):
    return json.loads((folder / "table.json").read_text())


def test_every_study_has_a_table():
    assert {load(folder)["study"] for folder in FOLDERS} == {summary.name for summary in study_names()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_statistics_and_verdicts_follow_from_the_runs(folder):
    record = load(folder)
    study = load_study(record["study"])
    runs = [
        RunResult(row["case"], run["seed"], run["figures"], run["seconds"], run["failed"])
        for row in record["rows"]
        for run in row["runs"]
    ]
    assert {(run.case, run.seed) for run in runs} == {(c.label, s) for c in study.cases for s in study.seeds}
    distance = record["evaluator"]["distance"].partition(":")[0]
    head = TableHead(record["study"], record["base"], distance)
    again = table_record(study, study.cases, runs, head)
    assert [row["metrics"] for row in again["rows"]] == [row["metrics"] for row in record["rows"]]
    assert [row["paper"] for row in again["rows"]] == [row["paper"] for row in record["rows"]]
    assert again["order"] == record["order"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_show_the_statistics_and_the_command(folder):
    record, text = load(folder), (folder / "table.md").read_text()
    table = text.partition("\n## ")[0]
    assert record["command"].startswith(f"driftgen ablate {record['study']}")
    assert record["command"] in text
    assert {"hardware", "torch", "evaluator", "base_changes", "seeds", "recipe"} <= record.keys()
    for row in record["rows"]:
        (line,) = re.findall(rf"^\| {re.escape(row['case'])} \| .*\|$", table, re.MULTILINE)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for cell, metric in zip(cells[1:], row["metrics"].values(), strict=False):
            mean, _, deviation = cell.partition(" ± ")
            assert float(mean) == pytest.approx(metric["mean"], abs=0.0501)
            assert float(deviation) == pytest.approx(metric["deviation"], abs=0.0501)
