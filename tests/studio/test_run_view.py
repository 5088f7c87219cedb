"""The Runs tab: curves, warnings, samples and the command to resume, from files that may be half written."""

import json
import shutil

import pytest
from PIL import Image

from driftgen.studio.run_view import RunView
from driftgen.support.folder_lock import LOCK
from driftgen.support.sheets import Sheet, write_sheet
from tests.support.fork_server import CAPTURE, start_code
from tests.support.helpers import fails
from tests.support.studio_folders import add_run, make_folders

HOLD = """
import sys
from pathlib import Path
from driftgen.support.folder_lock import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def folders(tmp_path):
    return make_folders(tmp_path)


def add_row(folder, **row):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_a_run_shows_its_curves_and_the_command_to_resume(folders):
    folder, view = add_run(folders, command="driftgen train digits --out runs/old"), RunView(folders)
    assert view.names() == ["old"]
    html = view.show("old")
    for text in (
        *("Raw drift per temperature", "τ = 0.05", "Spread and within-class diversity", "Samples per second"),
        *(
            "Stopped.",
            "run the same command again",
            "driftgen train digits --out runs/old",
            "No warnings so far",
        ),
    ):
        assert text in html
    add_row(folder, step=20, seconds=1.0, drift=[0.1, 0.2, 0.3], warnings=["collapse: all equal; lower lr"])
    add_row(folder, step=20, evaluation={"metric": "FID", "samples": 100, "ema": {"0.995": {"FID": 12.5}}})
    html = view.show("old")
    for text in ("Complete.", "driftgen sample", "FID", "12.5"):
        assert text in html
    add_row(
        folder, step=20, drift=[0.1, 0.2, 0.3], warnings=["collapse: all samples are equal; lower optim.lr"]
    )
    html = view.show("old")
    assert "All samples are equal." in html
    assert "Lower optim.lr." in html


def test_the_newest_samples_are_shown(folders):
    folder, view = add_run(folders), RunView(folders)
    assert "Newest samples" not in view.show("old")
    for step in (10, 20):
        write_sheet(folder / "samples" / f"step-{step:08d}.png", Sheet([Image.new("L", (8, 8))] * 4, 2))
    html = view.show("old")
    assert "Newest samples, step 20" in html
    assert html.count("data:image/webp") == 1


def test_a_page_changes_with_its_run_alone(folders):
    folder, view = add_run(folders), RunView(folders)
    add_run(folders, "other")
    before = view.version("old")
    assert view.version("old") == before
    add_row(folder, step=15, drift=[1, 1, 1])
    assert view.version("old") != before
    assert view.version("old", "other") != view.version("old")


def test_two_runs_are_compared(folders):
    folder = add_run(folders)
    second = add_run(folders, "new")
    text = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.002"))
    html = RunView(folders).compare("old", "new")
    for part in ("Raw drift, τ = 0.02", "optim.<wbr>lr", "0.002", "Spread"):
        assert part in html
    assert folder.is_dir()
    fails(lambda: RunView(folders).compare("old", "old"), "twice")


def test_a_run_in_training_says_which_process_it_is(folders):
    folder, view = add_run(folders), RunView(folders)
    before = view.version("old")
    child = start_code(HOLD, str(folder), stdin=CAPTURE, stdout=CAPTURE)
    assert child.stdout.readline() == "held\n"
    try:
        html = view.show("old")
        assert "Training now: process " in html
        assert "run the same command again" not in html
        assert view.version("old") != before
    finally:
        child.stdin.close()
        child.wait(20)
    assert "Stopped." in view.show("old")
    assert not (folder / LOCK).exists()


def test_half_written_runs_are_shown_as_far_as_they_go(folders):
    view = RunView(folders)
    assert view.names() == []
    (folders.runs / "nothing").mkdir()
    bare = folders.runs / "bare"
    bare.mkdir()
    shutil.copy(add_run(folders) / "config.yaml", bare)
    assert "No steps have been recorded yet." in view.show("bare")
    cut = add_run(folders, "cut")
    text = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text[:-40])
    assert "left out of metrics.jsonl" in view.show("cut")
    (cut / "config.yaml").write_text("{")
    assert "config.yaml is left out" in view.show("cut")
    (cut / "metrics.jsonl").write_text("\0")
    fails(lambda: view.show("cut"), "cannot be read")
    fails(lambda: view.show("nothing"), "cannot be read")
    assert "nothing" not in view.names()


def test_files_elsewhere_are_not_read(folders, tmp_path):
    view, secret = RunView(folders), tmp_path / "secret"
    shutil.copytree(add_run(folders), secret)
    fails(lambda: view.show("../secret"), "is outside")
    for name in ("config.yaml", "metrics.jsonl", "samples"):
        folder = add_run(folders, f"linked-{name}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret / name)
        fails(lambda folder=folder: view.show(folder.name), "leads outside")
    folder = add_run(folders, "sheet")
    write_sheet(secret / "x.png", Sheet([Image.new("L", (8, 8))], 1))
    (folder / "samples").mkdir()
    (folder / "samples" / "step-00000001.png").symlink_to(secret / "x.png")
    fails(lambda: view.show("sheet"), "leads outside")
    (folders.runs / "link").symlink_to(secret)
    assert "link" not in view.names()


def test_names_of_files_are_escaped(folders):
    add_run(folders, "<script>x", command="driftgen train <script>")
    assert "<script>" not in RunView(folders).show("<script>x")
