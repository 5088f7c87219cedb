"""Runs as a person meets them: started, killed, resumed, shared by two processes, broken."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import driftgen as dg
from driftgen.errors import InputError
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.reference import load_reference
from driftgen.evaluation.sweep import Evaluation, evaluate_model
from driftgen.report.run_page import write_report
from driftgen.support.distributed import Distributed
from driftgen.training import pretrain, step_memory, trainer
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.loop import Loop
from driftgen.training.recipes import load_recipe
from tests.support.cases import slow_after
from tests.support.fork_server import CAPTURE, run_ranks, start_driftgen
from tests.support.runs import SMALL, Silent, config, final, run


def command(folder, *changes):
    sets = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    return ["train", "digits", "--device", "cpu", "--out", str(folder), *sets]


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
# As many threads as this process has: sums are split between threads, so their last digit depends on them.
ENV = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


@pytest.mark.slow
def test_a_run_leaves_a_model_that_samples(tmp_path):
    changes = ["optim.steps=20", "output.samples_every=10", "ema=[0.9, 0.99]"]
    done, view = run(tmp_path / "r", *changes, report=write_report)
    assert done
    names = {p.name for p in (tmp_path / "r").iterdir()}
    assert names >= {
        "config.yaml",
        "metrics.jsonl",
        "samples",
        "checkpoints",
        "model",
        "model-ema-0.99",
        "report.html",
    }
    assert [p.name for p in sorted((tmp_path / "r" / "samples").iterdir())] == [
        "nearest.png",
        "real.png",
        "step-0000000.png",
        "step-0000010.png",
        "step-0000020.png",
    ]
    images = dg.DriftPipeline.from_pretrained(tmp_path / "r")([3, 5], seed=0)
    assert images[0].size == (8, 8)
    header, *rows = map(json.loads, (tmp_path / "r" / "metrics.jsonl").read_text().splitlines())
    assert header["header"]["task"] == "train"
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert len(rows[0]["drift"]) == len(config().loss.temperatures)
    assert rows[0].keys() >= {"loss", "gradient_norm", "alpha", "spread", "diversity", "samples_per_second"}
    again, view = run(tmp_path / "r", *changes)
    assert again
    assert view.said[0] == (
        "resumed after step 20: the run is complete; train longer with --set optim.steps=40 --override"
    )


@pytest.mark.slow
def test_a_run_evaluates_its_averages_and_saves_the_best(tmp_path, monkeypatch):
    monkeypatch.delenv("DRIFTGEN_INCEPTION", raising=False)
    changes = ["optim.steps=30", "ema=[0.5, 0.99]", "output.eval_every=10", "output.eval_samples=60"]
    folder = tmp_path / "r"
    run(folder, *changes, report=write_report)
    rows = dg.Run(folder).metrics
    scored = {row["step"]: row["evaluation"] for row in rows if "evaluation" in row}
    assert sorted(scored) == [10, 20, 30]
    values = {
        (step, decay): scores["FD-pixels"]
        for step, result in scored.items()
        for decay, scores in result["ema"].items()
    }
    assert len(values) == 6
    (step, decay), best = min(values.items(), key=lambda item: item[1])
    source = json.loads((folder / "model-best" / "config.json").read_text())["source"]
    assert (source["step"], source["ema"], source["FD-pixels"]) == (step, decay, best)
    # The command measures the same figure with the saved weights.
    pipe = dg.DriftPipeline.from_pretrained(folder / "model-best")
    reference = load_reference(folder / "evaluation" / "reference.safetensors")
    evaluation = Evaluation(reference, load_encoder("pixels"), Distributed.start("cpu"))
    row = evaluate_model(pipe, evaluation, samples=60, guidance=[config().output.sample_guidance])["rows"][0]
    assert row["FD-pixels"] == pytest.approx(best, rel=1e-6)
    assert "FD-pixels" in (folder / "report.html").read_text()
    # Evaluation changes nothing else: the same weights as without it.
    run(tmp_path / "plain", "optim.steps=30", "ema=[0.5, 0.99]")
    first, second = final(folder), final(tmp_path / "plain")
    assert all(torch.equal(first[k], second[k]) for k in second)


@pytest.mark.parametrize("changes", [[], ["batch.micro=2", "batch.mode=previous"]], ids=["whole", "previous"])
def test_spread_is_that_of_the_averaged_weights(changes):
    """Equal to the trained weights' for equal weights; another average changes it, and nothing else."""
    task = trainer.Training(config(*changes), Distributed.start("cpu"))
    task.compute_gradient(0)
    same = task.measure(task.generator)
    assert same["spread"] == pytest.approx(same["batch_spread"], rel=1e-4)
    assert same["diversity"] == pytest.approx(same["batch_diversity"], rel=1e-4)
    averaged = copy.deepcopy(task.generator)
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.zero_()
    other = task.measure(averaged)
    assert other["spread"] < 1e-3 < same["spread"]
    assert other["diversity"] < 1e-3
    assert other | {key: same[key] for key in ("spread", "diversity")} == same


