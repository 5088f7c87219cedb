"""Pages as a browser reads them: parsed HTML, the slider, the comparison of runs."""

import json
import re

import numpy as np
import pytest
from PIL import Image

import driftgen as dg
from driftgen.report.comparison_page import write_reports
from driftgen.report.run_page import FRAMES, write_report
from driftgen.support.sheets import Sheet, write_sheet
from tests.support.report_pages import POISON, Page, is_harmless, row, write_run


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


@pytest.mark.parametrize(("topic", "shown"), [("collapse", 1), ("no-such-topic", 0)])
def test_a_warning_carries_its_section_of_the_guide(tmp_path, topic, shown):
    warning = f"collapsed: all samples are nearly identical; lower optim.lr (driftgen explain {topic})"
    page = Page(write_report(write_run(tmp_path / "run", rows=[row(10), row(20, warnings=[warning])])))
    (text,) = page.texts("div", class_="warning")
    assert "What to do: Lower optim.lr." in text
    assert "explain" not in text
    assert text.count("PyTorch's default initialization shrinks the signal") == shown


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


def test_options_are_in_the_words_of_yaml_and_break_at_dots(tmp_path):
    runs = [write_run(tmp_path / name, lr=lr) for name, lr in (("first", 0.1), ("second", 0.2))]
    for run, text in zip(runs, ("compile: false\nfsdp: null\n", "compile: true\nfsdp: 2\n"), strict=True):
        with (run / "config.yaml").open("a") as file:
            file.write(text)
    page = Page(write_reports(runs, tmp_path / "page.html"))
    cells = " ".join(page.all("table")[1]["text"].split())
    assert "compile false true" in cells
    assert "fsdp none 2" in cells
    assert "optim.<wbr>lr" in page.html


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
