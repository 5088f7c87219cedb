"""Compact states: what they keep, what they cost, and how a run resumes from one."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import driftgen as dg
from driftgen.errors import InputError
from driftgen.support.sizes import parse_size, show_size
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.compact_state import place_state, read_state, write_state
from driftgen.training.recipes import load_recipe
from driftgen.training.state_encoding import LEVELS
from tests.support.runs import SMALL, Silent, run

QUEUE = ["queue.kind=queue", "queue.class_size=12", "queue.global_size=30", "queue.push=9"]
CHANGES = ["optim.steps=20", "ema=[0.9, 0.99]", *QUEUE]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compact") / "run"
    run(folder, *CHANGES)
    return folder


@pytest.fixture(scope="module")
def states(trained):
    """The report and the state of each number of bits."""
    found = {}
    for level in LEVELS:
        report = write_state(trained, trained.parent / str(level.bits), bits=level.bits)
        found[level.bits] = report, read_state(trained.parent / str(level.bits))
    return found


def rms(t):
    return float(t.double().square().mean().sqrt())


def relative(a, b):
    return rms(a - b) / rms(b)


@pytest.mark.parametrize("bits", [32, 24, 16, 8, 7])
def test_exact_parts(trained, states, bits):
    """Step, RNG and queue states, vectors of weights, and the record."""
    checkpoint, (report, state) = Checkpoints(trained / "checkpoints").load(), states[bits]
    assert state.step == report.step == checkpoint.step == 20
    assert state.record == checkpoint.record
    assert state.tensors.keys() == checkpoint.tensors.keys()
    assert state.config == (trained / "config.yaml").read_text()
    exact = [n for n in checkpoint.tensors if n.startswith(("random/", "task/")) or n.endswith("/step")]
    exact += [n for n, t in checkpoint.tensors.items() if n.startswith("model/") and t.ndim < 2]
    assert len([n for n in exact if n.startswith("task/")]) > 5
    for name in exact:
        assert torch.equal(state.tensors[name], checkpoint.tensors[name]), name
        assert state.tensors[name].dtype == checkpoint.tensors[name].dtype
    assert state.metrics == (trained / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("bits", "weights", "averages"),
    [(32, 0, 1e-3), (24, 2**-16, 2e-3), (16, 2**-8, 5e-3), (8, 0.01, 0.02), (7, 0.02, 0.05)],
)
def test_errors(trained, states, bits, weights, averages):
    checkpoint, (report, state) = Checkpoints(trained / "checkpoints").load(), states[bits]
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("model/"):
            assert relative(state.tensors[name], tensor) <= weights
        if name.startswith("ema/"):
            assert relative(state.tensors[name], tensor) <= averages
    assert report.errors["weights"] <= weights
    if bits == 8:
        assert report.errors["weights"] > 1e-3


@pytest.mark.parametrize(("bits", "error"), [(32, 0.01), (24, 0.02), (16, 0.2)])
def test_the_direction_of_adam_is_kept(trained, states, bits, error):
    """m / √v, and second moments that never become 0."""
    checkpoint, state = Checkpoints(trained / "checkpoints").load(), states[bits][1]
    for name, v in checkpoint.tensors.items():
        if name.endswith("exp_avg_sq"):
            first = name.removesuffix("_sq")
            decoded = state.tensors[name]
            assert torch.equal(decoded > 0, v > 0)
            direction, expected = (
                torch.where(b > 0, a / b.sqrt(), 0.0)
                for a, b in ((state.tensors[first], decoded), (checkpoint.tensors[first], v))
            )
            assert float((direction - expected).abs().max()) <= error * max(1.0, float(expected.abs().max()))


def test_eight_bits_keep_the_mean_of_second_moments_and_no_first_ones(trained, states):
    checkpoint, state = Checkpoints(trained / "checkpoints").load(), states[8][1]
    for name, v in checkpoint.tensors.items():
        if name.endswith("exp_avg_sq"):
            assert float(state.tensors[name].mean()) == pytest.approx(float(v.mean()), rel=0.2)
            assert not state.tensors[name.removesuffix("_sq")].any()


def test_sizes_fall_with_the_bits(trained, states):
    sizes = [states[bits][0].size for bits in (32, 24, 16, 8, 7)]
    assert sizes == sorted(sizes, reverse=True)
    for bits, (report, _) in states.items():
        folder = trained.parent / str(bits)
        assert report.size == sum(path.stat().st_size for path in folder.iterdir())
        assert report.size == sum(report.parts.values())
        assert report.files == len(list(folder.iterdir()))


def test_weights_that_training_does_not_change_are_exact(tmp_path):
    """Buffers, such as tables of positions, are equal to their averages."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: train\n")
    torch.manual_seed(0)
    table, weight = torch.randn(40, 40), torch.randn(40, 40)
    tensors = {"model/net.weight": weight, "model/net.table": table}
    tensors |= {"ema/0.9/net.weight": weight + 0.01 * torch.randn(40, 40), "ema/0.9/net.table": table.clone()}
    half = torch.randn(4, 4).bfloat16()
    tensors |= {"model/net.half": half, "ema/0.9/net.half": half + 1}
    tensors |= {"model/net.bad": torch.full((4, 4), torch.nan), "ema/0.9/net.bad": torch.zeros(4, 4)}
    Checkpoints(folder / "checkpoints").save(3, tensors, {})
    write_state(folder, tmp_path / "out", bits=8)
    decoded = read_state(tmp_path / "out").tensors
    assert torch.equal(decoded["model/net.table"], table)
    assert torch.equal(decoded["ema/0.9/net.table"], table)
    assert torch.equal(decoded["model/net.half"], tensors["model/net.half"])
    assert torch.equal(decoded["ema/0.9/net.half"], tensors["ema/0.9/net.half"])
    assert decoded["model/net.bad"].isnan().all()
    assert not torch.equal(decoded["model/net.weight"], weight)
    # The error of the weights does not reach the average.
    assert relative(decoded["ema/0.9/net.weight"], tensors["ema/0.9/net.weight"]) < 2e-3


