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


def test_figures_of_the_summary_are_those_of_the_tables():
    text = " ".join((RESULTS / "README.md").read_text().split())
    means = {
        (folder.name, row["case"], metric): value["mean"]
        for folder in FOLDERS
        for row in load(folder)["rows"]
        for metric, value in row["metrics"].items()
    }
    distance, best = "FD-pixels", "anti-symmetry (default)"
    broken = [c.label for c in load_study("antisymmetry").cases if c.label != best]
    assert f"is {means['antisymmetry', best, distance]:.2f} with anti-symmetry" in text
    assert f"{min(means['antisymmetry', case, distance] for case in broken):.2f} or more without" in text
    shown = {
        "positives": {"N_pos = 1": "diversity {diversity:.2f}"},
        "normalization": {
            "no normalization": "clearly worse ({FD-pixels:.2f})",
            "softmax over x and y (default)": "({FD-pixels:.3f} and",
            "softmax over y": "{FD-pixels:.3f}), but three seeds",
        },
        "temperatures": {
            "{0.02, 0.05, 0.2} (default)": "all three ({FD-pixels:.3f})",
            "0.05": "0.05 ({FD-pixels:.3f})",
            "0.2": "0.2 ({FD-pixels:.3f})",
            "0.02": "0.02 ({FD-pixels:.3f})",
        },
        "feature-sets": {
            "(a, b)": "{FD-pixels:.3f} with (a, b)",
            "(a-c)": "{FD-pixels:.3f} with (a-c)",
            "(a-d) (default)": "{FD-pixels:.3f} with (a-d)",
        },
        "encoders": {"raw pixels": "best ({FD-pixels:.3f})"},
        "style": {
            "without": "{FD-pixels:.3f} without",
            "with (32 codebooks of 64)": "{FD-pixels:.3f} with,",
        },
        "second-encoder": {
            "MAE": "{FD-pixels:.3f} with the MAE",
            "second encoder": "{FD-pixels:.3f} with the second",
            "both": "{FD-pixels:.3f} with both",
        },
        "kernels": {
            "Laplace, both axes (default)": "both axes is best ({FD-pixels:.3f})",
            "Laplace, Sinkhorn": "Laplace kernel ({FD-pixels:.3f})",
            "Gaussian, both axes": "({FD-pixels:.3f} to",
            "Gaussian, Sinkhorn": "to {FD-pixels:.3f})",
            "inverse multiquadric, both axes": "distance {FD-pixels:.2f}",
        },
    }
    for study, cases in shown.items():
        for case, template in cases.items():
            values = {metric: value for (s, c, metric), value in means.items() if (s, c) == (study, case)}
            assert template.format_map(values) in text, template
