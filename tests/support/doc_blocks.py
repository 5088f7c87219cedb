"""Code blocks of the documents, and what the comment above each says about running it.

    <!-- not run: REASON -->                  it cannot run here
    <!-- run with: OLD => NEW; OLD => NEW --> it runs with these texts replaced
    <!-- tested by: tests/FILE.py::TEST -->   a test of its own runs it

A block without a comment runs as it stands.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
RUNNABLE = {"python": "python", "sh": "shell", "bash": "shell"}
OTHER = {"bibtex", "json", "text", "toml", "yaml"}
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"<!-- (?P<key>not run|run with|tested by): (?P<value>[^\n]+) -->\n$")


@dataclass(frozen=True)
class Block:
    """A block of a page; ``replaced`` are the texts to replace before it runs."""

    page: str
    line: int
    language: str
    code: str
    not_run: str = ""
    tested_by: str = ""
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self):
        return self.language in RUNNABLE and not self.not_run and not self.tested_by

    def text(self):
        code = self.code
        for old, new in self.replaced.items():
            assert old in code, f"{self.page}:{self.line}: {old!r} is not in the block"
            code = code.replace(old, new)
        return code


def pages():
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def read_blocks(path):
    """Return the blocks of a page."""
    text, found = path.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        marker = MARKER.search(text[: match.start()])
        key, value = (marker["key"], marker["value"]) if marker else ("", "")
        pairs = [pair.strip().split("=>") for pair in value.split(";")] if key == "run with" else []
        found.append(
            Block(
                path.relative_to(ROOT).as_posix(),
                text[: match.start()].count("\n") + 1,
                match["language"],
                match["code"],
                not_run=value if key == "not run" else "",
                tested_by=value if key == "tested by" else "",
                replaced={old.strip(): new.strip() for old, new in pairs},
            )
        )
    return found


def all_blocks():
    return [block for path in pages() for block in read_blocks(path)]


# The command with sizes that take seconds. Everything else is what a user runs.
PROGRAM = """
import sys
from pathlib import Path
from driftgen.training import recipe_sizes

recipe_sizes.FILE = Path(__file__).parent / "sizes.yaml"
words = sys.argv[1:]
trains = words[:1] in (["train"], ["pretrain"]) or words[:2] == ["policy", "train"]
if trains and "--show" not in words:
    short = ["optim.steps=4", "optim.warmup=1", "output.metrics_every=2"]
    if "digits" in words or "state" in words:
        short += ["batch.generated=4", "batch.positives=8", "batch.unconditional=2"]
    sys.argv += [word for value in short for word in ("--set", value)]
sys.argv[0] = "driftgen"
from driftgen.cli import main
main()
"""
# torchrun, which starts that program instead of the module driftgen.
LAUNCH = """
import runpy
import sys
from pathlib import Path

at = sys.argv.index("-m")
assert sys.argv[at + 1] == "driftgen"
sys.argv[at : at + 2] = [str(Path(__file__).with_name("driftgen_short.py"))]
runpy.run_module("torch.distributed.run", run_name="__main__")
"""
SIZES = """
tiny:
  expect: colored noise, after seconds
  folder:
    data.size: 8
    generator: {kind: decoder, options: {widths: [16, 8]}}
    encoders: [{kind: auto, switches: {vectors: false}}]
    batch: {classes: 2, generated: 8, positives: 8, unconditional: 2}
    ema: [0.9]
  mae-folder:
    data.size: 8
    mae: {options: {base_channels: 40, blocks: [1], patchify: 2}, finetune_steps: 2, finetune_ramp: 1}
    batch_size: 8
    optim: {warmup: 1, steps: 4}
    ema: [0.9]
few_images:
  below: 1000
  folder: {data.augment.flip: true}
"""


def make_home(folder, python):
    """Make a folder of a user: photos, and ``driftgen`` and ``torchrun`` with short runs in bin/."""
    random = np.random.default_rng(0)
    for photos in ("photos", "new-photos"):
        for name, color in (("apple", (200, 40, 30)), ("sky", (90, 150, 240))):
            (folder / photos / name).mkdir(parents=True)
            for i in range(12):
                pixels = np.array(color) + random.normal(0, 20, (24, 32, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
                    folder / photos / name / f"{i:02}.jpg"
                )
    commands = folder / "bin"
    commands.mkdir()
    program = commands / "driftgen_short.py"
    program.write_text(PROGRAM)
    (commands / "sizes.yaml").write_text(SIZES)
    (commands / "launch.py").write_text(LAUNCH)
    for name, file in {"driftgen": program, "torchrun": commands / "launch.py"}.items():
        (commands / name).write_text(f'#!/bin/bash\nexec {python} {file} "$@"\n')
        (commands / name).chmod(0o755)