@pytest.mark.parametrize(("bits", "kind"), [(24, "adamw"), (8, "adamw"), (24, "muon")])
def test_a_run_resumes_from_a_state(tmp_path, bits, kind):
    """In a new folder, with the same draws, close to the run that was not interrupted."""
    changes = [*CHANGES, "output.metrics_every=2", f"optim.kind={kind}"]
    _, straight = run(tmp_path / "straight", *changes)
    shutil.rmtree(tmp_path / "straight" / "checkpoints" / "step-00000020")
    report = write_state(tmp_path / "straight", tmp_path / "state", bits=bits)
    assert report.parts["moments"] < 2.1 * report.parameters  # bytes
    view = Silent()
    place_state(tmp_path / "state", tmp_path / "new", view)
    _, resumed = run(tmp_path / "new", *changes)
    assert resumed.said == ["resumed after step 10"]
    assert [row["step"] for row in dg.Run(tmp_path / "new").metrics] == list(range(2, 21, 2))
    for mine, expected in zip(resumed.rows, straight.rows[5:], strict=True):
        assert mine["alpha"] == expected["alpha"]
        assert mine["learning_rate"] == expected["learning_rate"]
        assert mine["loss"] == pytest.approx(expected["loss"], rel=0.002 if bits == 24 else 0.1)
    assert resumed.rows[0]["loss"] != straight.rows[5]["loss"]
    # The same command again resumes the new run.
    assert not view.said
    place_state(tmp_path / "state", tmp_path / "new", view)
    assert "has a checkpoint: resuming it" in view.said[0]


