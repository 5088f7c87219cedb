"""One command from a folder of images to a generator."""

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import driftgen as dg
from driftgen.errors import InputError
from driftgen.training import recipe_sizes
from driftgen.training.own_images import _measure, name_recipe, notes, plan
from driftgen.training.pretrain import Pretraining
from driftgen.training.recipes import load_recipe, to_yaml
from tests.support.image_data import noise, write_tar

TINY = """
tiny:
  time: two seconds on one core (measured)
  expect: nothing
  folder:
    data: {size: 8, workers: 0, augment: {flip: true}}
    generator: {kind: mlp, options: {hidden_size: 8, depth: 1, condition_size: 8}}
    batch: {classes: 2, generated: 2, positives: 2, unconditional: 1}
    optim.steps: 2
    output.checkpoint_every: 1
  mae-folder:
    data: {size: 8, workers: 0}
    mae: {options: {base_channels: 40, blocks: [1]}, finetune_steps: 1}
    batch_size: 2
    optim.steps: 3
    output.checkpoint_every: 1
few_images:
  below: 5
  folder: {data.augment.shift: 1.0}
"""


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Make two classes of three photos in the current folder, and a tiny size."""
    monkeypatch.chdir(tmp_path)
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text(TINY)
    monkeypatch.setattr(recipe_sizes, "FILE", sizes)
    recipe_sizes._read.cache_clear()
    for name in ("cat", "dog"):
        Path("photos", name).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(noise(9, 9, 3)).save(Path("photos", name, f"{i}.png"))
    yield Path("photos")
    recipe_sizes._read.cache_clear()


@pytest.mark.parametrize("argument", ["photos", "photos/", "./photos", Path("photos")])
def test_a_folder_is_the_recipe_folder(photos, argument):
    recipe, overrides, run = name_recipe(argument)
    assert (recipe, run) == ("folder", "photos")
    assert load_recipe(recipe, overrides).data.path == str(Path(argument))
    assert name_recipe(argument, "pretrain")[::2] == ("mae-folder", "mae-photos")


def test_an_array_is_the_recipe_folder(photos):
    np.savez("mine.npz", images=noise(2, 8, 8, 3))
    assert name_recipe("mine.npz") == ("folder", ('data.path="mine.npz"',), "mine")


@pytest.mark.parametrize("argument", ["2024/", "[old] #1", "a: b", "null/", "*star"])
def test_any_name_of_a_folder_reaches_the_recipe(photos, argument):
    photos.rename(argument)
    recipe, overrides, run = name_recipe(argument)
    assert run == Path(argument).name
    assert load_recipe(recipe, overrides).data.path == str(Path(argument))
    assert plan("train", recipe, overrides, device="cpu").chosen["augmentation"].startswith("3 images")


@pytest.mark.parametrize(
    ("pattern", "run"),
    [
        ("shards/cats-{000..001}.tar", "cats"),
        ("shards/cats-*.tar", "cats"),
        ("shards/cats-00[01].tar", "cats"),
        ("shards/*.tar", "shards"),
        ("shards/c*", "c"),
        ("shards/cats-000.tar", "cats-000"),
    ],
)
def test_a_pattern_of_tar_shards_is_the_recipe_folder(photos, pattern, run):
    Path("shards").mkdir()
    image = Path("photos/cat/0.png").read_bytes()
    for shard in range(2):
        members = [
            (f"{j}.{end}", data) for j in range(4) for end, data in (("png", image), ("cls", b"%d" % (j % 2)))
        ]
        write_tar(Path(f"shards/cats-{shard:03d}.tar"), members)
    recipe, overrides, name = name_recipe(pattern)
    assert (recipe, name) == ("folder", run)
    config = plan("train", recipe, overrides, device="cpu")
    assert config.data.path == pattern
    assert config.chosen["augmentation"].startswith("2 images" if run == "cats-000" else "4 images")
    assert name_recipe(pattern, "pretrain")[::2] == ("mae-folder", f"mae-{run}")


@pytest.mark.parametrize("pattern", ["cats-{000..001}.tar", "none/*.tar"])
def test_a_pattern_without_files_is_named(photos, pattern):
    recipe, overrides, _ = name_recipe(pattern)
    with pytest.raises(InputError, match=r"^data\.path=\S+: .*(missing|no file matches)"):
        plan("train", recipe, overrides, device="cpu")


def test_a_folder_that_does_not_exist_is_named(photos):
    with pytest.raises(InputError, match=r"^photoz/ does not exist: give a folder of images"):
        name_recipe("photoz/")


def test_options_are_those_of_the_size(photos, here):
    done = here("train", "photos", "--options", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "8 (set here; otherwise 256)" in " ".join(done.stdout.split())


def test_a_packaged_name_is_a_recipe_unless_it_is_written_as_a_path(photos):
    Path("digits").mkdir()
    assert name_recipe("digits")[0] == "digits"
    assert name_recipe("digits/")[0] == "folder"
    assert name_recipe("mine.yaml")[0] == "mine.yaml"
    with pytest.raises(InputError, match="photo is neither in this folder nor a recipe: "):
        name_recipe("photo")
    with pytest.raises(InputError, match="recipe 'digit' is not known: did you mean digits"):
        plan("train", name_recipe("digit").recipe)


def test_few_images_are_augmented_and_said(photos):
    config = plan("train", "folder", ["data.path=photos"], device="cpu")
    assert (config.data.augment.flip, config.data.augment.shift) == (True, 1.0)
    assert "3 images in the smallest class" in config.chosen["augmentation"]
    assert any("driftgen neighbors runs/x" in line for line in notes(config, Path("runs/x")))
    own = plan("train", "folder", ["data.path=photos", "data.augment.shift=0.5"], device="cpu")
    assert own.data.augment.shift == 0.5
    assert "augmentation" not in own.chosen


@pytest.fixture
def shipped(photos):
    """Save a small UNet for 16 pixels and 10 classes."""
    net = dg.generators.UNet2D(
        input_size=16, widths=(16, 32), blocks=(1, 1), attention_levels=(), condition_size=8, num_classes=10
    )
    dg.DriftPipeline(net).save_pretrained("shipped")
    return Path("shipped")


def test_init_brings_its_generator_and_its_image_size(shipped):
    config = plan("train", "folder", ["data.path=photos", "init=shipped"], size="tiny", device="cpu")
    assert (config.generator.kind, config.data.size) == ("unet", 16)
    assert config.generator.options["widths"] == [16, 32]
    said = "".join(notes(config, Path("runs/x")))
    assert "as in shipped" in said
    assert "16 pixels. What to expect depends on shipped." in said
    own = ["data.path=photos", "init=shipped", "generator.options.depth=2", "data.size=8"]
    assert plan("train", "folder", own, size="tiny", device="cpu").generator.kind == "mlp"


@pytest.fixture
def starts(shipped):
    """Make the size start from the model ``shipped``."""
    values = "  start: shipped\n  init:\n    time: an hour\n    expect: shapes\n"
    values += "    folder: {batch.generated: 3, optim.lr: 0.5}\n"
    recipe_sizes.FILE.write_text(TINY.replace("tiny:\n", "tiny:\n" + values, 1))
    recipe_sizes._read.cache_clear()


def test_runs_that_start_from_a_model_have_values_of_their_own(starts):
    config = plan("train", "folder", ["data.path=photos"], size="tiny", device="cpu")
    assert (config.batch.generated, config.optim.lr, config.optim.steps) == (3, 0.5, 2)
    assert "16 pixels, an hour. shapes" in "".join(notes(config, Path("runs/x")))
    config = plan("train", "folder", ["data.path=photos", "optim.lr=0.25"], size="tiny", device="cpu")
    assert (config.batch.generated, config.optim.lr) == (3, 0.25)
    assert "16 pixels. shapes" in "".join(notes(config, Path("runs/x")))
    Path("shipped").rename("other")
    config = plan("train", "folder", ["data.path=photos", "init=other"], size="tiny", device="cpu")
    assert (config.batch.generated, config.optim.lr) == (3, 0.5)
    assert "16 pixels. What to expect depends on other." in "".join(notes(config, Path("runs/x")))
    for own in ("init=null", "generator.options.depth=2"):
        config = plan("train", "folder", ["data.path=photos", own], size="tiny", device="cpu")
        assert config.batch.generated == 2
        assert "nothing" in "".join(notes(config, Path("runs/x")))


def test_a_size_may_start_from_a_model(starts):
    config = plan("train", "folder", ["data.path=photos"], size="tiny", device="cpu")
    assert (config.init, config.generator.kind, config.data.size) == ("shipped", "unet", 16)
    said = "".join(notes(config, Path("runs/x")))
    assert "as in shipped, whose weights the run starts from; for random weights" in said
    assert plan("pretrain", "mae-folder", ["data.path=photos"], size="tiny", device="cpu").data.size == 8


@pytest.mark.parametrize(
    "own",
    [
        "init=null",
        "generator.options.depth=2",
        "data.size=12",
        "data.channels=1",
        "data.kind=digits",
        "data.path=null",
    ],
)
def test_own_networks_and_shapes_start_from_random_weights(starts, own):
    config = plan("train", "folder", ["data.path=photos", own], size="tiny", device="cpu")
    assert (config.init, config.generator.kind) == (None, "mlp")


@pytest.mark.parametrize(("recorded", "kind"), [(None, "mlp"), ("shipped", "unet")])
def test_a_run_that_resumes_keeps_the_model_that_it_started_from(starts, recorded, kind):
    started = ["data.path=photos", "init=null" if recorded is None else f"init={recorded}"]
    config = plan("train", "folder", started, size="tiny", device="cpu")
    folder = Path("runs/photos")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    recipe_sizes.FILE.write_text(TINY if recorded else recipe_sizes.FILE.read_text())
    recipe_sizes._read.cache_clear()
    config = plan("train", "folder", ["data.path=photos"], folder=folder, device="cpu")
    assert (config.init, config.generator.kind) == (recorded, kind)
    assert "init=null" not in "".join(notes(config, folder))  # too late to choose


def test_a_model_of_the_package_is_named(photos):
    config = plan("train", "folder", ["data.path=photos", "init=digits"], size="tiny", device="cpu")
    assert (config.generator.kind, config.data.size, config.data.channels) == ("mlp", 8, 1)
    assert config.generator.options["hidden_size"] == 256


@pytest.mark.slow
def test_a_size_starts_from_a_model_with_one_line(shipped):
    text = recipe_sizes.FILE.read_text()
    recipe_sizes.FILE.write_text(text.replace("  folder:\n", "  folder:\n    init: shipped\n", 1))
    recipe_sizes._read.cache_clear()
    run = dg.train("photos", "runs/a", device="cpu", pretrain=True)
    assert run.complete
    assert run.config.init == "shipped"
    assert run.pipeline().generator.config.widths == (16, 32)
    assert dg.Run("runs/mae-a").config.data.size == 16
    shutil.rmtree("shipped")  # a run that resumes needs its checkpoint only
    assert dg.train("photos", "runs/a", device="cpu").complete
    assert dg.train("photos", "runs/b", init="digits", device="cpu", pretrain=True).complete


def test_the_time_of_a_size_is_that_of_the_size_as_it_is(photos):
    for change, told in (("data.augment.flip=false", True), ("optim.steps=5", False), ("encoders=[]", False)):
        config = plan("train", "folder", ["data.path=photos", change], size="tiny", device="cpu")
        assert ("two seconds" in "".join(notes(config, Path("runs/x")))) == told


def test_sizes_belong_to_two_recipes(photos):
    assert plan("train", "digits").chosen == {}
    with pytest.raises(InputError, match="digits has one size"):
        plan("train", "digits", size="tiny")
    with pytest.raises(InputError, match="size=big"):
        plan("train", "folder", size="big")


@pytest.mark.slow
def test_a_size_is_measured_on_both_recipes(photos):
    """Two steps of each; the estimate of 3 and 2 steps takes the first, slow one into account."""
    seconds = _measure("tiny", ["data.path=photos"], torch.device("cpu"), None)
    assert 0 < seconds < 60
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_dry_run_measures_encoder_and_generator(photos, here):
    left = here("train", "photos", "--dry-run", "--device", "cpu")
    assert left.returncode == 0, left.stderr
    assert left.stdout.count("nothing was written") == 2
    assert "runs/mae-photos" in left.stdout
    titles = re.findall(r"^(part \d of 2 +\w+|both parts) ", left.stdout.replace("\n", " \n"), re.MULTILINE)
    assert [" ".join(title.split()) for title in titles] == [
        "part 1 of 2 encoder",
        "part 2 of 2 generator",
        "both parts",
    ]
    said = " ".join(left.stderr.split())
    assert said.startswith("reading photos ... part 1 of 2: an encoder, in runs/mae-photos; part 2 is")
    assert said.count("size tiny (no GPU") == 1
    assert "8 pixels, two seconds on one core (measured). nothing" in said
    assert "encoder runs/mae-photos: pretrained first, because there was no encoder for photos" in said
    assert "parameters, not trained yet" in said
    assert "3 images in the smallest class" in said
    assert not Path("runs").exists()


def test_without_permission_the_message_is_a_command(photos):
    with pytest.raises(InputError) as error:
        dg.train("photos", "runs/photos", device="cpu")
    assert str(error.value) == (
        "no encoder for photos yet: add --yes to pretrain one first (in Python: pretrain=True), or type "
        "driftgen pretrain mae-folder --set data.path=photos --size tiny --out runs/mae-photos"
    )
    assert not Path("runs").exists()


@pytest.mark.slow
def test_one_call_trains_encoder_and_generator(photos, capsys):
    asked = []
    run = dg.train("photos", device="cpu", pretrain=lambda question: asked.append(question) or True)
    said = capsys.readouterr().err
    assert said.count("size tiny (no GPU") == 1  # not again for the second part
    assert said.index("size tiny") < said.index("encoder runs/mae-photos: pretrained")
    assert asked == [
        "Pretrain an encoder for photos first, in runs/mae-photos? Encoder and generator take two seconds on "
        "one core (measured)."
    ]
    assert run.complete
    assert run.folder == Path("runs/photos")
    assert dg.Run("runs/mae-photos").metrics[-1]["step"] == 3
    config = run.config
    assert [e.path for e in config.encoders] == ["runs/mae-photos"]
    assert config.chosen["size"] == "tiny"
    assert "pretrained for this run" in config.chosen["encoder"]
    assert dg.Run("runs/mae-photos").config.mae.finetune_steps == 1
    # The same call resumes, without an answer.
    assert dg.train("photos", "runs/photos", device="cpu", pretrain=lambda question: False).complete
    # Another run on the same photos finds the encoder.
    capsys.readouterr()
    second = dg.train("photos", "runs/second", device="cpu")
    assert capsys.readouterr().err.count("size tiny (no GPU") == 1
    assert "runs/mae-photos: trained on photos before, 3 steps, accuracy" in second.config.chosen["encoder"]


def test_arrays_from_python_work_alone(photos):
    images, labels = noise(6, 8, 8, 3), np.array([0, 1] * 3)
    with pytest.raises(InputError, match="no encoder for this data"):
        dg.train("folder", "runs/a", data=(images, labels), device="cpu")
    run = dg.train("folder", "runs/a", data=(images, labels), device="cpu", pretrain=True)
    assert run.complete
    assert run.config.data.augment.shift == 1.0
    assert dg.Run("runs/mae-a").config.data.memory == run.config.data.memory


def test_photos_of_one_class_need_no_classifier(photos):
    run = dg.train("photos/cat", device="cpu", pretrain=True)
    assert run.complete
    assert dg.Run("runs/mae-cat").config.mae.finetune_steps == 0


@pytest.mark.slow
def test_an_interrupted_pretraining_resumes_with_the_same_command(photos, here, monkeypatch):
    gradient = Pretraining.compute_gradient

    def interrupted(self, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return gradient(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "compute_gradient", interrupted)
        assert here("train", "photos", "--yes", "--device", "cpu").returncode == 130
    assert not Path("runs/photos").exists()
    again = here("train", "photos", "--device", "cpu")  # no --yes: it was given before
    assert again.returncode == 0, again.stderr
    assert "resumed after step 2" in again.stderr
    assert again.stdout.strip() == "runs/photos/report.html"
    assert "size tiny (no GPU" in again.stderr
    assert "encoder runs/mae-photos: pretrained for this run" in again.stderr


def test_command_without_terminal_and_permission_exits_with_2(photos, here):
    left = here("train", "folder", "--set", "data.path=photos", "--device", "cpu")
    assert left.returncode == 2
    assert "--yes" in left.stderr
    assert "driftgen pretrain mae-folder --set data.path=photos --size tiny" in left.stderr.replace("\n", " ")
