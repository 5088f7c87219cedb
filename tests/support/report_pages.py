"""Files of a run, and its page as a browser reads it."""

import json
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from driftgen.support.sheets import Sheet, write_sheet

POISON = "\"><script>alert(1)</script><img src=x onerror=alert(2)>' onload='{{ 7*7 }}"
VOID = {"meta", "img", "input", "br", "wbr"}
HEADER = {
    "task": "train",
    "temperatures": [0.02, 0.2],
    "recipe": "folder",
    "weights": "EMA 0.999",
    "command": "driftgen train folder",
    "environment": {"torch": "2.13.0", "device": "cpu"},
}


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
    header = HEADER | header
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


def is_harmless(page):
    """Check that a page of poisoned files has no script and no element but its own."""
    scripts = page.all("script")
    assert len(scripts) == 1
    assert "alert" not in scripts[0]["text"]
    assert not [e for e in page.elements if any(key.startswith("on") for key in e)]
    assert not page.all("img", src="x")
    assert "7*7" in page.html  # shown as it is, not evaluated
    return True