@pytest.mark.parametrize(
    "changes",
    slow_after(
        1,
        [
            [],
            ["queue.kind=queue", "queue.class_size=12", "queue.global_size=30", "queue.push=9"],
            ["batch.micro=2", "batch.mode=previous"],
            ["optim.schedule=decay", "optim.decay_share=0.7"],
            ["optim.kind=muon"],
        ],
    ),
    ids=["index", "queue", "previous", "decay", "muon"],
)
def test_resume_is_exact_to_the_bit(tmp_path, changes):
    """20 steps in one go, and 10, a kill -9 in another process, and 10 more."""
    run(tmp_path / "straight", "optim.steps=20", *changes)
    words = command(tmp_path / "killed", "optim.steps=20", "output.metrics_every=1", *changes)
    process = start_driftgen(*words, env=ENV)
    wanted = tmp_path / "killed" / "checkpoints" / "step-00000010"
    while not wanted.is_dir():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    at = Checkpoints(tmp_path / "killed" / "checkpoints").load().step
    assert at in (10, 20)
    run(tmp_path / "killed", "optim.steps=20", "output.metrics_every=1", *changes)
    straight, killed = final(tmp_path / "straight"), final(tmp_path / "killed")
    assert straight.keys() == killed.keys()
    assert all(torch.equal(straight[k], killed[k]) for k in straight)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    folder = tmp_path / "r"
    changes = ["optim.steps=100000", "output.metrics_every=1", "output.checkpoint_every=100000"]
    process = start_driftgen(*command(folder, *changes), env=ENV, stderr=CAPTURE, stdout=CAPTURE)
    while (
        not (folder / "metrics.jsonl").is_file()
        or len((folder / "metrics.jsonl").read_text().splitlines()) < 4
    ):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "run the same command to resume" in " ".join(stderr.split())
    step = Checkpoints(folder / "checkpoints").load().step
    assert step >= 3
    assert (folder / "model" / "config.json").is_file()


def start_by_torchrun(*program):
    done = subprocess.run(
        [sys.executable, *TORCHRUN, *program], capture_output=True, text=True, env=ENV, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda *program: run_ranks(program), id="environment"),
        pytest.param(start_by_torchrun, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(tmp_path, start):
    changes = ["optim.steps=20", "output.metrics_every=1"]
    run(tmp_path / "one", *changes)
    start("-m", "driftgen", *command(tmp_path / "two", *changes))

    def losses(folder):
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()[1:])
        return torch.tensor([[row["loss"], row["gradient_norm"]] for row in rows], dtype=torch.float64)

    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.shape == two.shape == (20, 2)
    assert ((one - two).abs() / one).max() < 1e-4


def test_reports_are_written_now_and_then_and_at_the_end_or_not_at_all(tmp_path):
    told = []
    run(tmp_path / "told", "optim.steps=12", "output.report_every=5", report=told.append)
    assert told == 3 * [tmp_path / "told"]
    told.clear()
    run(
        tmp_path / "first",
        "optim.steps=12",
        "output.metrics_every=4",
        "output.report_every=100",
        report=told.append,
    )
    assert len(told) == 2  # with the first metrics, and at the end
    run(tmp_path / "untold", "optim.steps=12", "output.report_every=5")
    assert not (tmp_path / "untold" / "report.html").exists()


def test_a_changed_configuration_needs_a_word(tmp_path):
    run(tmp_path, "optim.steps=5")
    with pytest.raises(dg.InputError, match=r"another configuration \(optim.lr: .*--override"):
        run(tmp_path, "optim.steps=5", "optim.lr=0.5")
    done, view = run(tmp_path, "optim.steps=8", override=True)
    assert done
    assert view.said[0] == "resumed after step 5"
    assert Checkpoints(tmp_path / "checkpoints").load().step == 8


@pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
def test_another_optimizer_begins_its_moments_of_matrices_at_zero(tmp_path, before, after):
    run(tmp_path, "optim.steps=5", f"optim.kind={before}", "encoders=[]")
    states = [final(tmp_path)]
    changes = ["optim.steps=8", f"optim.kind={after}", "encoders=[]"]
    done, view = run(tmp_path, *changes, override=True)
    assert done
    states.append(final(tmp_path))
    total, *with_squares = (
        sum(name.endswith(ending) for name in state)
        for ending, state in (("/exp_avg", states[0]), *(("/exp_avg_sq", state) for state in states))
    )
    matrices = total - min(with_squares)
    assert view.said[0] == (
        f"{matrices} of {total} parameters were updated by another optimizer in step-00000005 (optim.kind): "
        "their moments start at zero"
    )
    assert 0 < matrices < total
    assert view.said[1] == "resumed after step 5"
    again, view = run(tmp_path, *changes)
    assert again
    assert "moments" not in " ".join(view.said)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    run(tmp_path, "optim.steps=15")
    path = tmp_path / "checkpoints" / "step-00000015" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    done, view = run(tmp_path, "optim.steps=15")
    assert done
    assert "step-00000015 is damaged" in view.said[0]
    assert view.said[1] == "resumed after step 10"


def test_bad_gradients_are_skipped_and_the_third_in_a_row_stops(tmp_path, monkeypatch):
    from driftgen.training.trainer import Training

    bad = {3, 7, 8}
    gradient = Training.compute_gradient

    def poisoned(self, step):
        loss = gradient(self, step)
        if step in bad:
            next(self.generator.parameters()).grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(Training, "compute_gradient", poisoned)
    done, view = run(tmp_path / "a", "optim.steps=12")
    assert done
    assert view.rows[-1]["skipped"] == 3
    assert all(p.isfinite().all() for p in final(tmp_path / "a").values())
    bad |= {9}
    with pytest.raises(dg.InputError, match="3 steps in a row, up to step 10"):
        run(tmp_path / "b", "optim.steps=12")
    kept = Checkpoints(tmp_path / "b" / "checkpoints").load()
    assert all(v.isfinite().all() for v in kept.tensors.values() if v.is_floating_point())


def test_a_full_disk_stops_with_the_last_good_checkpoint(tmp_path, monkeypatch):
    save = Checkpoints.save

    def full(self, step, tensors, record):
        if step > 10:
            raise dg.InputError("the disk is full")
        return save(self, step, tensors, record)

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(dg.InputError, match="the disk is full"):
        run(tmp_path, "optim.steps=30")
    assert Checkpoints(tmp_path / "checkpoints").load().step == 10


def test_parts_that_do_not_fit_leave_nothing_behind(tmp_path):
    with pytest.raises(dg.InputError, match="generator: option='depht' is not known"):
        run(tmp_path / "r", "generator.options={depht: 1}")
    with pytest.raises(dg.InputError, match="does not exist"):
        run(tmp_path / "r", "encoders=[{path: nowhere}]")
    assert not (tmp_path / "r").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(dg.InputError, match="is not empty and holds no run"):
        run(tmp_path / "other")


def test_micro_batches_train_as_the_whole(tmp_path):
    run(tmp_path / "a", "optim.steps=5")
    run(tmp_path / "b", "optim.steps=5", "batch.micro=4")
    a, b = final(tmp_path / "a"), final(tmp_path / "b")
    for name, value in a.items():
        if name.startswith("model/"):
            torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (["generator.kind=dit"], "batch.micro=2 (the same step in micro-batches) or checkpoint_blocks=true"),
        (
            ["generator.kind=mlp", "batch.micro=2"],
            "batch.micro=4 (the same step in micro-batches) or batch.mode=prev",
        ),
        (["generator.kind=dit", "batch.micro=4", "checkpoint_blocks=true"], "batch.mode=previous"),
        (["generator.kind=mlp", "batch.micro=4", "batch.mode=previous"], "batch.generated=N with fewer"),
        (["mae-digits", "micro=2"], "micro=4 (the same step in micro-batches)"),
    ],
)
def test_too_little_memory_is_told_in_a_line(tmp_path, changes, advice):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    recipe, *changes = changes if changes[0].startswith("mae") else ["digits", *SMALL, *changes]
    config = load_recipe(recipe, changes)
    advise = step_memory.memory_advice if config.task == "train" else pretrain.memory_advice
    task = SimpleNamespace(
        model=torch.nn.Linear(2, 2),
        compute_gradient=full,
        samples_per_step=1,
        memory_advice=lambda: advise(config),
        save_preview=lambda averaged, path: None,
    )
    loop = Loop(tmp_path, config, task, Distributed.start("cpu"), Silent())
    with pytest.raises(InputError) as caught:
        loop.run()
    assert str(caught.value).startswith(f"out of GPU memory after step 0: use --set {advice}")
