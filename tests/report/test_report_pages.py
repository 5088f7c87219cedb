"""Pages as a browser reads them: parsed HTML, poisoned files, the slider, the comparison of runs."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import driftgen as dg
from driftgen.report.comparison_page import write_reports
from driftgen.report.run_page import FRAMES, write_report
from driftgen.report.run_rows import NUMBERS
from driftgen.support.sheets import Sheet, write_sheet

POISON = "\"><script>alert(1)</script><img src=x onerror=alert(2)>' onload='{{ 7*7 }}"
VOID = {"meta", "img", "input", "br"}


class Page(HTMLParser):
    """Elements of a page: tag, attributes, text inside. Raises if tags do not nest."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.open = [], []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", **dict(attributes)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag
        if tag in ("td", "th", "li", "h3", "p"):
            self.handle_data(" ")

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [
            e
            for e in self.elements
            if e["tag"] == tag and all(e.get(k.rstrip("_")) == v for k, v in attributes.items())
        ]

    def texts(self, tag, **attributes):
        return [" ".join(e["text"].split()) for e in self.all(tag, **attributes)]


def sheet(names, columns=3, seed=0, **more):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (len(names) * columns, 8, 8, 3), dtype=np.uint8)
    return Sheet([Image.fromarray(p) for p in pixels], columns, names, **more)


def row(step, **more):
    values = {
        "seconds": step / 2,
        "drift": [1 / step, 2 / step],
        "spread": 0.9,
        "diversity": 0.8,
        "loss": 6.5,
    }
    return {"step": step, "samples_per_second": 10.0, "memory_gib": 0.5, "skipped": 0, **values, **more}


def write_run(
    folder, *, rows=None, steps=(0, 10, 20), names=("golden retriever", "cat & dog"), lr=0.1, **header
):
    (folder / "samples").mkdir(parents=True)
    header = {
        "task": "train",
        "temperatures": [0.02, 0.2],
        "recipe": "folder",
        "weights": "EMA 0.999",
        "command": "driftgen train folder",
        "environment": {"torch": "2.13.0", "device": "cpu"},
    } | header
    rows = [row(s) for s in (10, 20)] if rows is None else rows
    lines = map(json.dumps, [{"header": header}, *rows])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(
        f"task: train\nabout: Your images\noptim: {{lr: {lr}, steps: 20}}\noutput: {{metrics_every: 10}}\n"
        "data: {path: photos}\n"
    )
    for i, step in enumerate(steps):
        write_sheet(folder / "samples" / f"step-{step:07d}.png", sheet(names, seed=i))
    write_sheet(folder / "samples" / "real.png", sheet(names, seed=99))
    found = Sheet(
        sheet(("", "")).images,
        3,
        captions=["cat", "0.912 (cat)", "0.9 (dog)", "dog", "0.8 (cat)", "0.7 (dog)"],
        note="compared with 20,000 of 50,000 training images, chosen at random",
    )
    write_sheet(folder / "samples" / "nearest.png", found)
    return folder


def test_the_page_of_a_run(tmp_path):
    warning = "collapsed: all samples are nearly identical; lower optim.lr"
    rows = [row(10), row(20, warnings=[warning], unreadable={"count": 3, "names": ["a.jpg (cut)"]})]
    page = Page(write_report(write_run(tmp_path / "run", rows=rows)))
    assert page.texts("title") == page.texts("h1") == ["Run run"]
    assert page.texts("h2") == [
        "Warnings",
        "Unreadable images: 3",
        "Samples",
        "Nearest training images",
        "Curves",
        "Run",
        "Configuration",
    ]
    # Links of the contents lead to sections.
    targets = [link["href"] for link in page.all("a")]
    assert targets == [f"#{section['id']}" for section in page.all("section")]
    assert page.texts("div", class_="warning") == [
        "Collapsed from step 20 All samples are nearly identical. What to do: Lower optim.lr."
    ]
    assert "a.jpg (cut)" in page.texts("li")
    assert "and 2 more" in page.texts("li")
    # Class names are text beside the samples and the real images.
    assert page.texts("ol", class_="names") == ["golden retriever cat & dog"] * 2
    assert page.texts("span").count("golden retriever") == page.texts("span").count("cat & dog") == 2
    assert page.texts("h3")[:2] == ["Generated", "Real images"]
    captions = ["cat", "0.912 (cat)", "0.9 (dog)", "dog", "0.8 (cat)", "0.7 (dog)"]
    assert [c["text"] for c in page.all("figcaption") if c.get("title")] == captions
    assert any("compared with 20,000 of 50,000 training images" in text for text in page.texts("p"))
    facts = " ".join(page.texts("table"))
    assert "samples per second, median 10" in facts
    assert "torch 2.13.0" in facts
    assert page.texts("pre", class_="command") == ["driftgen train folder"]
    assert "path: photos" in page.texts("details")[0]
    # Every chart has its title above, and its legend beside the plot, not in it.
    charts = page.all("figure", class_="chart")
    assert len(charts) == len(page.all("svg")) == len(page.all("ul", class_="legend"))
    assert "τ = 0.02 0.05 τ = 0.2 0.1" in " ".join(charts[0]["text"].split())


