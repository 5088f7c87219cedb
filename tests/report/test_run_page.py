import io
import json
import math
import re

import pytest
from PIL import Image
from rich.console import Console

import driftgen as dg
from driftgen.report.run_page import read_metrics, write_report
from driftgen.report.terminal import LiveView, sparkline

TEMPERATURES = [0.02, 0.05, 0.2]
HEADER = {"header": {"task": "train", "temperatures": TEMPERATURES, "weights": "EMA 0.995"}}


def train_row(step):
    return {
        "step": step,
        "seconds": 0.5 * step,
        "samples_per_second": 512.0,
        "memory_gib": 1.25,
        "loss": 6.5,
        "learning_rate": 2e-4,
        "gradient_norm": 3.1,
        "alpha": 1.8,
        "drift": [0.01, 0.02 + 1 / step, 0.03],
        "drift_groups": {"global": [0.01, 0.02, 0.03], "layer1": [0.02, 0.03, 0.04]},
        "scale": {"global": 1.2},
        "spread": 0.93,
        "diversity": 0.9,
        "skipped": 0,
    }


def pretrain_row(step):
    keys = ("step", "seconds", "samples_per_second", "memory_gib", "loss", "learning_rate", "gradient_norm")
    row = {k: v for k, v in train_row(step).items() if k in keys}
    return row | {"reconstruction": 1 / step, "classification": None, "accuracy": None, "skipped": 0}


def write_run(folder, rows, header=HEADER, samples=(), **files):
    (folder / "samples").mkdir(parents=True)
    lines = [json.dumps(r) for r in ([header] if header else []) + rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for i, step in enumerate(samples):
        Image.new("L", (66, 34), 20 * i).save(folder / "samples" / f"step-{step:07d}.png")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def curves(html):
    section = html.partition('<section id="curves">')[2].partition("</section>")[0]
    return re.findall(r"<figcaption><h3>(.*?)</h3>", section)


def test_unreadable_images_are_listed(tmp_path):
    names = [f"photos/<{i}>.png (OSError: broken)" for i in range(20)]
    rows = [{"step": 1, "unreadable": {"count": 1, "names": names[:1]}}]
    rows += [{"step": 2, "unreadable": {"count": 25, "names": names}}, {"step": 3}]
    html = write_report(write_run(tmp_path / "run", rows)).read_text()
    section = html.partition("<h2>Unreadable images: 25</h2>")[2].partition("</section>")[0]
    assert section.count("<li>") == 21  # 20 names, and how many more there are
    assert "photos/&lt;19&gt;.png (OSError: broken)" in section
    assert "and 5 more" in section
    assert "Unreadable" not in write_report(write_run(tmp_path / "clean", [{"step": 1}])).read_text()


# --- metrics.jsonl --------------------------------------------------------------------------------------


def test_read_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [HEADER, {"step": 10, "loss": 1.0}, {"step": 20, "loss": 2.0}, {"step": 30, "loss": 3.0}]
    lines += [{"step": 20, "loss": 5.0}]  # a resumed run
    path.write_text("\n".join(map(json.dumps, lines)) + '\n[1]\n{"step": 40, "lo')
    header, rows = read_metrics(path)
    assert header == HEADER["header"]
    assert [(r["step"], r["loss"]) for r in rows] == [(10, 1.0), (20, 5.0), (30, 3.0)]
    path.write_bytes(path.read_bytes() + b"\xff\x00")
    assert read_metrics(path)[1] == rows
    assert read_metrics(tmp_path / "none") == ({}, [])


# --- the page -------------------------------------------------------------------------------------------


def test_a_complete_run(tmp_path):
    evaluation = {
        "figures": {"recognized <as> their class": 0.99213, "samples": 2000},
        "network_calls_per_image": 1,
        "milliseconds_per_image": 0.4123,
    }
    rows = [train_row(s) for s in range(10, 500, 10)]
    for row in rows[5:]:
        row["warnings"] = ["collapsed: <b>"]
    folder = write_run(
        tmp_path / "run&1",
        rows,
        samples=range(0, 1000, 100),
        config_yaml="about: <script>",
        evaluation_json=json.dumps(evaluation),
    )
    page = write_report(folder)
    assert page == folder / "report.html"
    html = page.read_text()
    assert "<title>Run run&amp;1</title>" in html
    assert 'name="viewport"' in html
    assert "weights of the samples and of the saved model</th><td>EMA 0.995</td>" in html
    assert "spread of generated samples, current weights (data: 1)</th><td>0.93</td>" in html
    assert curves(html) == [
        "Raw drift per temperature",
        "Raw drift per feature group",
        "Spread and within-class diversity",
        "Gradient norm",
        "Learning rate",
        "Samples per second",
        "Loss",
    ]
    assert "Flat by design" in html
    assert re.findall(r'data-step="([\d,]+)"', html) == [str(step) for step in range(0, 1000, 100)]
    assert html.count("data:image/") == 10
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)  # the page is self-contained
    assert "One network call per image, 0.4123 milliseconds." in html
    assert "recognized &lt;as&gt; their class</th><td>0.9921</td>" in html
    assert html.count("<b>Collapsed</b>") == 1
    assert "from step 60</span></p>\n<p>&lt;b&gt;.</p>" in html
    assert "about: &lt;script&gt;" in html
    assert not list(folder.glob("*partial*"))


