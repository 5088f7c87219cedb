"""Pools of encoders: a step is that of the member that it draws."""

import pytest
import torch

from driftgen.errors import InputError
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.training.config import Encoder
from driftgen.training.encoder_pool import StepEncoders
from driftgen.training.trainer import Training
from tests.support.runs import config, final, run

POOL = "encoders=[{kind: mae, path: a, pool: [b]}]"


@pytest.fixture
def encoders(tmp_path):
    """Folders of three encoders that differ in their weights."""
    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        mae = ResNetMAE(in_channels=1, base_channels=40, blocks=[1, 1], patchify=1, num_classes=10)
        folders.append(str(tmp_path / f"encoder-{seed}"))
        save_model(mae, folders[-1])
    return folders


def entry(path, *pool):
    return f"encoders=[{{kind: mae, path: {path}, pool: [{', '.join(pool)}]}}]"


def gradient(task, step):
    task.generator.zero_grad()
    task.compute_gradient(step)
    return [p.grad.clone() for p in task.generator.parameters()]


def test_a_step_is_that_of_the_drawn_encoder(encoders):
    cpu = Distributed.start("cpu")
    task = Training(config(entry(*encoders)), cpu)
    alone = [Training(config(entry(path)), cpu) for path in encoders]
    drawn = [task.encoders.draw(step)[0] for step in range(12)]
    assert set(drawn) == {0, 1, 2}
    for step in (drawn.index(0), drawn.index(1), drawn.index(2), 0):  # also back to an earlier member
        found = gradient(task, step)
        for member, single in enumerate(alone):
            expected = gradient(single, step)
            same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert same == (member == drawn[step])


def test_a_second_encoder_draws_for_itself(encoders):
    change = f"encoders=[{{path: {encoders[0]}, pool: [{encoders[1]}]}}, {{path: {encoders[2]}}}]"
    task = Training(config(change), Distributed.start("cpu"))
    drawn = [task.encoders.draw(step) for step in range(100)]
    assert 30 < sum(first for first, _ in drawn) < 70
    assert {second for _, second in drawn} == {0}


def turns(*paths, per_step=1):
    return [f"encoders=[{', '.join(f'{{path: {p}}}' for p in paths)}]", f"encoders_per_step={per_step}"]


def test_encoders_take_turns(encoders):
    cpu = Distributed.start("cpu")
    task = Training(config(*turns(*encoders)), cpu)
    for step in (0, 1, 2, 3, 7, 1):
        found = gradient(task, step)
        (used,) = task.encoders.used
        assert task.encoders.used == task.encoders.entries(step)
        expected = gradient(Training(config(entry(encoders[used])), cpu), step)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    pair = Training(config(*turns(*encoders, per_step=2)), cpu).encoders
    for first in range(0, 30, 3):  # each round uses each pair once
        assert {pair.entries(first + i) for i in range(3)} == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize(("count", "every"), [(2, 10), (5, 10), (4, 6), (3, 100)])
def test_measured_steps_have_all_encoders(count, every):
    """Even if the steps between two rows of metrics are a multiple of the number of encoders."""
    entries = [Encoder(kind="mae", path=str(i)) for i in range(count)]
    turns = StepEncoders(entries, [torch.nn.Identity()] * count, 1, 0, 0)
    measured = [turns.entries(step) for step in range(every - 1, 40 * every, every)]
    assert len(set(measured)) == count


def test_turns_of_encoders_with_other_features(encoders, tmp_path):
    """Encoders of other widths and stages, one of them a pool."""
    other = ResNetMAE(in_channels=1, base_channels=48, blocks=[1], patchify=2)
    save_model(other, tmp_path / "other")
    first = f"{{path: {encoders[0]}, pool: [{encoders[1]}]}}"
    change = [f"encoders=[{first}, {{path: {tmp_path / 'other'}}}]", "encoders_per_step=1"]
    cpu = Distributed.start("cpu")
    task, single = Training(config(*change), cpu), Training(config(entry(tmp_path / "other")), cpu)
    steps = {0: [], 1: []}
    for step in range(4):
        steps[task.encoders.entries(step)[0]].append(step)
    for step in steps[1]:
        pairs = zip(gradient(task, step), gradient(single, step), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    gradient(task, steps[0][0])
    assert task.last[1].generated.keys() != single.last[1].generated.keys()
    finished, view = run(tmp_path / "run", *change, "vectors=2", "optim.steps=4", "output.metrics_every=1")
    assert finished
    assert view.summaries[0].rows["in turn"] == "1 of 2 encoders a step"
    assert len(view.rows) == 4


@pytest.mark.cuda
def test_turns_are_captured(encoders, tmp_path):
    """Each encoder has a graph of its own, with the results of the step without a graph."""
    weights = []
    for captured in (True, False):
        folder = tmp_path / str(captured)
        change = [*turns(*encoders), "optim.steps=7", f"cuda_graph={str(captured).lower()}"]
        assert run(folder, *change, device="cuda")[0]
        weights.append(final(folder))
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["pool", "turns"])
def test_a_resumed_run_is_the_same(kind, encoders, tmp_path):
    change = (*([entry(*encoders)] if kind == "pool" else turns(*encoders)), "optim.steps=6")
    assert run(tmp_path / "whole", *change)[0]
    run(tmp_path / "parts", *change[:-1], "optim.steps=3", "output.checkpoint_every=3")
    assert run(tmp_path / "parts", *change, override=True)[0]
    whole, parts = final(tmp_path / "whole"), final(tmp_path / "parts")
    weights = [name for name in whole if name.startswith("model")]
    assert weights
    assert all(torch.equal(whole[name], parts[name]) for name in weights)


def test_the_summary_counts_the_pool(encoders, tmp_path):
    _, view = run(tmp_path / "run", entry(*encoders), "optim.steps=1")
    assert "and 2 more, one a step" in str(view.summaries[0])


def test_members_need_the_same_options(encoders, tmp_path):
    other = ResNetMAE(in_channels=1, base_channels=48, blocks=[1, 1], patchify=1)
    save_model(other, tmp_path / "other")
    with pytest.raises(InputError, match=r"encoders\.0\.pool: .*other has other weights than .*encoder-0"):
        Training(config(entry(encoders[0], str(tmp_path / "other"))), Distributed.start("cpu"))


def test_a_missing_member(encoders, tmp_path):
    missing = str(tmp_path / "no-such-run")
    with pytest.raises(InputError, match=r"Encoder .*no-such-run not found\. Train it first"):
        Training(config(entry(encoders[0], missing)), Distributed.start("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((POOL, "cache_features=true"), "set cache_features=false"),
        (
            ("encoders=[{kind: mae, path: a, pool: [b]}]", "fsdp=true"),
            "encoders.pool does not work with fsdp",
        ),
        ((POOL, "batch.micro=2", "batch.mode=previous"), "set batch.mode=exact"),
        (("encoders=[{kind: auto, pool: [b]}]",), "set path to the first one"),
        ((*turns("a", "b"), "cache_features=true"), "encoders_per_step needs features of every step"),
        ((*turns("a", "b"), "fsdp=true"), "encoders_per_step does not work with fsdp"),
        ((*turns("a", "b"), "batch.micro=2", "batch.mode=previous"), "encoders_per_step changes the scales"),
        (turns("a", "b", per_step=3), "encoders_per_step=3, but the run has 2 encoders"),
    ],
)
def test_what_a_pool_excludes(changes, message):
    with pytest.raises(InputError, match=message):
        config(*changes)