def test_a_killed_start_is_repeated(tmp_path, states, trained):
    """Killed after the configuration was written, before the checkpoint was complete."""
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.yaml").write_text((trained / "config.yaml").read_text())
    (folder / "checkpoints" / "step-00000020.partial").mkdir(parents=True)
    place_state(trained.parent / "24", folder, Silent())
    assert Checkpoints(folder / "checkpoints").load().step == 20
    assert (folder / "metrics.jsonl").read_bytes() == (trained / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_another_configuration_needs_a_word(tmp_path, states, trained):
    changes = [*SMALL, *CHANGES, "optim.lr=0.1"]
    state = trained.parent / "24"
    with pytest.raises(InputError, match=r"another configuration \(optim.lr: 0.001 -> 0.1\)"):
        dg.train(load_recipe("digits", changes), tmp_path / "r", state=state, device="cpu")
    assert not (tmp_path / "r").exists()
    longer = load_recipe("digits", [*changes, "optim.steps=21"])
    done = dg.train(longer, tmp_path / "r", state=state, device="cpu", override=True)
    assert done.complete
    assert done.config.optim.lr == 0.1
    assert Checkpoints(tmp_path / "r" / "checkpoints").load().step == 21


def test_max_size_takes_the_most_bits_that_fit(tmp_path, states, trained):
    tried = []
    limit = states[16][0].size + 100
    report = write_state(trained, tmp_path / "s", max_size=limit, on_try=tried.append)
    assert report.bits == 16
    assert report.size <= limit
    assert [line.split()[0] for line in tried] == ["32", "24"]
    assert write_state(trained, tmp_path / "default").bits == 24


def test_shards(tmp_path, trained):
    report = write_state(trained, tmp_path / "s", max_shard_size="20KB")
    shards = sorted((tmp_path / "s").glob("state-*.safetensors"))
    assert len(shards) > 3
    assert report.files == len(shards) + 3
    assert all(path.stat().st_size <= 20_000 for path in shards)
    tensors = read_state(tmp_path / "s").tensors
    # A state in the folder is replaced, with fewer files.
    write_state(trained, tmp_path / "s")
    assert len(list((tmp_path / "s").glob("state-*.safetensors"))) == 1
    again = read_state(tmp_path / "s").tensors
    assert all(torch.equal(again[k], v) for k, v in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_wrong_input(tmp_path, trained):
    with pytest.raises(InputError, match=r"max_size=9KB: 7 bits per weight take .* kB; give more"):
        write_state(trained, tmp_path / "s", max_size="9KB")
    assert not (tmp_path / "s").exists()
    with pytest.raises(InputError, match="bits=12: choose from 32, 24, 16, 8, 7"):
        write_state(trained, tmp_path / "s", bits=12)
    with pytest.raises(InputError, match="max_size=much: write a number of bytes"):
        write_state(trained, tmp_path / "s", max_size="much")
    with pytest.raises(InputError, match="holds no run"):
        write_state(tmp_path, tmp_path / "s")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and holds no compact state"):
        write_state(trained, tmp_path / "mine")
    with pytest.raises(InputError, match=r"holds no compact state: checksum\.json is missing"):
        read_state(tmp_path / "mine")
    with pytest.raises(InputError, match="is not empty and holds no run"):
        place_state(trained, tmp_path / "mine", Silent())


def test_damage(tmp_path, states, trained):
    folder = tmp_path / "s"
    shutil.copytree(trained.parent / "24", folder)
    shard = next(folder.glob("state-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match=r"damaged \(checksum of state-00001"):
        read_state(folder)
    shard.unlink()
    with pytest.raises(InputError, match=r"state-00001-of-00001\.safetensors does not exist"):
        read_state(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("shape", [9, 9]), ("codec", "pickle"), ("dtype", "X"), ("bytes", -1), ("name", None)]
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, states, trained, key, value):
    """Also with a checksum that fits: shapes bound what is unpacked."""
    folder = tmp_path / "s"
    shutil.copytree(trained.parent / "24", folder)
    index, sums = (json.loads((folder / name).read_text()) for name in ("state.json", "checksum.json"))
    entry = index["tensors"][0]
    entry[key] = value
    if value is None:
        del entry[key]
    text = json.dumps(index).encode()
    (folder / "state.json").write_bytes(text)
    sums["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "checksum.json").write_text(json.dumps(sums))
    with pytest.raises(InputError, match="cannot be read as a compact state"):
        read_state(folder)


@pytest.mark.slow
def test_the_commands(tmp_path, here, trained):
    done = here("convert", "state", trained, tmp_path / "s", "--max-size", "1MB")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "32 bits per weight" in lines[0]
    assert lines[-1].endswith("s")
    changes = [w for change in (*SMALL, *CHANGES, "optim.steps=22") for w in ("--set", change)]
    words = [
        "train",
        "digits",
        *changes,
        "--device",
        "cpu",
        "--out",
        tmp_path / "new",
        "--state",
        tmp_path / "s",
    ]
    done = here(*words)
    assert done.returncode == 2
    assert "optim.steps: 20 -> 22" in done.stderr
    done = here(*words, "--override")
    assert done.returncode == 0, done.stderr
    assert "resumed after step 20" in done.stderr
    assert Checkpoints(tmp_path / "new" / "checkpoints").load().step == 22


@pytest.mark.slow
def test_pretraining_resumes_from_a_state(tmp_path):
    changes = ["batch_size=4", "mae.options={base_channels: 40, blocks: [1, 1]}", "output.samples_every=100"]
    recipe = load_recipe("mae-digits", [*changes, "optim.steps=2"], "pretrain")
    dg.pretrain(recipe, tmp_path / "a", device="cpu")
    write_state(tmp_path / "a", tmp_path / "s")
    longer = load_recipe("mae-digits", [*changes, "optim.steps=3"], "pretrain")
    done = dg.pretrain(longer, tmp_path / "b", state=tmp_path / "s", device="cpu", override=True)
    assert done.complete
    assert Checkpoints(tmp_path / "b" / "checkpoints").load().step == 3


def test_sizes_of_files():
    assert parse_size("60MB") == 60_000_000
    assert parse_size("1.5 kB") == 1500
    assert parse_size("64MiB") == 2**26
    assert parse_size(7) == 7
    assert show_size(60_000_000) == "60.0 MB"
    assert show_size(1500) == "1.5 kB"
    for text in ("", "MB", "60XB", "-1", "0"):
        with pytest.raises(InputError, match="write a number of bytes"):
            parse_size(text)


def test_the_documented_sizes_are_those_of_the_results():
    folder = Path(__file__).parents[2] / "results" / "compact-state"
    rows = json.loads((folder / "sizes.json").read_text())["rows"]
    page, guide = (folder / "README.md").read_text(), (folder.parents[1] / "docs" / "training.md").read_text()
    for name, row in rows.items():
        assert f"| {name} | {row['megabytes']:.1f} MB |" in page
        size = f"{row['megabytes']:.3g} MB"
        assert re.search(rf"\| {name.split()[0]}( \(default\))? \|.*\| {size} \|", guide)
    curves = json.loads((folder / "metrics.json").read_text())["curves"]
    for kind in ("uninterrupted", "8 bits", "init"):
        scores = [curves[f"{kind}, seed {seed}"]["700"]["FD-pixels"] for seed in range(3)]
        assert " | ".join(f"{score:.3f}" for score in (*scores, sum(scores) / 3)) in page
