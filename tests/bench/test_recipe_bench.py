"""``driftgen bench pretrain``, ``bench step --recipe`` and ``bench step --without``."""

import json

import pytest
import torch

from driftgen.bench import recipe_bench, switches
from driftgen.bench.clock import Timing
from driftgen.bench.recipe_bench import RecipeCase, RecipeStep
from driftgen.bench.step_bench import Sizes, measure_steps
from driftgen.features import ResNetMAE, resnet_layers
from driftgen.model_io import save_model
from driftgen.ops import attention, dispatch
from driftgen.training.recipes import load_recipe
from tests.support.bench_records import CPU, fits

TINY_TRAIN = ["batch.generated=2", "batch.positives=2", "batch.unconditional=1"]
TINY_TRAIN += ["generator.options={hidden_size: 16, depth: 1, condition_size: 8}"]
TINY_MAE = ["batch_size=4", "mae.options={base_channels: 8, blocks: [1, 1]}"]


def options(changes):
    return [word for change in changes for word in ("--set", change)]


def test_step_of_a_recipe(here, tmp_path):
    words = [*options(TINY_TRAIN), "--repeats", 2, "--device", "cpu", "--without", "loss"]
    done = here("bench", "step", "--recipe", "digits", *words, "--json", tmp_path / "step.json")
    assert done.returncode == 0, done.stderr
    assert "digits x 20" in fits(done.stdout)
    record = json.loads((tmp_path / "step.json").read_text())
    assert record["arguments"]["recipe"] == "digits"
    assert [row["detail"] for row in record["rows"]] == ["eager", "without loss"]
    for row in record["rows"]:
        assert row["steps_per_second"] == 1 / row["seconds"]
        assert row["samples_per_second"] == pytest.approx(20 * row["steps_per_second"])
        assert row["references"].keys() == {"eager"}
        assert row["floor"]["operations"] > 0
        assert row["peak_bytes"] > 0
        assert row["changes"] == TINY_TRAIN
        assert row["cuda_graph"] is False
        assert len(row["losses"]) == 2


@pytest.mark.slow
def test_pretraining(here, tmp_path):
    words = [*options(TINY_MAE), "--repeats", 1, "--device", "cpu", "--profile"]
    done = here("bench", "pretrain", *words, "--json", tmp_path / "pretrain.json")
    assert done.returncode == 0, done.stderr
    assert "mae-digits x 4" in fits(done.stdout)
    (row,) = json.loads((tmp_path / "pretrain.json").read_text())["rows"]
    assert row["samples_per_second"] == pytest.approx(4 / row["seconds"])
    assert row["references"].keys() == {"eager"}
    assert {cost["phase"] for cost in row["profile"]} == {"network", "optimizer", "data"}


def test_operations_of_encoders_in_turn(tmp_path):
    """The mean of those of each encoder alone."""
    for name, blocks in (("small", [1, 1]), ("large", [2, 2])):
        save_model(ResNetMAE(in_channels=1, base_channels=40, blocks=blocks), tmp_path / name)

    def operations(*paths, each=1):
        entries = ", ".join(f"{{path: {tmp_path / path}}}" for path in paths)
        changes = (*TINY_TRAIN, f"encoders=[{entries}]", f"encoders_per_step={each}")
        step = RecipeStep(RecipeCase("digits", "train", changes).load(tmp_path), CPU)
        step.close()
        return step.operations()

    small, large = operations("small"), operations("large")
    assert large > 1.1 * small
    assert operations("small", "large") == pytest.approx((small + large) / 2)


def test_operations_of_pretraining(tmp_path):
    """Three forward passes, against the operations of a real step."""
    step = RecipeStep(RecipeCase("mae-digits", "pretrain", tuple(TINY_MAE)).load(tmp_path), CPU)
    counted = recipe_bench.count_operations(torch.enable_grad()(step.run))
    step.close()
    assert step.operations() == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("recipe", [pytest.param("cifar10", marks=pytest.mark.slow), "mnist"])
def test_random_images_and_encoders(recipe, tmp_path):
    """Sizes and encoders are those of the recipe and of its pretraining recipe."""
    config = RecipeCase(recipe, "train", ("compile=false",)).load(tmp_path)
    assert config.data.path == str(tmp_path / "images.npz")
    for i, encoder in enumerate(config.encoders):
        assert encoder.path == str(tmp_path / f"encoder-{i}")
        assert (tmp_path / f"encoder-{i}" / "config.json").exists()
    assert len(config.encoders) == len(load_recipe(recipe).encoders) > 0
    assert config.compile is False
    own = RecipeCase("digits", "train", ("seed=3",)).load(tmp_path)
    assert (own.data.kind, own.data.path, own.seed) == ("digits", None, 3)