def test_automatic_choices_are_listed_with_their_reasons(tmp_path):
    folder = write_run(tmp_path / "run")
    before = Page(write_report(folder))
    assert "Automatic choices" not in before.texts("h3")
    chosen = {
        "size": "tiny",
        "reason of the size": "no GPU, 2 CPU cores",
        "encoder": "runs/mae-photos: pretrained for this run",
        "augmentation": "30 images in the smallest class: flips are on",
    }
    with (folder / "config.yaml").open("a") as file:
        file.write(f"chosen: {json.dumps(chosen)}\n")
    page = Page(write_report(folder))
    assert "Automatic choices" in page.texts("h3")
    assert page.texts("li")[-3:] == [
        "size tiny (no GPU, 2 CPU cores)",
        "encoder runs/mae-photos: pretrained for this run",
        "30 images in the smallest class: flips are on",
    ]


def test_nothing_is_loaded_and_everything_has_a_text(tmp_path):
    page = Page(write_report(write_run(tmp_path / "run")))
    for element in page.elements:
        for key in ("src", "href"):
            assert element.get(key, "#").startswith(("data:", "#")), element
    assert "default-src 'none'" in page.html
    assert not re.search(r"url\(|@import|https?://(?!www.w3.org)", page.html)
    assert all(image.get("alt") for image in page.all("img"))
    assert all(drawing.get("aria-label") for drawing in page.all("svg"))
    assert "prefers-color-scheme: dark" in page.html
    assert "@media print" in page.html
    assert 'name="viewport"' in page.html


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (3, 3), (FRAMES, FRAMES), (FRAMES + 9, FRAMES)])
def test_the_slider_has_a_position_for_every_sheet(tmp_path, count, shown):
    steps = [10 * i for i in range(count)]
    page = Page(write_report(write_run(tmp_path / "run", steps=steps)))
    frames = [int(image["data-step"]) for image in page.all("img") if "data-step" in image]
    assert len(frames) == shown
    assert (frames[0], frames[-1]) == (steps[0], steps[-1])
    visible = [
        image["data-step"] for image in page.all("img") if "data-step" in image and "hidden" not in image
    ]
    assert visible == [str(steps[-1])]
    sliders = page.all("input", type="range")
    if shown == 1:
        assert not sliders
    else:
        (slider,) = sliders
        assert (slider["min"], slider["max"], slider["value"]) == ("0", str(shown - 1), str(shown - 1))
        assert slider["aria-valuetext"] == f"step {steps[-1]}"


def test_an_earlier_sheet_without_names_is_shown_as_it_is(tmp_path):
    folder = write_run(tmp_path / "run", steps=())
    Image.new("L", (66, 34)).save(folder / "samples" / "step-0000010.png")
    page = Page(write_report(folder))
    (frame,) = [image for image in page.all("img") if "data-step" in image]
    assert (frame["width"], frame["height"]) == ("66", "34")