def test_pretraining(tmp_path):
    rows = [pretrain_row(s) for s in range(10, 100, 10)]
    rows += [pretrain_row(100) | {"classification": 2.0, "accuracy": 0.5}]
    html = write_report(write_run(tmp_path / "mae", rows, {"header": {"task": "pretrain"}})).read_text()
    assert "Masked autoencoder" in html
    assert curves(html)[:3] == ["Reconstruction error", "Classification loss", "Classifier accuracy"]
    assert "Flat by design" not in html


def test_missing_or_damaged_files(tmp_path):
    assert "No steps have been recorded yet" in write_report(_empty(tmp_path / "empty")).read_text()
    html = write_report(write_run(tmp_path / "one", [train_row(10)], header=None, samples=[10])).read_text()
    assert "Raw drift per temperature" in curves(html)
    assert 'type="range"' not in html  # one sheet needs no slider
    assert "one network call each. Step 10." in html
    html = write_report(write_run(tmp_path / "zero", [train_row(10)], samples=[0])).read_text()
    assert "one network call each. Step 0: the initial weights, before the first step." in html
    odd = [train_row(10), {"step": 20, "loss": math.nan, "drift": [], "spread": None}, {"step": 30}]
    folder = write_run(tmp_path / "odd", odd, samples=[10, 20], evaluation_json='{"figures": [1]}')
    last = folder / "samples" / "step-0000020.png"
    last.write_bytes(last.read_bytes()[:40])
    html = write_report(folder).read_text()
    assert 'data-step="10"' in html
    assert 'data-step="20"' not in html
    assert "<h2>Evaluation</h2>" not in html
    with pytest.raises(dg.InputError, match="is not a folder: give the folder of a run"):
        write_report(tmp_path / "nowhere")


def _empty(folder):
    folder.mkdir()
    return folder


# --- the terminal ---------------------------------------------------------------------------------------


def terminal(width=80):
    return Console(width=width, file=io.StringIO(), force_terminal=True, record=True, color_system=None)


def test_a_resumed_run_has_the_trends_of_its_earlier_rows(tmp_path):
    view = LiveView("runs/digits", 1000, TEMPERATURES, console=terminal())
    rows = [train_row(step) for step in range(10, 510, 10)]
    view.recall(write_run(tmp_path / "run", [*rows, {"step": 505, "drift": ["?"]}]) / "metrics.jsonl", 505)
    view.update(train_row(510))
    view.console.print(view.render())
    assert re.search(r"raw drift τ=0.05 +0.0\d+ █[▁▂▃▄▅▆▇█]+▁", view.console.export_text())


def test_the_view_fits_80_columns():
    console = terminal()
    view = LiveView("runs/digits", 1000, TEMPERATURES, console=console)
    for step in range(10, 510, 10):
        view.update(train_row(step))
    view.warn("collapsed: " + "the samples of a class are nearly alike " * 4)
    console.file.truncate(0)
    console.print(view.render())
    text = console.export_text()
    shown = text[text.rindex("runs/digits") :]
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for piece in ("500/1000", "4:10 left", "512 samples/s", "1.25 GiB", "learning rate 0.0002"):
        assert piece in shown
    assert re.search(r"raw drift τ=0.05 +0.022 █[▁▂▃▄▅▆▇█]+▁", shown)
    assert re.search(r"diversity +0.9 .*data: 1", shown)
    assert re.search(r"loss +6.5 .*flat by design", shown)
    assert re.search(r"guidance α +1.8 ", shown)
    assert "! step 500: collapsed: the samples" in shown


def test_a_terminal_is_redrawn_and_restored():
    console = terminal()
    with LiveView("mae", 100, console=console) as view:
        view.update(pretrain_row(10))
        view.info("saved [bold]step[/bold] 10")
    text = console.file.getvalue()
    assert "\x1b[?25l" in text  # the cursor is hidden ...
    assert text.rindex("\x1b[?25h") > text.rindex("reconstruction")  # ... and shown again
    assert "saved [bold]step[/bold] 10" in text


def test_plain_lines_without_a_terminal():
    console = Console(file=io.StringIO(), width=40)
    with LiveView("digits", 1000, TEMPERATURES, every=3, console=console) as view:
        for step in range(1, 6):
            view.update(train_row(step))
        view.warn("collapsed: [red] " + "long " * 30)
    lines = console.file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "step 1/1000",
        "step 4/1000",
        "warning",
        "step 5/1000",
    ]
    assert "drift 0.01 0.27 0.03" in lines[1]
    assert "8:18 left" in lines[1]
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", console.file.getvalue())


def test_incomplete_rows():
    console = terminal()
    view = LiveView("x", 10, console=console)
    console.print(view.render())
    for row in ({"step": 1}, {"step": 2, "loss": math.nan, "drift": [math.inf]}, {"step": 3, "spread": None}):
        view.update(row)
        console.print(view.render())
        assert view.line()


def test_long_runs_keep_their_whole_trend():
    view = LiveView("x", 10**5, console=Console(file=io.StringIO()), every=10**6)
    for step in range(1, 5001):
        view.update({"step": step, "loss": float(step)})
    history = view._history["loss"]
    assert len(history) <= 400
    assert history[0] == 1
    assert history[-1] > 4900


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.001]) == "▄▄"
    assert sparkline([1, 10, 100]) == "▁▅█"  # even on a log scale
    assert sparkline([-1, 0, 1]) == "▁▅█"
    assert len(sparkline(list(range(1, 1000)))) == 20
