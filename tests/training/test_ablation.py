"""Studies that ship with the package, and whole studies at tiny size."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from driftgen.data.config import Data
from driftgen.errors import InputError
from driftgen.evaluation.ablations.run_scores import RunScorer
from driftgen.model_io import save_model
from driftgen.training.ablation_config import StudyPlan, load_base, load_study, parse_seeds, study_names
from driftgen.training.ablation_run import RECORD, AblationStudy
from driftgen.training.ablation_workers import Job, Workers, run_job
from driftgen.training.build import build_features, build_mae

ROOT = Path(__file__).parents[2]
TINY = (
    "optim.steps=2",
    "batch={classes: 2, generated: 2, positives: 2, unconditional: 1}",
    "output.metrics_every=1",
)
STUDIES = [(summary.name, base) for summary in study_names() for base in summary.bases]
WITH_PAPER = {name for name, _ in STUDIES} - {"kernels", "guidance"}


def tiny(name, out, cases=(), overrides=TINY, seeds=(0, 1)):
    return StudyPlan.load(name, out=out / name, cases=cases, seeds=seeds, overrides=overrides)


def study(plan, processes=1, **options):
    console = Console(quiet=True)
    return AblationStudy(
        plan, processes, "cpu", samples=20, command="driftgen ablate", console=console, **options
    )


def figures(path):
    """Return the figures of a table, without times."""
    table = json.loads((path.parent / "table.json").read_text())
    return {row["case"]: [run["figures"] for run in row["runs"]] for row in table["rows"]}


@pytest.mark.parametrize(("name", "base"), STUDIES)
def test_every_case_is_a_valid_configuration_of_its_base(name, base, tmp_path):
    plan = StudyPlan.load(name, base=base, out=tmp_path, overrides=["data.path=images.npz"])
    configs = {case.label: plan.train_config(case, 1) for case in plan.cases}
    assert all(config.seed == 1 for config in configs.values())
    texts = {config.model_dump_json() for config in configs.values()}
    assert len(texts) == len(configs)  # every case differs from every other
    for encoder in plan.needed_encoders():
        assert plan.pretrain_config(encoder).data.path == "images.npz"


def test_the_papers_figures_are_those_of_its_tables():
    figures = {name: [case.paper for case in load_study(name).cases] for name in WITH_PAPER}
    assert figures == {
        "antisymmetry": [8.46, 41.05, 46.28, 86.16, 112.84, 177.14],
        "positives": [20.43, 10.39, 8.97, 8.46],
        "negatives": [11.82, 10.16, 9.32, 8.46],
        "encoders": [None, None, 8.46, 7.26, 4.28, 3.36],
        "normalization": [8.46, 8.92, 10.54],
        "temperatures": [10.62, 8.67, 8.96, 8.46],
        "feature-sets": [9.58, 9.1, 8.46],
        "style": [8.86, 8.46],
        "second-encoder": [9.35, None, 3.7],
    }


@pytest.mark.parametrize("name", sorted(WITH_PAPER))
def test_orderings_agree_with_the_papers_figures(name):
    loaded = load_study(name)
    paper = {case.label: case.paper for case in loaded.cases}
    groups = [[paper[label] for label in group] for group in loaded.groups]
    known = [values for values in groups if None not in values]
    assert len(known) >= 2
    for better, worse in itertools.pairwise(known):
        assert max(better) < min(worse)


def test_group_sizes_keep_the_number_of_samples():
    for base in load_study("negatives").bases:
        plan = StudyPlan.load("negatives", base=base, overrides=["data.path=images.npz"])
        sizes = [plan.train_config(case, 0).batch for case in plan.cases]
        assert len({size.classes * size.generated for size in sizes}) == 1
        assert all(size.generated == size.positives for size in sizes)


def test_changes_of_the_user_are_changes_of_the_base(tmp_path):
    overrides = ["loss.repulsion=3.0", "optim.steps=7", "data.path=images.npz", "data.augment.flip=true"]
    overrides.append("encoder.batch_size=9")
    plan = StudyPlan.load("antisymmetry", base="cifar10", out=tmp_path / "a", overrides=overrides)
    config = plan.train_config(plan.cases[0], 4)
    assert (config.loss.repulsion, config.optim.steps, config.data.augment.flip) == (3.0, 7, True)
    assert plan.train_config(plan.cases[-1], 4).loss.repulsion == 0.0  # what the case varies
    encoder = plan.pretrain_config("mae")
    assert (encoder.data.path, encoder.optim.steps, encoder.batch_size) == ("images.npz", 2000, 9)
    assert encoder.data.augment.crop == "random-resized"
    assert config.encoders[0].path == str(tmp_path / "encoders-cifar10" / "mae")


def test_a_study_writes_its_table_and_runs_nothing_twice(tmp_path):
    plan = tiny("normalization", tmp_path, ["softmax-over-y"])
    path = study(plan).run()
    table = json.loads((path.parent / "table.json").read_text())
    assert table["seeds"] == [0, 1]
    assert table["evaluator"]["encoder"] == "pixels"
    assert {"command", "hardware", "torch", "driftgen", "base_changes", "set", "recipe"} <= table.keys()
    for row in table["rows"]:
        assert row["metrics"]["FD-pixels"]["count"] == 2
        assert [sorted(run["figures"]["1"]) for run in row["runs"]] == [
            ["FD-pixels", "diversity", "precision", "recall", "recognized"]
        ] * 2
    assert "| softmax over y | " in path.read_text()
    assert not list(path.parent.rglob("checkpoints"))
    records = {record: record.stat().st_mtime_ns for record in path.parent.rglob(RECORD)}
    assert len(records) == 2
    before = figures(path)
    assert figures(study(plan).run()) == before
    assert {record: record.stat().st_mtime_ns for record in records} == records


@pytest.mark.slow
def test_a_call_for_one_case_keeps_the_others_in_the_table(tmp_path):
    first = figures(study(tiny("style", tmp_path, seeds=(0,))).run())
    second = figures(study(tiny("style", tmp_path, ["without"], seeds=(1,))).run())
    assert [len(runs) for runs in second.values()] == [2, 1]
    assert {case: runs[:1] for case, runs in second.items()} == first


def test_a_stopped_study_resumes_to_the_same_table(tmp_path):
    whole = figures(study(tiny("style", tmp_path / "whole", ["without"])).run())
    plan = tiny("style", tmp_path / "stopped", ["without"])
    config = plan.train_config(plan.cases[0], 0)

    def stop(step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    job = Job("first", plan.run_folder(plan.cases[0], 0), config, "", "cpu")
    assert not run_job(job, stop).complete
    assert list((job.folder / "checkpoints").iterdir())
    assert figures(study(plan).run()) == whole


def test_another_evaluator_scores_again_without_training(tmp_path):
    plan = tiny("style", tmp_path, ["without"])
    path = study(plan).run()
    weights = {p: p.stat().st_mtime_ns for p in path.parent.rglob("model.safetensors")}
    again = AblationStudy(plan, 1, "cpu", samples=40, console=Console(quiet=True)).run()
    table = json.loads((again.parent / "table.json").read_text())
    assert table["evaluator"]["samples"] == 40
    assert {p: p.stat().st_mtime_ns for p in weights} == weights


@pytest.mark.slow
def test_studies_share_runs_of_the_same_configuration(tmp_path):
    first = study(tiny("normalization", tmp_path, ["softmax-over-x-and-y-default"])).run()
    other = study(tiny("temperatures", tmp_path, ["0.02-0.05-0.2-default", "0.02"]))
    jobs, _ = other._open_jobs()
    assert [job.key for job in jobs] == ["0.02, seed 0", "0.02, seed 1"]
    shared = [dict(result.figures) for result in other.results.values()]
    assert shared == figures(first)["softmax over x and y (default)"]
    longer = study(tiny("style", tmp_path, ["without"], (*TINY, "optim.steps=3")))
    assert len(longer._open_jobs()[0]) == 2


@pytest.mark.parametrize("name", ["other/runs/0.02-seed0", "temperatures/runs/0.02-seed0"])
@pytest.mark.parametrize("text", [b"\xff", None])
def test_damaged_runs_nearby_are_not_taken_over(tmp_path, name, text):
    run = study(tiny("temperatures", tmp_path, ["0.02-0.05-0.2-default"]))
    folder = run.plan.out.parent / name
    folder.mkdir(parents=True)
    (folder / RECORD).write_text("{}")
    if text is not None:
        (folder / "config.yaml").write_bytes(text)
    assert len(run._open_jobs()[0]) == 2
    assert not run.results


def test_a_run_that_diverges_is_a_row_of_the_table(tmp_path):
    overrides = (*TINY, "optim.lr=1e9", "optim.warmup=0", "optim.clip=1e9", "optim.steps=8")
    path = study(tiny("style", tmp_path, ["without"], overrides)).run()
    row = json.loads((path.parent / "table.json").read_text())["rows"][0]
    assert all(run["failed"] for run in row["runs"])
    assert "| without | diverged | 2 | 8.86 |" in path.read_text()


@pytest.mark.slow
def test_encoders_are_trained_once_and_shared(tmp_path):
    small = ["optim.steps=2", "batch_size=4", "mae.finetune_steps=1", "output.metrics_every=1"]
    plan = tiny("encoders", tmp_path, overrides=(*TINY, *(f"encoder.{change}" for change in small)))
    found = figures(study(plan, processes=2).run())
    assert all(len(runs) == 2 for runs in found.values())
    assert {p.name for p in plan.encoders.iterdir()} == {
        "mae",
        "mae-long",
        "mae-long-classified",
        "mae-wide",
        "random",
    }
    times = {p: p.stat().st_mtime_ns for p in plan.encoders.rglob("model.safetensors")}
    study(StudyPlan(**{**vars(plan), "out": tmp_path / "again", "seeds": (2,)})).run()
    assert {p: p.stat().st_mtime_ns for p in times} == times


@pytest.mark.slow
def test_processes_give_the_figures_of_one(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = figures(study(tiny("normalization", tmp_path / "one")).run())
    two = study(tiny("normalization", tmp_path / "two"), processes=2)
    two.threads = 1
    assert figures(two.run()) == one
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_interrupted_command_stops_its_processes_which_save(tmp_path):
    words = [sys.executable, "-m", "driftgen", "ablate", "style", "--out", str(tmp_path / "style")]
    words += ["--seeds", "0", "--processes", "2", "--set", "optim.steps=100000"]
    words += ["--set", "output.metrics_every=5", "--set", "output.checkpoint_every=100000"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if sum(len(path.read_text().splitlines()) > 1 for path in tmp_path.rglob("metrics.jsonl")) == 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert len(list(tmp_path.rglob("step-*/checksum.json"))) == 2  # both workers saved their state


def one_case_that_cannot_run(folder):
    """Write a study of three cases; the second starts from weights that are not there yet."""
    cases = [
        {"label": "plain", "changes": {"optim.lr": 1e-3}},
        {"label": "broken", "changes": {"init": str(folder / "weights")}},
        {"label": "fast", "changes": {"optim.lr": 3e-3}},
    ]
    text = {"title": "Three", "varies": "case", "bases": {"digits": {}}, "seeds": [0], "cases": cases}
    (folder / "three.yaml").write_text(json.dumps(text))
    return str(folder / "three.yaml")


@pytest.mark.slow
def test_one_case_that_cannot_run_leaves_the_others_alone(tmp_path, here):
    words = ["ablate", one_case_that_cannot_run(tmp_path), "--out", tmp_path / "study", "--processes", "1"]
    words += ["--samples", "20", *(word for change in TINY for word in ("--set", change))]
    done = here(*words)
    assert done.returncode == 2
    reason = f"{tmp_path / 'weights'} not found: {tmp_path} holds no run or model"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("driftgen: error: 1 of 3 runs failed (broken, seed 0), the first with: ")
    assert "the same command tries only these again" in last
    table = json.loads((tmp_path / "study" / "table.json").read_text())
    plain, broken, fast = table["rows"]
    assert reason in broken["runs"][0]["error"]
    assert broken["metrics"]["FD-pixels"] is None
    assert [row["metrics"]["FD-pixels"]["count"] for row in (plain, fast)] == [1, 1]
    (line,) = re.findall(r"^\| broken \| (.*)", done.stdout, re.MULTILINE)
    assert line.startswith("failed: ")
    assert reason in line
    assert line.endswith("| 0 |")

    records = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(RECORD)}
    assert len(records) == 2
    weights = next((tmp_path / "study" / "runs").glob("plain-*")) / "model"
    shutil.copytree(weights, tmp_path / "weights")
    done = here(*words)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in records} == records
    assert len(list(tmp_path.rglob(RECORD))) == 3


def test_cases_without_their_encoder_fail(tmp_path):
    """Cases that need no encoder run."""
    changes = (*TINY, "encoder.mae.options.base_channels=16")
    runs = study(tiny("encoders", tmp_path, ["mae-default", "raw-pixels"], changes, seeds=(0,)))
    path = runs.run()
    with pytest.raises(InputError, match=r"1 of 2 runs failed \(MAE \(default\), seed 0\), .* encoder mae: "):
        runs.check_failures()
    assert {case: len(found[0]) for case, found in figures(path).items()} == {
        "raw pixels": 1,
        "MAE (default)": 0,
    }
    assert "| MAE (default) | failed: encoder mae: mae.options.base_channels=16: " in path.read_text()


def test_a_wrong_configuration_fails_every_run(tmp_path):
    runs = study(tiny("style", tmp_path, overrides=(*TINY, "generator.options.depth=0")))
    assert "| without | failed: generator: depth=0 is too small" in runs.run().read_text()
    with pytest.raises(InputError, match=r"4 of 4 runs failed \(without, seed 0; .*: depth=0 is too small"):
        runs.check_failures()
    with Workers(1) as workers:
        assert workers.idle == 1


@pytest.mark.slow
def test_a_process_that_dies_fails_its_run_only(tmp_path):
    plan = tiny("style", tmp_path, overrides=(*TINY, "optim.steps=100000"), seeds=(0,))
    short = tiny("style", tmp_path, seeds=(1,))
    jobs = [
        Job(str(i), tmp_path / str(i), p.train_config(p.cases[0], i), "") for i, p in enumerate((plan, short))
    ]
    killed = []

    def kill(progress):
        if progress.key == "0" and not killed:
            killed.append(next(workers._processes[pipe] for pipe, key in workers._busy.items() if key == "0"))
            killed[0].kill()

    with Workers(2) as workers:
        outcomes = {}
        for job in jobs:
            workers.start(job)
        while len(outcomes) < 2:
            outcomes |= {outcome.key: outcome for outcome in workers.events(kill)}
        assert outcomes["0"].error.startswith("its process ended without a result")
        assert outcomes["1"].complete
        assert workers.idle == 2
        workers.start(Job("2", tmp_path / "2", short.train_config(short.cases[1], 0), ""))
        workers.start(Job("3", tmp_path / "3", short.train_config(short.cases[1], 1), ""))
        rest = {outcome.key for outcome in workers.events(kill)}
        rest |= {outcome.key for outcome in workers.events(kill)}
        assert rest == {"2", "3"}


def test_scores_of_other_images(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(60) % 3)
    scorer = RunScorer(Data(path=str(tmp_path / "images.npz"), size=8, workers=0), samples=20)
    moments, real = scorer.reference
    assert moments.count == len(real) == 60
    assert torch.allclose(moments.mean, torch.from_numpy(pixels / 255).permute(0, 3, 1, 2).flatten(1).mean(0))


@pytest.mark.parametrize("text", ["", "a", "-1", "1,,2", "1.5", "0,99999999999999999999"])
def test_wrong_seeds(text):
    with pytest.raises(InputError, match="write whole numbers from 0 with commas"):
        parse_seeds(text)
    assert parse_seeds("3, 1,3") == (3, 1)


def test_the_study_of_the_documentation_is_valid(tmp_path):
    text = (ROOT / "docs" / "ablations.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    plan = StudyPlan.load(str(tmp_path / "mine.yaml"))
    assert [plan.train_config(case, 0).optim.lr for case in plan.cases] == [1e-3, 3e-3]
    assert plan.out == Path("runs/ablate/mine")
    listed = set(re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))))
    assert {summary.name for summary in study_names()} <= listed


def test_wrong_names():
    with pytest.raises(InputError, match="study='antisymetry' is not known: did you mean 'antisymmetry'"):
        load_study("antisymetry")
    with pytest.raises(InputError, match="base='cifar' is not known: did you mean 'cifar10'"):
        load_base("cifar")


def test_two_encoders_of_one_kind_keep_all_their_features(tmp_path):
    plan = tiny("second-encoder", tmp_path, overrides=(*TINY, "encoder.optim.steps=1"))
    for name in ("mae", "second"):
        config = plan.pretrain_config(name)
        save_model(build_mae(config.mae, (1, 8, 8), 10), plan.encoder_folder(name) / "model")
    one, second, both = (
        build_features(plan.train_config(case, 0), (1, 8, 8), None, torch.device("cpu")).features(
            torch.zeros(1, 1, 8, 8)
        )
        for case in plan.cases
    )
    assert {"global", "norm_x", "layer1"} <= one.keys()
    assert len(both) == len(one) + len(second) - 1  # raw pixels once
    assert both["encoder1/layer1"].shape == second["layer1"].shape