def poisoned(value):
    """The same structure with every text poisoned, keys included."""
    if isinstance(value, dict):
        return {POISON if key == "torch" else key: poisoned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return f"{value}{POISON}" if isinstance(value, str) else value


def is_harmless(page):
    scripts = page.all("script")
    assert len(scripts) == 1
    assert "alert" not in scripts[0]["text"]
    assert not [e for e in page.elements if any(key.startswith("on") for key in e)]
    assert not page.all("img", src="x")
    assert "7*7" in page.html  # shown as it is, not evaluated
    return True


EVALUATION = {
    "figures": {"torch": 1.0, "text": "t"},
    "bars": {"text": "t"},
    "evaluator": "e",
    "note": {"torch": "n"},
    "network_calls_per_image": "c",
    "milliseconds_per_image": "m",
}


def poisoned_run(folder):
    evaluated = {"metric": "FID", "samples": "n", "ema": {"0.9": {"FID" + POISON: 2.0}}}
    rows = [
        row(10, warnings=["kind: problem; advice"], drift_groups={"torch": [1.0], "b": [1.0]}),
        row(20, evaluation=evaluated, unreadable={"count": 1, "names": ["name"]}),
    ]
    write_run(folder, rows=poisoned(rows), steps=())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    header = json.loads(lines[0])["header"]
    lines[0] = json.dumps({"header": poisoned(header) | {"task": "train"}})
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    names = (f"a{POISON}", f"b{POISON}")
    for step in (0, 20):
        write_sheet(folder / "samples" / f"step-{step:07d}.png", sheet(names))
    write_sheet(folder / "samples" / "real.png", sheet(names))
    nearest = Sheet(sheet(("",)).images, 3, captions=[POISON] * 3, note=POISON)
    write_sheet(folder / "samples" / "nearest.png", nearest)
    text = json.dumps({"about": POISON, "x" + POISON: POISON, "optim": {"steps": 20}})  # JSON is YAML
    (folder / "config.yaml").write_text(text)
    (folder / "evaluation.json").write_text(json.dumps(poisoned(EVALUATION)))
    return folder


def test_poisoned_files_do_no_harm(tmp_path):
    name = "<script>run&'\""
    page = Page(write_report(poisoned_run(tmp_path / name)))
    assert is_harmless(page)
    assert page.texts("h1") == [f"Run {name}"]
    # Everything is there as text: the names of rows, warnings, evaluation, environment, configuration.
    for tag in ("span", "li", "td", "th", "pre", "p", "figcaption", "h3"):
        assert any("alert(1)" in text for text in page.texts(tag)), tag
    other = Page(write_reports([tmp_path / name, poisoned_run(tmp_path / "b")], tmp_path / "page.html"))
    assert is_harmless(other)


@pytest.mark.parametrize("value", ["text", None, [], {}, [[1]], {"a": "b"}, True, 1e999, -1e308, 10**400])
def test_fields_of_another_type_do_no_harm(tmp_path, value):
    rows = [{key: value if key != "step" else step for key in row(1)} for step in (20, 30)]
    more = dict.fromkeys(("warnings", "evaluation", "unreadable", "drift_groups", "batch_spread"), value)
    folder = write_run(
        tmp_path / "run",
        rows=[row(10), *(r | more for r in rows)],
        **dict.fromkeys(("temperatures", "weights", "command", "environment", "recipe"), value),
    )
    (folder / "evaluation.json").write_text(json.dumps(dict.fromkeys(EVALUATION, value)))
    (folder / "config.yaml").write_text(
        json.dumps(dict.fromkeys(("optim", "data", "about", "chosen"), value))
    )
    note = "2 lines are left out of metrics.jsonl: cut, or with values of another type."
    page = Page(write_report(folder))
    assert (note in page.texts("p")) == (value is not None)
    assert page.texts("dd")[0].startswith("30" if value is None else "10")
    page = Page(write_reports([folder, write_run(tmp_path / "other")], tmp_path / "page.html"))
    assert (f"run: {note}" in page.texts("p")) == (value is not None)


def leaves(value, path=()):
    """Paths of all values and keys of a JSON structure."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))
            if isinstance(value, dict):
                yield (*path, key), "key"
    yield path, "value"


def planted(value, path, kind):
    """The structure with poison in place of one value or key."""
    if not path:
        return POISON
    if isinstance(value, list):
        return [planted(v, path[1:], kind) if i == path[0] else v for i, v in enumerate(value)]
    if kind == "key" and len(path) == 1:
        return {POISON if k == path[0] else k: v for k, v in value.items()}
    return {k: planted(v, path[1:], kind) if k == path[0] else v for k, v in value.items()}


def whole_run():
    """Every file of text that pages of a run read, with every field that they know."""
    evaluated = {"metric": "FID", "samples": 50, "ema": {"0.9": {"FID": 2.0}}}
    more = dict.fromkeys(NUMBERS, 1.5) | {"neighbors": [2.0], "scale": {"global": 1.0}}
    more |= {
        "drift_groups": {"a": [1.0], "b": [2.0]},
        "evaluation": evaluated,
        "ema_initial_share": {"0.9": [1, 2]},
    }
    more |= {"warnings": ["kind: problem; advice"], "unreadable": {"count": 3, "names": ["photo.png"]}}
    header = {
        "task": "train",
        "temperatures": [0.02, 0.2],
        "recipe": "folder",
        "weights": "EMA 0.999",
        "command": "driftgen train folder",
        "environment": {"torch": "2.13.0"},
        "init": "other",
    }
    chosen = {
        "size": "tiny",
        "reason of the size": "r",
        "generator": "g",
        "encoder": "e",
        "augmentation": "a",
    }
    config = {"task": "train", "about": "a", "optim": {"steps": 20}, "data": {"path": "p"}, "chosen": chosen}
    figures = {
        "figures": {"copied": 1.0, "text": "t"},
        "bars": {"copied": 0.5},
        "evaluator": "e",
        "hardware": "h",
    }
    evaluation = figures | {"note": {"n": "o"}, "network_calls_per_image": 1, "milliseconds_per_image": 0.4}
    metrics = [{"header": header}, row(10), row(20) | more]
    return {"metrics.jsonl": metrics, "config.yaml": config, "evaluation.json": evaluation}


CASES = [(file, path, kind) for file, value in whole_run().items() for path, kind in leaves(value)]


def test_poison_in_any_field_does_no_harm(tmp_path):
    """One field at a time, of every file: a page that skips a damaged field must not skip the others."""
    folder = write_run(tmp_path / "run", steps=())
    shutil.rmtree(folder / "samples")
    shown = set()
    for case in CASES:
        for name, value in whole_run().items():
            value = planted(value, *case[1:]) if name == case[0] else value
            lines = value if name == "metrics.jsonl" and isinstance(value, list) else [value]
            (folder / name).write_text("\n".join(map(json.dumps, lines)) + "\n")
        html = write_report(folder).read_text()
        assert "<script>alert" not in html, case
        assert "<img src=x" not in html, case
        if "alert(1)" in html:
            shown.add(case[0])
    assert shown == {"metrics.jsonl", "config.yaml", "evaluation.json"}  # the poison does reach the pages


def test_text_reaches_a_page_through_the_templates_alone():
    """Nothing turns escaping off, and nothing but the package's own files is marked as safe."""
    report = Path(dg.__file__).parent / "report"
    for path in [*report.glob("*.py"), *report.glob("templates/*.html")]:
        text = path.read_text()
        assert not re.search(r"\|\s*safe|autoescape\s+false|autoescape=False|__html__", text), path
        assert text.count("Markup") == (2 if path.name == "page.py" else 0), path
        assert "</html>" not in text or path.name == "base.html", path
    assert not re.search(
        r"innerHTML|insertAdjacentHTML|document\.write", (report / "templates" / "script.js").read_text()
    )


# --- several runs ---------------------------------------------------------------------------------------


def test_the_comparison_of_runs(tmp_path):
    first = write_run(tmp_path / "first", lr=0.1)
    second = write_run(tmp_path / "second", lr=0.2, rows=[row(10, spread=0.5), row(20, accuracy=0.7)])
    page = Page(write_reports([first, second], tmp_path / "out" / "page.html"))
    assert page.texts("h1") == ["Comparison of 2 runs"]
    assert page.texts("h2") == ["Summary", "Samples", "Curves", "Configuration", "Commands and environment"]
    assert [link["href"] for link in page.all("a")] == [f"#{s['id']}" for s in page.all("section")]
    summary, differences, environment = page.all("table")
    assert " ".join(summary["text"].split()).startswith("quantity first second steps 20 20")
    assert " ".join(differences["text"].split()) == "option first second optim.lr 0.1 0.2"
    assert "device cpu cpu" in " ".join(environment["text"].split())
    assert len(page.all("input", type="range")) == 2
    assert page.texts("h3")[:3] == ["first", "second", "Real images"]  # of the same data: shown once
    charts = {" ".join(c["text"].split()) for c in page.all("figure", class_="chart")}
    (drift,) = [c for c in charts if c.startswith("Raw drift, τ = 0.02")]
    assert "first 0.05 second 0.05" in drift
    (spread,) = [c for c in charts if c.startswith("Spread ")]
    assert "first 0.9 second 0.9" in spread
    (accuracy,) = [c for c in charts if c.startswith("Classifier accuracy")]
    assert "second 0.7" in accuracy
    assert "first" not in accuracy
    # A run has the same color in every chart, also where another run has no curve.
    curve = page.html[page.html.index("Classifier accuracy over training steps") :]
    assert 'class="curve c1"' in curve[: curve.index("</svg>")]


def test_equal_names_are_told_apart_and_equal_values_named(tmp_path):
    runs = [write_run(tmp_path / parent / "run") for parent in ("a", "b")]
    page = Page(write_reports(runs, tmp_path / "page.html"))
    assert page.texts("p", class_="subtitle") == ["a/run · b/run"]
    assert "All values are equal." in page.texts("p")


def test_one_run_is_written_again(tmp_path):
    folder = write_run(tmp_path / "run")
    assert write_reports([folder]) == folder / "report.html"
    again = write_reports([folder], tmp_path / "elsewhere.html")
    assert again.read_text() == (folder / "report.html").read_text()


def test_many_runs_share_the_sheets(tmp_path):
    runs = [write_run(tmp_path / str(i), steps=range(0, 200, 10)) for i in range(4)]
    page = Page(write_reports(runs, tmp_path / "page.html"))
    assert [slider["max"] for slider in page.all("input")] == [str(FRAMES // 4 - 1)] * 4


def test_the_toy_of_a_demo_and_alone(tmp_path):
    metrics = {
        "command": f"driftgen toy {POISON}",
        "torch": "2.13",
        "distribution": f"bimodal{POISON}",
        "config": {"generator": False, "init": "collapsed"},
        "energy_distance": 0.01,
        "energy_distance_at_start": 1.0,
        "energy_distance_of_data_to_itself": 0.001,
        "drift_at_start": 1.0,
        "drift_at_end": 0.1,
        "drift_ratio": 10.0,
        "seconds": 1.0,
    }
    toy = write_run(tmp_path / "run") / "toy"
    toy.mkdir()
    (toy / "metrics.json").write_text(json.dumps(metrics))
    Image.new("RGB", (40, 20)).save(toy / "evolution.png")
    Image.new("L", (40, 20)).save(toy / "evolution.gif")
    page = Page(write_report(tmp_path / "run"))
    assert is_harmless(page)
    assert "The same training in two dimensions" in page.texts("section", id="toy")[0]
    assert page.html.count("data:image/gif") == 1
    alone = Page(write_reports([toy]))
    assert is_harmless(alone)
    assert alone.texts("h1") == [f"Bimodal{POISON}: points, starting collapsed on one spot"]
    (toy / "metrics.json").write_text("{")
    with pytest.raises(dg.InputError, match="holds no run"):
        write_reports([toy])


def test_long_runs_have_pages_of_modest_size(tmp_path):
    """30 sheets of 100 noisy color images, which compress worst."""
    folder = write_run(tmp_path / "run", steps=())
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    first = folder / "samples" / "step-0000000.png"
    write_sheet(first, Sheet([Image.fromarray(p) for p in pixels], 10))
    for step in range(1, 30):
        first.with_name(f"step-{step:07d}.png").write_bytes(first.read_bytes())
    assert write_report(folder).stat().st_size < 4e6
