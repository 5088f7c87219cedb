"""Small training runs and a view that shows nothing."""

from driftgen.support.distributed import Distributed
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.recipes import load_recipe
from driftgen.training.trainer import train

SMALL = [
    "batch.classes=4",
    "batch.generated=8",
    "batch.positives=8",
    "batch.unconditional=4",
    "generator.options={hidden_size: 32, depth: 1, style_codebooks: 2}",
    "output.metrics_every=5",
    "output.samples_every=1000",
    "output.checkpoint_every=10",
    "optim.warmup=5",
]


class Silent:
    def __init__(self):
        self.said, self.rows, self.steps, self.summaries, self.speeds = [], [], [], [], []

    def begin(self, summary):
        self.summaries.append(summary)

    def advance(self, step, seconds_per_step):
        self.steps.append(step)

    def measured(self, speed):
        self.speeds.append(speed)

    def update(self, row):
        self.rows.append(row)

    def info(self, text):
        self.said.append(text)

    warn = info


def config(*changes):
    return load_recipe("digits", [*SMALL, *changes], "train")


def run(folder, *changes, device="cpu", **options):
    view = Silent()
    done = train(config(*changes), folder, Distributed.start(device), view, name="digits", **options)
    return done, view


def final(folder):
    found = Checkpoints(folder / "checkpoints").load()
    return {k: v.clone() for k, v in found.tensors.items() if not k.startswith("random")}
