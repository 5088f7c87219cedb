"""Sheets of a run: real images in the rows of the samples, nearest training images."""

import numpy as np
import pytest
import torch

from driftgen.data.arrays import from_arrays
from driftgen.data.config import Augment, Data
from driftgen.data.images import open_images
from driftgen.pipeline import DriftPipeline
from driftgen.support.distributed import Distributed
from driftgen.support.images import to_uint8
from driftgen.support.sheets import read_sheet
from driftgen.training import pretrain, trainer
from driftgen.training.previews import preview_labels, save_nearest, save_real, save_samples
from driftgen.training.recipes import load_recipe
from tests.support.runs import config


@pytest.fixture
def task():
    return trainer.Training(config("optim.steps=1"), Distributed.start("cpu"))


def as_array(sheet):
    return np.stack([np.asarray(image) for image in sheet.images])


def test_rows_are_classes_and_carry_their_names(task, tmp_path):
    pipe = task.pipeline(task.generator)
    samples = save_samples(pipe, 10, tmp_path / "step.png", seed=3)
    sheet = read_sheet(tmp_path / "step.png")
    assert tuple(sheet.row_names) == tuple("0123456789")
    labels = [label for label in range(10) for _ in range(10)]
    expected = pipe(labels, seed=3, output="tensor")
    assert torch.equal(samples, expected)
    assert np.array_equal(as_array(sheet), to_uint8(expected)[..., 0])


def test_real_images_are_those_of_the_class_without_augmentation(task, tmp_path):
    assert task.data.augment != Augment()
    before = torch.get_rng_state()
    save_real(task.data, task.pipeline(task.generator), tmp_path / "real.png")
    assert torch.equal(torch.get_rng_state(), before)
    sheet = read_sheet(tmp_path / "real.png")
    assert tuple(sheet.row_names) == tuple("0123456789")
    exact = open_images(task.config.data.model_copy(update={"augment": Augment()}))
    shown = as_array(sheet).reshape(10, 10, 8, 8)
    for label in range(10):
        members = (exact.labels == label).nonzero()[:10, 0]
        assert np.array_equal(shown[label], to_uint8(exact.load(members, 0))[..., 0])
    assert task.data.augment != Augment()  # the data of the run keep their own


def test_small_classes_repeat_and_larger_images_are_cropped(task, tmp_path):
    images = np.zeros((3, 12, 20, 3), np.uint8)
    images[:, :, 8:12] = 200  # survives the crop of the center
    random = Augment(crop="random-resized")
    data = from_arrays(images, np.array([0, 0, 1]), Data(kind="memory", size=6, augment=random))
    save_real(data, task.pipeline(task.generator), tmp_path / "real.png")
    sheet = read_sheet(tmp_path / "real.png")
    assert (len(sheet.images), sheet.images[0].size) == (20, (6, 6))
    assert np.asarray(sheet.images[0])[:, 2:4].min() > 150
    assert np.asarray(sheet.images[19])[:, 0].max() < 50


def test_nearest_training_images_are_those_of_a_full_search(task, tmp_path):
    pipe = task.pipeline(task.generator)
    samples = save_samples(pipe, 10, tmp_path / "step.png", seed=3)
    save_nearest(samples, 10, task.data, tmp_path / "nearest.png")
    sheet = read_sheet(tmp_path / "nearest.png")
    assert (sheet.columns, sheet.rows, sheet.column_names[:2]) == (6, 8, ("sample", "nearest"))
    exact = open_images(task.config.data.model_copy(update={"augment": Augment()}))
    training = exact.load(torch.arange(len(exact.labels)), 0)
    rows = torch.from_numpy(np.rint((training.double().numpy() + 1) * 127.5)).flatten(1)
    cells = as_array(sheet).reshape(8, 6, 8, 8)
    for row, cell in enumerate(cells):
        query = torch.from_numpy(to_uint8(samples[10 * row, None])).double().flatten()
        cosine = rows @ query / rows.norm(dim=1) / query.norm()
        best = cosine.argsort(descending=True)[:5]
        assert np.array_equal(cell[0].ravel(), query.numpy())
        assert np.array_equal(cell[1:].reshape(5, 64), rows[best].numpy())
        names = [str(int(exact.labels[i])) for i in best]
        expected = [f"{cosine[i]:.3f} ({n})" for i, n in zip(best, names, strict=True)]
        assert list(sheet.captions[6 * row + 1 : 6 * row + 6]) == expected
        assert sheet.captions[6 * row] == str(row)


def test_a_single_class_fills_the_sheet(tmp_path):
    assert preview_labels(1) == [0] * 100
    assert preview_labels(1000) == [label for label in range(10) for _ in range(10)]
    data = from_arrays(np.full((4, 8, 8), 9, np.uint8), None, Data(kind="memory", channels=1))
    network = trainer.build_generator(config().generator, (1, 8, 8), 1)
    save_real(data, DriftPipeline(network), tmp_path / "real.png")
    sheet = read_sheet(tmp_path / "real.png")
    assert (len(sheet.images), sheet.row_names) == (100, ())


def test_the_rows_of_pretraining_have_names(tmp_path):
    recipe = load_recipe("mae-digits", ["batch_size=8", "optim.steps=1"], "pretrain")
    task = pretrain.Pretraining(recipe, Distributed.start("cpu"))
    path = task.save_preview(task.mae.eval(), tmp_path / "step")
    sheet = read_sheet(path)
    assert (tuple(sheet.row_names), sheet.columns) == (("original", "masked", "reconstructed"), 10)
