"""What the Train tab does: count images, find problems, estimate, start, stop."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from driftgen.report.terminal import facts_text
from driftgen.studio.app.tab_html import show_folder, show_job
from driftgen.studio.folder_check import (
    TrainCommand,
    check_folder,
    list_datasets,
    measure_cost,
    train_command,
)
from driftgen.studio.training_job import TrainingJob
from tests.support.helpers import fails
from tests.support.studio_folders import add_photos, make_folders, smooth_photos

QUICK = [
    "--set",
    "batch.generated=4",
    "--set",
    "batch.positives=4",
    "--set",
    "batch.unconditional=2",
    "--device",
    "cpu",
]


@pytest.fixture
def folders(tmp_path):
    return make_folders(tmp_path)


def wait(job, seconds=120):
    until = time.monotonic() + seconds
    while (state := job.state()).running:
        assert time.monotonic() < until, state.log
        time.sleep(0.1)
    return state


def test_images_per_class_and_problems(folders):
    photos = add_photos(folders, count=4)
    add_photos(folders, "photos", ("birds",), count=60)
    (photos / "cats" / "note.txt").write_text("x")
    report = check_folder("photos", folders)
    assert report.counts == {"birds": 60, "cats": 4, "dogs": 4}
    assert (report.images, report.classes) == (68, 3)
    assert any("cats has 4 images" in problem and "memorize" in problem for problem in report.problems)
    assert any("uneven" in problem for problem in report.problems)
    html = show_folder("photos", report)
    assert "68 images, 3 classes." in html
    (photos / "birds" / "0.png").write_bytes(b"no image")
    report = check_folder("photos", folders)
    assert "1 of 68 images cannot be read and would be left out." in report.problems
    (name,) = report.unreadable
    assert name.startswith(str(photos / "birds" / "0.png (UnidentifiedImageError"))
    assert (report.images, report.refusal) == (67, "")
    assert list_datasets(folders) == [".", "photos"]


def test_what_training_would_refuse_is_one_line(folders, tmp_path):
    (folders.data / "empty").mkdir()
    fails(lambda: check_folder("empty", folders), "holds no images")
    add_photos(folders)
    for name in ("..", "/etc", "../runs", ""):
        fails(lambda name=name: check_folder(name, folders), "is outside|is chosen")
    mixed = add_photos(folders, "mixed")
    (mixed / "cats" / "0.png").rename(mixed / "0.png")
    fails(lambda: check_folder("mixed", folders), "beside class folders")
    linked = add_photos(folders, "linked")
    (linked / "cats" / "9.png").symlink_to(tmp_path / "elsewhere.png")
    fails(lambda: check_folder("linked", folders), "leads outside")


@pytest.mark.parametrize("damaged", [2, 6])
def test_more_unreadable_images_than_training_takes_are_named_beside_the_counts(folders, damaged):
    photos = add_photos(folders)
    for i in range(damaged):
        (photos / "cats" / f"{i}.png").write_bytes(b"no image")
    report = check_folder("photos", folders)
    assert report.counts == {"cats": 6 - damaged, "dogs": 6}
    assert report.refusal.startswith(f"{damaged} of 12 images cannot be read: repair or remove them.")
    assert [str(photos / "cats" / f"{i}.png") in report.unreadable[i] for i in range(damaged)] == [
        True
    ] * damaged
    assert not any("has 0 images" in problem for problem in report.problems)
    html = show_folder("photos", report)
    assert f"{12 - damaged} readable images, 2 classes." in html
    assert html.count("<li>") == damaged
    assert 'role="alert"' in html


def test_of_many_unreadable_images_the_first_are_named(folders):
    photos = add_photos(folders, classes=("cats",), count=1)
    for i in range(203):
        (photos / "cats" / f"bad-{i:03}.png").write_bytes(b"no image")
    html = show_folder("photos", check_folder("photos", folders))
    assert (html.count("<li>"), "and 3 more" in html) == (200, True)


def test_the_command_is_the_one_to_type(folders):
    add_photos(folders, "my photos")
    command = train_command("my photos", "tiny", "", folders)
    assert command.out == folders.runs / "my photos"
    path = folders.data / "my photos"
    assert command.text == f"driftgen train '{path}' --size tiny --out '{command.out}' --yes"
    assert train_command("my photos", "auto", "second", folders).out == folders.runs / "second"
    for run in ("../x", "a/b", ".", "..", ".studio", "x" * 101, "a\nb", "/etc"):
        fails(lambda run=run: train_command("my photos", "tiny", run, folders), "no name of a folder")
    fails(lambda: train_command("my photos", "huge", "", folders), "size=huge")
    fails(lambda: train_command("none", "tiny", "", folders), "does not exist")


def test_a_training_that_fails_says_why(folders):
    job = TrainingJob(folders)
    assert job.state().text.startswith("No training has been started")
    fails(job.stop, "no training runs")
    state = job.start(TrainCommand(("train", "--no-such"), folders.runs / "x"))
    assert state.command == "driftgen train --no-such"
    state = wait(job)
    assert "exit code 2" in state.text
    assert "No such option" in state.log
    assert "No such option" in show_job(state)


def test_the_log_is_no_link_to_a_file_elsewhere(folders, tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    job = TrainingJob(folders)
    job._record.parent.mkdir()
    record = {"pid": 2**30, "command": "c", "run": "r", "since": "s", "began": 0.0}
    job._record.write_text(json.dumps(record))
    job._log.symlink_to(secret)
    assert (job.state().run, job.state().log) == ("r", "")
    job._log.unlink()
    os.mkfifo(job._log)
    assert job.state().log == ""
    job._log.unlink()
    job._log.symlink_to(secret)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    job.start(TrainCommand((), folders.runs / "x"))
    wait(job)
    assert secret.read_text() == "a secret"
    assert not job._log.is_symlink()


def test_the_id_of_another_process_is_no_training(folders):
    job = TrainingJob(folders)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        job._record.parent.mkdir()
        record = {"pid": other.pid, "command": "c", "run": "r", "since": "s", "began": "Thu Jan 1 1970"}
        job._record.write_text(json.dumps(record))
        assert not job.state().running
        fails(job.stop, "no training runs")
        for odd in ("{", "[]", '{"pid": "x"}', json.dumps(record | {"pid": -1}), json.dumps({"pid": 1})):
            job._record.write_text(odd)
            assert not job.state().running
            fails(job.stop, "no training runs")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_one_training_at_a_time_that_outlives_the_studio(folders):
    smooth_photos(folders)
    plan = train_command("shapes", "tiny", "", folders)
    steps = ("--set", "optim.steps=100000", "--set", "encoders=[]", "--set", "output.metrics_every=1")
    command = plan._replace(words=(*plan.words, *steps, *QUICK))
    job = TrainingJob(folders)
    assert job.start(command).running
    fails(lambda: job.start(command), "shapes is training: stop it first")
    later = TrainingJob(folders)  # a studio that is started again
    state = later.state()
    assert state.running
    assert state.run == "shapes"
    fails(lambda: later.start(command), "is training")
    until = time.monotonic() + 120
    metrics = folders.runs / "shapes" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < until, job.state().log
        time.sleep(0.2)
    assert os.getpgid(job._child.pid) != os.getpgid(0)  # Ctrl-C in the terminal does not reach it
    assert "asked to stop" in later.stop().text
    assert not (state := later.state()).running or "asked to stop" in state.text  # while it saves
    state = wait(job)
    assert "was stopped" in state.text
    assert list((folders.runs / "shapes" / "checkpoints").glob("step-*"))
    assert not later.state().running


@pytest.mark.slow
def test_the_cost_of_a_run_is_estimated(folders):
    smooth_photos(folders)
    plan = train_command("shapes", "tiny", "", folders)
    text = measure_cost(plan._replace(words=(*plan.words, "--set", "encoders=[]", *QUICK)))
    for word in ("time", "memory", "disk", "only the first steps were run, nothing was written"):
        assert word in text
    assert not plan.out.exists()


def test_an_estimate_of_two_parts_is_shown_as_it_was_printed(folders, monkeypatch):
    parts = [{"part 1 of 2": "encoder", "time": "1 min"}, {"part 2 of 2": "generator", "time": "2 min"}]
    texts = [facts_text(rows).plain for rows in (*parts, {"both parts": "3 min"})]
    printed = f"{texts[0]}\n\n{texts[1]}\n\n{texts[2]}\n"
    done = subprocess.CompletedProcess([], 0, printed, "")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: done)
    assert measure_cost(TrainCommand((), folders.runs)) == printed.strip()


def test_an_estimate_that_fails_is_one_line(folders):
    fails(lambda: measure_cost(TrainCommand(("train", "--no-such"), folders.runs)), "^No such option")
