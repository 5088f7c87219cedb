"""Training runs that are killed at random moments and resumed: bit-equal to a run that nobody stopped.

``python -m tests.support.killed_runs --seconds 60`` stops as many runs as fit and prints the counts. A case
is one run, stopped up to five times by SIGKILL, SIGINT or SIGTERM, half of the times while a checkpoint is
written; or a group of two processes, of which one is killed.
"""

import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from driftgen.support.folder_lock import LOCK
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.metrics_file import read_metrics
from driftgen.training.run_folder import CHECKPOINTS
from tests.support.fault_search import Counts, Fault, chosen, main, reproduction
from tests.support.fork_server import CAPTURE, Child, run_code, start_ranks
from tests.support.runs import SMALL, final

STEPS = 24
OUTPUT = ["output.metrics_every=1", "output.checkpoint_every=2", "output.samples_every=8"]
TRAIN = [*SMALL, "encoders=[]", "optim.warmup=2", *OUTPUT, "output.report_every=8", f"optim.steps={STEPS}"]
PRETRAIN = [
    "batch_size=8",
    "optim.warmup=2",
    "mae.options={base_channels: 40, blocks: [1, 1]}",
    *OUTPUT,
    f"optim.steps={STEPS}",
]
KINDS = {
    "training": (1, ["train", "digits"], TRAIN),
    "pretraining": (1, ["pretrain", "mae-digits"], PRETRAIN),
    "group": (2, ["train", "digits"], [*TRAIN, "batch.classes=4"]),
}
PROGRAM = "driftgen/__main__.py"  # in every traceback of the command itself
END = 60.0  # seconds for a process to end, on a loaded machine
LOST = 20.0  # for the others to notice that a process is lost


class WrongError(Exception):
    """A run that did not do what it should."""


@dataclass
class Reference:
    """A run that nobody stopped."""

    folder: Path
    seconds: float
    tensors: dict[str, torch.Tensor] = field(repr=False)


def start(kind: str, folder: Path) -> list[Child]:
    """Start the processes of a run."""
    ranks, words, changes = KINDS[kind]
    settings = [word for change in changes for word in ("--set", change)]
    program = ["-m", "driftgen", *words, *settings, "--device", "cpu", "--out", str(folder)]
    if ranks == 1:
        return [Child(program, stdout=CAPTURE, stderr=CAPTURE)]
    return start_ranks(program, ranks, stdout=CAPTURE, stderr=CAPTURE)


def finish(processes: list[Child], what: str, codes: tuple[int, ...], seconds: float = END) -> list[str]:
    """Return what the processes wrote to stderr. Raise for a hang, a traceback or another exit code."""
    texts = []
    for process in processes:
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise WrongError(f"{what}: no end within {seconds:.0f} s") from None
        texts.append(errors)
        if process.returncode == -signal.SIGINT and PROGRAM not in errors:
            continue  # Ctrl-C before the program has begun: Python's own traceback
        if "Traceback" in errors:
            raise WrongError(f"{what}: a traceback: {_shown_traceback(errors)}")
        if process.returncode not in codes:
            raise WrongError(f"{what}: exit code {process.returncode}: {errors.splitlines()[-1:]}")
    return texts


def _shown_traceback(errors: str) -> str:
    """Return a traceback in one line, with the line before it, which names a callback, and its end."""
    lines = [line.strip() for line in errors.splitlines() if line.strip(" ^~")]
    first = next(i for i, line in enumerate(lines) if "Traceback" in line)
    shown = lines[max(first - 1, 0) :]
    return " | ".join(shown if len(shown) <= 8 else [*shown[:2], "...", *shown[-5:]])


def reference(kind: str, folder: Path) -> Reference:
    """Train without a stop."""
    run_code("pass")  # starts the server
    begin = time.perf_counter()
    finish(start(kind, folder), f"{kind} without a stop", (0,), 10 * END)
    return Reference(folder, time.perf_counter() - begin, final(folder))


def wait_for_moment(process: Child, folder: Path, rng: random.Random, seconds: float) -> None:
    """Return at a random moment of a run, half of the times while a checkpoint is written, or at its end."""
    saves = rng.randint(1, 6) if rng.random() < 0.5 else 0
    end, before = time.monotonic() + rng.uniform(0, 0.8 * seconds), False
    while process.poll() is None and (saves or time.monotonic() < end):
        if saves:
            writing = _is_saving(folder)
            saves -= writing and not before
            before = writing
        time.sleep(0.0005 if saves else 0.005)
    time.sleep(rng.uniform(0, 0.003))


def _is_saving(folder: Path) -> bool:
    place = folder / CHECKPOINTS
    return place.is_dir() and any("." in path.name for path in place.iterdir())


