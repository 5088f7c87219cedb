"""Training from Python: arrays, datasets and networks of one's own, changes, resume, init, evaluation."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import driftgen as dg
from driftgen import model_io
from driftgen.data.images import digits
from driftgen.training.build import build_features, load_initial_weights
from driftgen.training.config import TrainConfig
from driftgen.training.recipes import load_recipe
from driftgen.training.run_changes import resolve

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_own_network.py"
FAST = {
    "optim": {"steps": 4, "warmup": 1},
    "batch": {"classes": 4, "generated": 4, "positives": 4, "unconditional": 2},
    "output": {"metrics_every": 1, "checkpoint_every": 2},
}
MLP = {"hidden_size": 16, "depth": 1, "condition_size": 8}


class Net(nn.Module):
    def __init__(self, classes=10, size=8):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(classes, 1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, noise, labels, alpha):
        return noise.gaussian * self.gain + self.embed(labels)[:, :, None, None]

    def sample_noise(self, n, generator=None):
        gaussian = torch.randn(n, 1, self.size, self.size, generator=generator)
        return dg.generators.Noise(gaussian, torch.zeros(n, 0, dtype=torch.long))


class Halves(nn.Module):
    def features(self, x, scale=1.0):
        return {"upper": scale * x[:, :, :4].flatten(1)[:, None], "lower": x[:, :, 4:].flatten(1)[:, None]}


class Quarters(nn.Module):
    def features(self, x):
        return {"quarter": x[:, :, :4, :4].flatten(1)[:, None]}


@pytest.fixture(autouse=True)
def _apart(monkeypatch, tmp_path):
    """A working directory of its own for each test."""
    monkeypatch.chdir(tmp_path)


def some_digits(n=60):
    images, labels = digits("train")
    return images[:n], labels[:n]


def refused(function, *arguments, **options):
    with pytest.raises(dg.InputError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_arrays_and_a_network_of_ones_own(tmp_path):
    network = Net()
    run = dg.train(
        "digits", data=some_digits(), generator=network, encoders=[(Halves(), {"scale": 2.0})], **FAST
    )
    assert run.folder == Path("runs/digits")
    assert run.complete
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert run.report.is_file()
    assert list((run.folder / "samples").glob("*.png"))
    config = run.config
    assert config.data.memory.count == 60
    assert config.data.memory.shape == (1, 8, 8)
    assert config.generator.options == {"class": "Net", "parameters": 11}
    assert config.encoders[0].name == "Halves"
    pipe = run.pipeline()
    assert pipe([0, 9], seed=0, output="tensor").shape == (2, 1, 8, 8)
    assert pipe.generator is not network
    # The class is registered under its name now; another process is told to do so.
    assert type(dg.load_model(run.folder)) is Net
    model_io._REGISTRY.pop("Net")
    assert "architecture='Net' is not registered" in refused(dg.load_model, run.folder)

    figures = run.evaluate(20)
    assert figures["samples"] == 20
    assert 0 <= figures["precision"] <= 1
    assert run.evaluate(20, space="features").keys() == figures.keys()
    record = json.loads((run.folder / "evaluation.json").read_text())
    assert record["evaluator"] == "precision and recall in features, k=3, against 20 training samples"
    assert "Evaluation" in run.report.read_text()
    later = dg.Run(run.folder)
    assert "data.kind=memory: pass the data" in refused(later.evaluate, 20)
    assert "encoders.0.kind=module: pass the encoder" in refused(
        dg.train, run.folder / "config.yaml", tmp_path / "x", data=some_digits(), generator=Net()
    )

    # A second run goes elsewhere; the first one resumes with the same data and the same class only.
    again = dg.train("digits", data=some_digits(), generator=Net(), **FAST)
    assert again.folder == Path("runs/digits-2")
    FASTER = {**FAST, "optim": {"steps": 6, "warmup": 1}}
    message = refused(dg.train, "digits", again.folder, data=some_digits(59), generator=Net(), **FAST)
    assert "data.memory.count: 60 -> 59; data.memory.checksum: " in message
    message = refused(dg.train, "digits", again.folder, data=some_digits(), generator=Net(11), **FAST)
    assert "generator.options.parameters: 11 -> 12" in message
    more = dg.train("digits", again.folder, data=some_digits(), generator=Net(), override=True, **FASTER)
    assert [row["step"] for row in more.metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_same_numbers_as_the_command(tmp_path, here):
    words = [f"{s}.{k}={v}" for s, values in FAST.items() for k, v in values.items()]
    words.append("generator.options={hidden_size: 16, depth: 1, condition_size: 8}")
    out = tmp_path / "a"
    done = here(
        "train", "digits", *(w for word in words for w in ("--set", word)), "--out", out, "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "report.html")
    config = load_recipe("digits")
    changes = {"generator.options": MLP, "optim.steps": np.int64(4)}
    changes |= {key: value for key, value in FAST.items() if key != "optim"}
    run = dg.train(config, tmp_path / "b", device="cpu", optim={"warmup": 1}, **changes)
    assert run.config == dg.Run(out).config
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in dg.Run(out).metrics]
    figures = run.evaluate(40)
    assert {"precision_heldout", "recall_training", "spread"} <= figures.keys()
    figures = run.evaluate(40, encoder="pixels")
    assert {"FD-pixels", "precision", "coverage"} <= figures.keys()
    record = json.loads((run.folder / "evaluation.json").read_text())
    assert record["figures"] == figures
    assert record["evaluator"] == {"encoder": "pixels"}


class Items(torch.utils.data.Dataset):
    classes = ("cat", "dog")

    def __init__(self, convert):
        self.convert = convert

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i >= 12:
            raise IndexError
        return self.convert(np.full((8, 8), 20 * i, np.uint8)), i % 2


def as_pil(pixels):
    from PIL import Image

    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    "convert",
    [
        as_pil,
        lambda pixels: pixels[None],
        lambda pixels: torch.from_numpy(pixels)[None].float() / 255,
        lambda pixels: torch.from_numpy(pixels)[None].float() / 127.5 - 1,
    ],
)
def test_datasets(convert):
    config, parts = resolve("train", "digits", {"data": Items(convert), "data.augment": {}})
    assert parts.data.class_names == ["cat", "dog"]
    assert parts.data.labels.tolist() == [0, 1] * 6
    images = parts.data.load(torch.tensor([0, 11]), 0)
    expected = torch.tensor([-1.0, 220 / 127.5 - 1])
    torch.testing.assert_close(images[:, 0, 3, 3], expected, atol=1e-5, rtol=0)
    assert (config.data.kind, config.data.memory.count) == ("memory", 12)


@pytest.mark.parametrize(
    ("images", "channels"),
    [
        (np.zeros((5, 8, 8), np.uint8), 1),
        (np.zeros((5, 8, 8, 3), np.uint8), 3),
        (torch.zeros(5, 3, 8, 8), 3),
        (torch.zeros(5, 1, 8, 8, dtype=torch.bfloat16), 1),
    ],
)
def test_arrays_of_every_layout(images, channels):
    config, parts = resolve("train", "cifar10", {"data": images, "encoders": [], "vanilla": True})
    assert parts.data.shape == (channels, 8, 8)
    assert parts.data.class_names == ["all"]
    assert config.data.channels == channels


def features_of(encoders):
    changes = {"data": some_digits(), "generator": {"options": MLP}, "encoders": encoders, **FAST}
    config, parts = resolve("train", "digits", changes)
    phi = build_features(config, (1, 8, 8), None, torch.device("cpu"), given=parts.encoders)
    return phi.features(torch.ones(1, 1, 8, 8)), config


def test_several_encoders_of_ones_own():
    """Features that would share a name carry the number of their encoder; others keep their names."""
    both = {"global", "encoder0/upper", "encoder0/lower", "encoder1/upper", "encoder1/lower"}
    encoder = Halves()
    for encoders in ([Halves(), Halves()], (Halves(), Halves()), [encoder, (encoder, {"scale": 2.0})]):
        features, config = features_of(encoders)
        assert features.keys() == both
        assert len(config.encoders) == 2
    assert torch.equal(features["encoder1/upper"], 2 * features["encoder0/upper"])
    for encoders in ((Halves(), {"scale": 3.0}), [(Halves(), {"scale": 3.0})]):  # an encoder and its switches
        features, config = features_of(encoders)
        assert features.keys() == {"global", "upper", "lower"}
        assert config.encoders[0].switches == {"scale": 3.0}
    assert features_of([Halves(), Quarters()])[0].keys() == {"global", "upper", "lower", "quarter"}


def test_a_path_as_data(tmp_path):
    images, labels = some_digits()
    np.savez(tmp_path / "d.npz", images=images.numpy(), labels=labels.numpy())
    config, parts = resolve("train", "digits", {"data": tmp_path / "d.npz"})
    assert (config.data.kind, config.data.path, parts.data) == ("images", str(tmp_path / "d.npz"), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"stps": 1}}, "optim.stps is not known: did you mean optim.steps?"),
        ({"optim.steps": 0}, "optim.steps: Input should be greater than or equal to 1, got 0"),
        ({"speed": 3}, "speed is not known"),
        ({"generator": "dit"}, "generator is a str: pass a torch.nn.Module"),
        ({"encoders": [nn.Linear(2, 2)]}, "encoders: Linear is not an encoder"),
        ({"encoders": np.zeros((2, 3))}, "encoders: ndarray is not an encoder"),
        ({"encoders": [torch.zeros(2, 3)]}, "encoders: Tensor is not an encoder"),
        ({"encoders": [(Halves(), 3)]}, "encoders: switches are a int: pass (module, dict)"),
        ({"encoders": (Halves(), 3)}, "encoders: int is not an encoder"),
        ({"generator": np.zeros((2, 3))}, "generator is a ndarray: pass a torch.nn.Module"),
        ({"init": np.zeros((2, 3))}, "init=ndarray of float64 must be"),
        ({"encoders": torch.zeros(2, device="meta")}, "encoders is on the meta device"),
        ({"optim.steps": torch.zeros(2, device="meta")}, "optim.steps="),
        ({"data": 3}, "data is a int: pass arrays (images, labels), a sized dataset, or a path"),
        (
            {"data": (np.zeros((4, 8, 8), np.uint8), np.zeros(3, int))},
            "data: labels have shape [3], expected [4]",
        ),
        ({"data": np.full((4, 8, 8), 7.0)}, "data: images hold 7 ... 7"),
        ({"data": np.zeros((0, 8, 8), np.uint8)}, "data holds no images"),
    ],
)
def test_wrong_arguments_are_one_line(changes, message):
    assert message in refused(dg.train, "digits", **changes)
    assert not Path("runs").exists()


def test_wrong_networks_are_one_line(tmp_path):
    data = some_digits()
    assert "Linear is not a generator: it needs forward" in refused(
        dg.train, "digits", data=data, generator=nn.Linear(2, 2)
    )
    message = refused(dg.train, "digits", data=data, generator=Net(size=4))
    assert "Net generates [1, 4, 4], the data has [1, 8, 8]" in message
    assert "it has an encoder, no generator" in refused(pretrained(tmp_path).evaluate)
    assert f"{tmp_path} holds no run" in refused(dg.Run, tmp_path)
    assert "pass it to driftgen.pretrain" in refused(dg.train, load_recipe("mae-digits"))


def pretrained(tmp_path):
    return dg.pretrain(
        "mae-digits",
        tmp_path / "mae",
        data=some_digits(),
        optim={"steps": 2, "warmup": 1},
        batch_size=4,
        mae={"options": {"base_channels": 33, "blocks": [1]}, "finetune_steps": 0},
    )


def test_a_pretrained_encoder_serves_the_next_run(tmp_path):
    encoder = pretrained(tmp_path)
    assert encoder.metrics[-1]["reconstruction"] > 0
    run = dg.train(
        "digits", "run", data=some_digits(), encoders=[encoder.folder], generator={"options": MLP}, **FAST
    )
    assert run.config.encoders[0].path == str(encoder.folder)


# --- initial weights ---------------------------------------------------------------------------------------


def small_run(out, n=60, options=MLP, **changes):
    return dg.train("digits", out, data=some_digits(n), generator={"options": options}, **FAST, **changes)


@pytest.mark.slow
def test_init_starts_from_weights_and_resume_wins(tmp_path, capsys):
    first = small_run("first")
    trained = first.pipeline().generator.state_dict()
    frozen = {"optim.lr": 1e-30, "optim.weight_decay": 0.0}
    second = small_run("second", init=first.folder, **frozen)
    assert "generator weights from first" in capsys.readouterr().err
    # Neither weights nor their average move away from the initial ones at this learning rate.
    for name, value in second.pipeline().generator.state_dict().items():
        torch.testing.assert_close(value, trained[name], atol=1e-4, rtol=0)
    header = json.loads((second.folder / "metrics.jsonl").read_text().splitlines()[0])["header"]
    assert header["init"] == "first"
    assert second.pipeline().source["init"] == "first"
    assert "- init: first" in (second.folder / "model" / "README.md").read_text()

    capsys.readouterr()
    small_run("second", init="nowhere", **frozen)
    printed = capsys.readouterr().err.replace("\n", " ")
    assert "second has a checkpoint: resuming it, init=nowhere is ignored" in printed
    assert dg.Run("second").config.init == "first"


@pytest.mark.slow
def test_init_with_other_classes_keeps_all_but_the_class_embedding(tmp_path, capsys):
    first = small_run("first")
    images, labels = some_digits()
    chosen = labels < 3
    frozen = {"optim.lr": 1e-30, "optim.weight_decay": 0.0}
    data = (images[chosen], labels[chosen])
    run = dg.train("digits", "b", data=data, generator={"options": MLP}, init="first", **FAST, **frozen)
    printed = capsys.readouterr().err.replace("\n", " ")
    assert "the class embedding is new for 3 of 3 classes" in printed
    old, new = (r.pipeline().generator.state_dict() for r in (first, run))
    embedding = "conditioning.classes.weight"
    assert (old[embedding].shape, new[embedding].shape) == ((10, 8), (3, 8))
    for name in old.keys() - {embedding}:
        torch.testing.assert_close(new[name], old[name], atol=1e-4, rtol=0)


def with_classes(*names, seed=0):
    """Return a small network for these classes."""
    torch.manual_seed(seed)
    return dg.generators.ImageMLP(num_classes=len(names), **MLP)


def test_init_keeps_classes_by_name_and_draws_the_others_like_them():
    first = with_classes(*"abcdefgh")
    table = first.conditioning.classes.weight.data
    table.mul_(50).add_(torch.arange(8.0))  # trained tables are wide, and not around 0
    dg.DriftPipeline(first, class_names=list("abcdefgh")).save_pretrained("model")
    names = ["x", "c", *(f"new {i}" for i in range(200)), "a"]
    second = with_classes(*names, seed=1)
    line = load_initial_weights(second, "model", names)
    assert line == "generator weights from model; the class embedding is new for 201 of 203 classes"
    new = second.conditioning.classes.weight.data
    torch.testing.assert_close(new[[1, -1]], table[[2, 0]])
    drawn = new[2:-1]
    assert ((drawn.mean(0) - table.mean(0)).abs() < 0.3 * table.std(0)).all()
    ratio = drawn.std(0) / table.std(0, correction=0)
    assert ratio.min() > 0.7
    assert ratio.max() < 1.4
    assert len(torch.unique(new, dim=0)) == 203


def test_init_from_one_class_makes_different_classes():
    first = with_classes("a")
    dg.DriftPipeline(first, class_names=["a"]).save_pretrained("model")
    second = with_classes("x", "y", seed=1)
    load_initial_weights(second, "model", ["x", "y"])
    x, y = second.conditioning.classes.weight.data
    assert (x - y).norm() > 0
    torch.testing.assert_close((x + y) / 2, first.conditioning.classes.weight.data[0], atol=0.1, rtol=0)


def test_init_that_does_not_fit_is_one_line():
    small_run("first")
    wide = {**MLP, "hidden_size": 32}
    message = refused(small_run, "b", options=wide, init="first")
    assert "init=first: modulation.weight has shape [32, 8], the generator of this run has [64, 8]" in message
    deep = {**MLP, "depth": 2}
    assert "init=first: only the generator of this run has layers.1.weight" in refused(
        small_run, "b", options=deep, init="first"
    )
    assert "holds a ImageMLP, the run trains a Net" in refused(
        dg.train, "digits", "b", data=some_digits(), generator=Net(), init="first", **FAST
    )
    assert "nowhere does not exist" in refused(small_run, "b", init="nowhere")
    assert not Path("b").exists()


def test_init_from_the_command(here):
    small_run("first")
    words = [f"{s}.{k}={v}" for s, values in FAST.items() for k, v in values.items()]
    words += ["generator.options={hidden_size: 16, depth: 1, condition_size: 8}"]
    done = here(
        "train", "digits", *(w for word in words for w in ("--set", word)), "--init", "first", "--out", "c"
    )
    assert done.returncode == 0, done.stderr
    assert "generator weights from first" in done.stderr
    config = dg.Run("c").config
    assert isinstance(config, TrainConfig)
    assert config.init == "first"


def test_the_example_trains_in_seconds(monkeypatch, capsys):
    """The script as it is, with fewer steps."""
    train = dg.train
    monkeypatch.setattr(dg, "train", lambda *a, **o: train(*a, **{**o, "optim": {"steps": 3, "warmup": 1}}))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "runs/digits/report.html" in capsys.readouterr().out
    assert Path("runs/digits/three.png").is_file()
