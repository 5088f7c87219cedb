"""Studies, statistics over seeds and tables, against values computed by hand."""

import json
import math

import pytest

from driftgen.errors import InputError
from driftgen.evaluation.ablations.result_table import RunResult, TableHead, table_markdown, table_record
from driftgen.evaluation.ablations.seed_statistics import Spread, judge, spread
from driftgen.evaluation.ablations.study import Base, Case, Column, Study, parse_section

RECORD = {
    "title": "Kernel normalization",
    "varies": "normalization",
    "paper": {"table": "a table", "finding": "both axes are best."},
    "bases": {"digits": {}, "cifar10": {"changes": {"optim.steps": 9}}},
    "cases": [
        {"label": "both (default)", "paper": 8.46},
        {
            "label": "over y",
            "changes": {"loss.normalization": "y"},
            "on": {"cifar10": {"changes": {"batch.positives": 3}, "encoders": ["mae"]}},
            "paper": 8.92,
        },
        {"label": "none", "changes": {"loss.normalization": "none"}},
    ],
    "order": ["both (default)", ["over y", "none"]],
    "columns": ["distance", "recall"],
}


def study(**changes):
    return parse_section(Study, {**RECORD, **changes}, "study.yaml")


def result(case, seed, distance, recall=0.5, **more):
    return RunResult(case, seed, {"1": {"FD-pixels": distance, "recall": recall}}, 10.0, **more)


RESULTS = [
    *(result("both (default)", seed, value) for seed, value in enumerate((1.0, 2.0, 3.0))),
    *(result("over y", seed, value, 0.25) for seed, value in enumerate((7.0, 8.0, 9.0))),
    *(result("none", seed, value) for seed, value in enumerate((2.0, 2.5, 3.0))),
]
HEAD = TableHead("normalization", "digits", "FD-pixels", {"command": "driftgen ablate normalization"})


def test_spread_has_the_sample_standard_deviation():
    # Mean 5, deviations -3, -1, 4: s² = (9 + 1 + 16) / 2 = 13.
    found = spread([2.0, 4.0, 9.0])
    assert found == Spread(3, 5.0, pytest.approx(math.sqrt(13)))
    assert found.error == pytest.approx(math.sqrt(13 / 3))
    assert spread([4.0]) == Spread(1, 4.0, None)
    assert spread([4.0]).error is None
    assert spread([]) is None
    assert spread([4.0, math.inf]) == Spread(2, math.inf, None)


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        # Standard errors 0.6 and 0.8: the threshold is 2 · √(0.36 + 0.64) = 2.
        (Spread(4, 1.0, 1.2), Spread(4, 3.01, 1.6), "holds"),
        (Spread(4, 1.0, 1.2), Spread(4, 2.99, 1.6), "unclear"),
        (Spread(4, 3.01, 1.2), Spread(4, 1.0, 1.6), "reversed"),
        (Spread(1, 1.0, None), Spread(3, 9.0, 0.1), "unclear"),
        (Spread(3, 1.0, 0.1), Spread(3, math.inf, None), "holds"),
        (Spread(3, math.inf, None), Spread(3, 1.0, 0.1), "reversed"),
        (Spread(3, math.inf, None), Spread(3, math.inf, None), "unclear"),
        (None, Spread(3, 1.0, 0.1), "not run"),
    ],
)
def test_verdict_needs_two_standard_errors(better, worse, verdict):
    assert judge(better, worse) == verdict


def test_record_holds_statistics_changes_and_verdicts():
    table = json.loads(json.dumps(table_record(study(), study().cases, RESULTS, HEAD), allow_nan=False))
    assert [row["case"] for row in table["rows"]] == ["both (default)", "over y", "none"]
    first, second, third = table["rows"]
    assert first["metrics"]["FD-pixels"] == {"mean": 2.0, "deviation": 1.0, "count": 3}
    assert second["metrics"]["recall"] == {"mean": 0.25, "deviation": 0.0, "count": 3}
    assert second["changes"] == {"loss.normalization": "y"}
    assert [run["seed"] for run in third["runs"]] == [0, 1, 2]
    assert (first["paper"], third["paper"]) == (8.46, None)
    assert table["command"] == "driftgen ablate normalization"
    # 2 against 8 is clear; 2 ± 0.58 against 2.5 ± 0.29 is not.
    assert [(o["better"], o["worse"], o["verdict"]) for o in table["order"]] == [
        ("both (default)", "over y", "holds"),
        ("both (default)", "none", "unclear"),
    ]