def test_references_of_pretraining_on_a_gpu(monkeypatch):
    """The eager step runs without kernels; the other reference upsamples contiguous maps."""
    seen = []

    def fake(case, device, repeats):
        upsample = case.contiguous_upsampling and "contiguous"
        seen.append((case.changes, case.without, upsample, bool(dispatch.DEVICES)))
        figures = {"samples_per_step": 8, "precision": "float32", "compile": True, "cuda_graph": False}
        return Timing(0.5, 0.5, 1.0, 8, 0.25), figures | {"held_bytes": 100}

    monkeypatch.setattr(recipe_bench, "_time_case", fake)
    monkeypatch.setattr(recipe_bench, "_count_operations", lambda case, device: 1e9)
    monkeypatch.setattr(recipe_bench, "card_of", lambda device: None)
    gpu = torch.device("cuda")
    (row,) = recipe_bench.measure_recipe([RecipeCase("mae-cifar10", "pretrain", ("seed=1",))], gpu, 5)
    assert seen == [
        (("seed=1", "compile=false", "cuda_graph=false"), None, False, False),
        (("seed=1",), None, "contiguous", True),
        (("seed=1",), None, False, True),
    ]
    record = row.as_record()
    assert record["references"].keys() == {"eager", "contiguous"}
    assert (record["steps_per_second"], record["samples_per_second"]) == (4, 32)
    assert record["peak_bytes"] == 108
    assert row.detail == "compiled"


def test_an_op_is_switched_off_everywhere(monkeypatch):
    names = switches.op_names()
    assert {"attention", "group_norm", "loss"} <= set(names)

    def always(*_):
        return True

    always.__module__ = attention.__name__  # op_names lists functions that the module defines
    monkeypatch.setattr(attention, "supports_attention", always)
    with switches.without_op("attention"):
        assert attention.supports_attention(None, 1) is False
    assert attention.supports_attention(None, 1) is True
    with switches.without_op(None):
        assert attention.supports_attention(None, 1) is True


def test_step_without_an_op(monkeypatch):
    from driftgen.bench import step_bench

    seen = []

    def fake(sizes, device, repeats):
        seen.append(sizes.without)
        return Timing(1.0, 1.0, 1.0, 8), 0

    monkeypatch.setattr(step_bench, "_time_step", fake)
    monkeypatch.setattr(dispatch, "DEVICES", {"cpu"})
    sizes = Sizes(2, 2, 2, 1, preset="S/2-32px", depth=1, base=8, without="adaln", dtype=torch.float32)
    (row,) = measure_steps([sizes], CPU, 1)
    assert seen == [None, "adaln"]
    assert row.detail == "without adaln"


def test_contiguous_upsampling_is_put_back():
    usual = resnet_layers.upsample
    with recipe_bench._switched(RecipeCase("", "pretrain", contiguous_upsampling=True)):
        assert resnet_layers.upsample is not usual
        x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        assert resnet_layers.upsample(x, (8, 8)).is_contiguous()
    assert resnet_layers.upsample is usual


@pytest.mark.cuda
def test_recipes_on_a_gpu(here, tmp_path):
    changes = options(["batch.generated=4", "batch.positives=4", "batch.unconditional=2", "batch.classes=2"])
    words = ["--recipe", "cifar10", *changes, *options(["compile=false"]), "--repeats", 2, "--profile"]
    assert here("bench", "step", *words, "--json", tmp_path / "step.json").returncode == 0
    (row,) = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert row["detail"] == "CUDA graph"
    assert row["notes"] == []
    assert {"generator", "encoder", "loss"} <= {cost["phase"] for cost in row["profile"]}
    words = ["--recipe", "mae-cifar10", *options([*TINY_MAE, "compile=false"]), "--repeats", 2]
    assert here("bench", "pretrain", *words, "--json", tmp_path / "mae.json").returncode == 0
    (row,) = json.loads((tmp_path / "mae.json").read_text())["rows"]
    assert row["references"].keys() == {"eager", "contiguous"}
