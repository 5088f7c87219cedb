"""The task protocol: a task without images trains in the same loop, with the same step."""

import json
import signal

import pytest
import torch
from safetensors import safe_open

import driftgen as dg
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import Output
from tests.support.action_task import ActionConfig, ActionTask, train_actions
from tests.support.fork_server import start_code
from tests.support.runs import final, run

KILLED = """
import sys
from pathlib import Path
import torch
from tests.support.action_task import KilledTask, train_actions
torch.set_num_threads(int(sys.argv[2]))
train_actions(Path(sys.argv[1]), KilledTask, micro=int(sys.argv[3]), mode=sys.argv[4])
"""


def test_actions_train_in_the_loop(tmp_path):
    done, view, task = train_actions(tmp_path / "r")
    assert done
    folder = tmp_path / "r"
    header, *rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    environment = header["header"].pop("environment")
    assert environment.keys() >= {"driftgen", "torch", "python", "hardware", "device", "system"}
    assert header["header"] == {"task": "actions", "weights": "EMA 0.9", "command": ""}
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert rows[0].keys() >= {
        "loss",
        "drift",
        "scale",
        "spread",
        "diversity",
        "neighbors",
        "averaged_error",
    }
    assert rows[-1]["scale"].keys() == {"global"}
    assert [p.name for p in sorted((folder / "samples").iterdir())] == [
        "step-0000000.json",
        "step-0000010.json",
        "step-0000020.json",
    ]
    assert torch.tensor(json.loads((folder / "samples" / "step-0000020.json").read_text())).shape == (3, 4, 2)
    for decay in ("0.9", "0.99"):
        averaged = final(folder)
        with safe_open(folder / f"policy-{decay}.safetensors", "pt") as saved:
            assert saved.metadata() == {"step": "20"}
            for name in saved.keys():  # noqa: SIM118, not a mapping
                assert torch.equal(saved.get_tensor(name), averaged[f"ema/{decay}/{name}"])
    assert not view.said
    (summary,) = view.summaries
    assert summary.rows["output"] == f"{folder}: checkpoints/, metrics.jsonl"
    assert summary.resume == "run the same code again"  # the package has no function for this task
    again, view, task = train_actions(folder)
    assert again
    assert view.said == [
        "resumed after step 20: the run is complete; train longer with --set optim.steps=40 --override"
    ]
    assert task.drawn == 20 * 6


def test_actions_learn_their_distribution(tmp_path):
    quiet = Output(metrics_every=20, samples_every=1000, checkpoint_every=1000)
    optim = ActionConfig().optim.model_copy(update={"steps": 120, "lr": 1e-2})
    done, view, _ = train_actions(tmp_path / "r", optim=optim, output=quiet)
    assert done
    first, *_, last = view.rows
    assert last["averaged_error"] < 0.4 * first["averaged_error"]
    assert last["spread"] == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("micro", "mode"), [(1, "exact"), (2, "previous")])
def test_killed_and_resumed_to_the_bit(tmp_path, micro, mode):
    train_actions(tmp_path / "straight", micro=micro, mode=mode)
    killed = start_code(KILLED, tmp_path / "killed", torch.get_num_threads(), micro, mode)
    assert killed.wait() == -signal.SIGKILL
    assert Checkpoints(tmp_path / "killed" / "checkpoints").load().step == 10
    _, view, _ = train_actions(tmp_path / "killed", micro=micro, mode=mode)
    assert view.said == ["resumed after step 10"]
    straight, resumed = final(tmp_path / "straight"), final(tmp_path / "killed")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[k], resumed[k]) for k in straight)


@pytest.mark.parametrize("mode", ["exact", "previous"])
def test_micro_batches_give_the_gradient_of_the_whole(mode):
    gradients = []
    for micro in (1, 4):
        task = ActionTask(ActionConfig(micro=micro, mode=mode))
        task.compute_gradient(0)
        gradients.append(torch.cat([p.grad.flatten() for p in task.model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_short_runs_without_warmup_are_warned_about(tmp_path):
    done, view, _ = train_actions(tmp_path / "r", ema=(0.999, 0.5), ema_warmup=False)
    assert done
    share, step = view.rows[-1]["ema_initial_share"]["0.999"]
    assert share == pytest.approx(0.999**20)
    assert step == 2995
    assert view.rows[0]["ema_initial_share"].keys() == {"0.999"}
    (warning,) = (text for row in view.rows for text in row.get("warnings", []))
    assert "the saved EMA 0.999 still holds 100% of the initial weights, and 5% at step 2,995" in warning
    _, view, _ = train_actions(tmp_path / "warm", ema=(0.999, 0.5))
    assert not any("ema_initial_share" in row or "warnings" in row for row in view.rows)


def test_a_run_keeps_its_warmup(tmp_path):
    """Also against --override: a recipe that changed since does not switch the averages of a run."""
    short, long = (ActionConfig().optim.model_copy(update={"steps": n}) for n in (5, 8))
    train_actions(tmp_path / "a", ema_warmup=False, optim=short)
    for warmup in (True, False):
        done, _, _ = train_actions(tmp_path / "a", ema_warmup=warmup, optim=long, override=True)
        assert done
    train_actions(tmp_path / "b", ema_warmup=False, optim=long)
    a, b = final(tmp_path / "a"), final(tmp_path / "b")
    assert all(torch.equal(a[k], b[k]) for k in b)
    assert "ema_warmup: false" in (tmp_path / "a" / "config.yaml").read_text()


@pytest.mark.parametrize("at", [0, 7])
def test_a_signal_that_breaks_a_step_stops_the_run(tmp_path, at):
    """Ctrl-C reaches the compiler too: the step fails, and the run is saved as it was before."""

    class Compiling(ActionTask):
        def compute_gradient(self, step):
            if step == at:
                signal.raise_signal(signal.SIGINT)
                raise RuntimeError("the compiler was interrupted")
            return super().compute_gradient(step)

    done, view, _ = train_actions(tmp_path / "r", Compiling)
    assert not done
    assert any(text.startswith("Ctrl-C: saving after this step") for text in view.said)
    assert f"step {at + 1} was interrupted (RuntimeError: the compiler was interrupted)" in view.said
    assert f"stopped by Ctrl-C after step {at}; run the same command to resume: " in view.said[-1]
    train_actions(tmp_path / "r")
    train_actions(tmp_path / "straight")
    ended, straight = final(tmp_path / "r"), final(tmp_path / "straight")
    assert all(torch.equal(ended[k], straight[k]) for k in straight)


def test_a_failure_without_a_signal_is_raised(tmp_path):
    class Broken(ActionTask):
        def compute_gradient(self, step):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train_actions(tmp_path / "r", Broken)


def test_another_task_in_the_folder_is_refused(tmp_path):
    run(tmp_path / "r", "optim.steps=1")
    with pytest.raises(dg.InputError, match="holds a run of driftgen train, not actions: use another --out"):
        train_actions(tmp_path / "r")


def test_memory_advice_comes_from_the_task(tmp_path):
    class Full(ActionTask):
        def compute_gradient(self, step):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    message = r"(?m)^out of GPU memory after step 0: use --set observations=3$"
    with pytest.raises(dg.InputError, match=message):
        train_actions(tmp_path / "r", Full)