def test_markdown_shows_mean_deviation_and_the_papers_column():
    text = table_markdown(study(), study().cases, RESULTS, HEAD)
    assert "| normalization | FD-pixels | recall | seeds | paper: FID |" in text
    assert "| both (default) | 2.00 ± 1.00 | 0.500 ± 0.000 | 3 | 8.46 |" in text
    assert "| none | 2.50 ± 0.50 | 0.500 ± 0.000 | 3 |  |" in text
    assert "| both (default) | over y | holds |" in text
    assert "driftgen ablate normalization" in text


def test_the_best_case_is_compared_with_every_other_and_neighbors_with_each_other():
    chain = study(order=["both (default)", "none", "over y"])
    pairs = [(o["better"], o["worse"]) for o in table_record(chain, chain.cases, RESULTS, HEAD)["order"]]
    assert pairs == [("both (default)", "none"), ("both (default)", "over y"), ("none", "over y")]


def test_a_diverged_run_has_no_mean():
    results = [result("both (default)", 0, 1.0), RunResult("over y", 0, {}, failed="not finite")]
    text = table_markdown(study(), study().cases, results, HEAD)
    assert "| over y | diverged | diverged | 1 | 8.92 |" in text
    assert "| none |  |  | 0 |  |" in text
    row = table_record(study(), study().cases, results, HEAD)["rows"][1]
    assert row["metrics"]["FD-pixels"]["mean"] is None
    assert row["runs"][0]["failed"] == "not finite"


def test_a_run_that_could_not_run_counts_in_no_statistic():
    broken = [RunResult("over y", seed, {}, error="no | space") for seed in (0, 1)]
    results = [result("none", 0, 1.0), RunResult("none", 1, {}, error="no file"), *broken]
    text = table_markdown(study(), study().cases, results, HEAD)
    assert "| none | 1.00 | 0.500 | 1 |  |" in text
    assert "- none, seed 1 failed: no file\n" in text
    assert "| over y | failed: no \\| space |  | 0 | 8.92 |" in text
    assert "Diverged" not in text
    row = table_record(study(), study().cases, results, HEAD)["rows"][1]
    assert row["metrics"]["FD-pixels"] is None
    assert [run["error"] for run in row["runs"]] == ["no | space"] * 2


def test_columns_of_several_guidance_strengths():
    both = study(guidance=[1.0, 2.0], columns=["distance", "distance@2", "recognized@2"])
    assert both.parsed_columns == [
        Column("distance", 1.0),
        Column("distance", 2.0),
        Column("recognized", 2.0),
    ]
    results = [RunResult("none", 0, {"1": {"FD-pixels": 1.0}, "2": {"FD-pixels": 3.0}})]
    text = table_markdown(both, both.cases, results, HEAD)
    assert "| FD-pixels, α=1 | FD-pixels, α=2 | seeds |" in text  # no run has `recognized`
    assert "| none | 1.00 | 3.00 | 1 |" in text


def test_a_case_has_changes_and_encoders_by_base():
    case = study().cases[1]
    assert case.changes_on("digits") == {"loss.normalization": "y"}
    assert case.changes_on("cifar10") == {"loss.normalization": "y", "batch.positives": 3}
    assert case.encoders_on("digits") is None
    assert case.encoders_on("cifar10") == ("mae",)
    assert Case(label="{0.02, 0.05} (default)").slug == "0.02-0.05-default"


def test_cases_are_chosen_by_name_or_label():
    assert [case.label for case in study().choose_cases(["none", "over y"])] == ["over y", "none"]
    assert study().choose_cases([]) == list(study().cases)
    with pytest.raises(InputError, match="case='over-x' is not known: did you mean 'over-y'"):
        study().choose_cases(["over-x"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": ["both"]}, "order: 'both' is not known, choose from both"),
        ({"cases": RECORD["cases"][:1]}, "cases: Tuple should have at least 2 items"),
        ({"cases": [*RECORD["cases"], {"label": "Over Y"}]}, "two cases have the name 'over-y'"),
        ({"cases": [*RECORD["cases"], {"label": "x", "on": {"mnist": {}}}]}, "'mnist' is not known"),
        ({"columns": ["distance@2"]}, "column distance@2: guidance lacks this value"),
        ({"columns": ["FD pixels"]}, "is no column"),
        ({"guidance": [0.5]}, "guidance.0: Input should be greater than or equal to 1"),
        ({"seeds": [-1]}, "seeds.0: Input should be greater than or equal to 0"),
        ({"bases": {}}, "bases: "),
        ({"sedes": [1]}, "sedes: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_study_is_one_line(changes, message):
    with pytest.raises(InputError) as caught:
        study(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("study.yaml: ")
    assert "\n" not in str(caught.value)


def test_a_base_uses_encoders_that_it_has():
    with pytest.raises(InputError, match="use: 'mae' is not known, choose from none"):
        parse_section(Base, {"about": "", "recipe": "digits", "use": ["mae"]}, "base.yaml")