def stop(kind: str, folder: Path, rng: random.Random, seconds: float, counts: Counts) -> bool:
    """Start or resume a run and stop it; return False if it ended before."""
    processes = start(kind, folder)
    try:
        # A signal to a process that has not begun, or to a group that has not met, tests nothing of ours.
        begun = folder / ("metrics.jsonl" if len(processes) > 1 else LOCK)
        rows = _count_rows(begun)
        while processes[0].poll() is None and (
            _count_rows(begun) <= rows if len(processes) > 1 else not begun.is_file()
        ):
            time.sleep(0.002)
        victim = rng.choice(processes)
        wait_for_moment(victim, folder, rng, seconds)
        number = signal.SIGKILL if len(processes) > 1 else rng.choices(
            [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], [0.7, 0.2, 0.1]
        )[0]  # fmt: skip
        if victim.poll() is not None:
            finish(processes, f"{kind}, resumed", (0,))
            return False
        victim.send_signal(number)
        if number != signal.SIGKILL:
            codes = (0, 130, -number) if number == signal.SIGTERM else (0, 130)
            (text,) = finish(processes, f"{kind} after {number.name}", codes)
            check_interrupted(f"{kind} after {number.name}", processes[0].returncode, text, folder)
            counts.kinds["interrupts survived"] += 1
            return processes[0].returncode != 0
        victim.wait(END)
        inside = _is_saving(folder)
        others = [process for process in processes if process is not victim]
        for text in finish(others, f"{kind} that lost a process", (0, 1), LOST):
            if sum(line.startswith("driftgen: error: ") for line in text.splitlines()) > 1:
                raise WrongError(f"{kind} that lost a process: more than one message")
        counts.kinds["lost processes survived" if others else "kills survived"] += 1
        counts.kinds["kills inside a save"] += inside
        return True
    finally:
        for process in processes:
            process.kill()


def check_interrupted(what: str, code: int | None, text: str, folder: Path) -> None:
    """Raise if a process that received SIGINT or SIGTERM ended in another way than it should.

    SIGTERM ends a process as it ends any other while Python imports, before a run begins, and after the run:
    when the command has released the folder of a complete run. During a run it never does.
    """
    if code == -signal.SIGTERM and text and not _is_released(folder):
        raise WrongError(f"{what}: the run had begun: {text.splitlines()[-1:]}")
    if code == 130 and "driftgen: interrupted" not in text:
        raise WrongError(f"{what}: no message")


def _is_released(folder: Path) -> bool:
    """Return True if a run is complete and its process removed the lock, which a run that dies leaves."""
    return not (folder / LOCK).exists() and Checkpoints(folder / CHECKPOINTS).steps[-1:] == [STEPS]


def _count_rows(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def check_equal(folder: Path, expected: Reference) -> None:
    """Raise unless weights and rows are those of the run that nobody stopped."""
    found = final(folder)
    different = [name for name in expected.tensors if not torch.equal(found[name], expected.tensors[name])]
    if found.keys() != expected.tensors.keys() or different:
        raise WrongError(f"the resumed run differs from the other in {different[:3]}")
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")[1]]
    if steps != list(range(1, STEPS + 1)):
        raise WrongError(f"metrics.jsonl has the steps {steps}")


def try_run(kind: str, number: int, expected: Reference, folder: Path) -> Counts:
    """Stop a run several times, let it end, and compare it."""
    rng = random.Random(f"{kind} {number}")
    counts = Counts(tried=1)
    counts.kinds[f"runs, {kind}"] += 1
    begin = time.perf_counter()
    try:
        stops = rng.randint(1, 5) if kind != "group" else 1
        while stops and stop(kind, folder, rng, expected.seconds, counts):
            stops -= 1
        finish(start(kind, folder), f"{kind}, resumed at last", (0,), 10 * END)
        check_equal(folder, expected)
    except WrongError as error:
        again = reproduction("tests.support.killed_runs", number, kind)
        counts.faults.append(Fault(f"seed {number}: {error}", again))
    counts.took(time.perf_counter() - begin)
    return counts


def search(seed: int, only: str, seconds: float) -> Iterator[Counts]:
    """Stop runs of all kinds in turn; of eight runs one is a group."""
    kinds = chosen(KINDS, only)
    with tempfile.TemporaryDirectory() as place:
        references: dict[str, Reference] = {}
        while True:
            for kind in kinds if len(kinds) == 1 else ["training", "pretraining"] * 3 + ["training", "group"]:
                if kind not in references:
                    references[kind] = reference(kind, Path(place) / f"{kind}-calm")
                folder = Path(place) / f"{kind}-{seed}"
                yield try_run(kind, seed, references[kind], folder)
                shutil.rmtree(folder, ignore_errors=True)
                seed += 1


if __name__ == "__main__":
    main(search)
