"""Map-style datasets passed from Python: kinds of items, sizes, labels."""

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data.decode import center_crop
from driftgen.data.in_memory import open_memory
from driftgen.training.config import Augment, Data
from tests.support.helpers import fails
from tests.support.image_data import every, noise, to_bytes

PIXELS = [noise(8, 8, 3) for _ in range(6)]
LABELS = [0, 1, 0, 1, 0, 1]


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pictures(pixels=PIXELS):
    return [Image.fromarray(p) for p in pixels]


def load(items, default_size=None, **options):
    return open_memory(Items(items), Data(**options), default_size)[0]


@pytest.mark.parametrize(
    "convert",
    [
        Image.fromarray,
        lambda p: p.transpose(2, 0, 1),
        lambda p: torch.from_numpy(p).permute(2, 0, 1).float() / 255,
        lambda p: torch.from_numpy(p).permute(2, 0, 1).double() / 127.5 - 1,
    ],
)
@pytest.mark.parametrize(
    "item",
    [
        lambda image, label: (image, label),
        lambda image, label: [image, torch.tensor(label), "more"],
        lambda image, label: {"image": image, "label": label, "text": "a caption"},
        lambda image, label: {"img": image, "labels": np.int32(label)},
        lambda image, label: {"pixel_values": image, "target": np.asarray([label])},
        lambda image, label: (image, ["cat", "dog"][label]),
    ],
)
def test_kinds_of_items(convert, item):
    data = load([item(convert(p), label) for p, label in zip(PIXELS, LABELS, strict=True)])
    assert data.labels.tolist() == LABELS
    assert data.class_names in (["0", "1"], ["cat", "dog"])
    expected = torch.from_numpy(np.stack(PIXELS)).permute(0, 3, 1, 2)
    assert torch.equal(to_bytes(every(data)), expected)


@pytest.mark.parametrize(
    "wrap", [lambda image: image, lambda image: (image,), lambda image: {"image": image}]
)
def test_without_labels_there_is_one_class(wrap):
    data = load([wrap(image) for image in pictures()])
    assert (data.class_names, data.labels.tolist()) == (["all"], [0] * 6)


def test_subsets_and_concatenations():
    whole = Items(list(zip(pictures(), LABELS, strict=True)))
    part = torch.utils.data.Subset(whole, [5, 0, 2])
    both = torch.utils.data.ConcatDataset([part, whole])
    assert open_memory(part, Data())[0].labels.tolist() == [1, 0, 0]
    assert open_memory(both, Data())[0].labels.tolist() == [1, 0, 0, *LABELS]


def test_images_of_different_sizes_are_cropped():
    sizes = [(20, 30), (40, 21), (25, 25)]
    items = [(Image.fromarray(noise(*size, 3)), 0) for size in sizes]
    expected = torch.from_numpy(np.stack([np.asarray(center_crop(image, 16)) for image, _ in items]))
    for data in (load(items, size=16), load(items, 16)):
        assert torch.equal(to_bytes(every(data)), expected.permute(0, 3, 1, 2))
    _, config = open_memory(Items(items), Data(), 16)
    assert config.size == 16  # a run opened later crops alike
    fails(lambda: every(load(items)), r"image 1 .*has shape \[3, 40, 21\].*set data\.size for PIL images")
    same = [(Image.fromarray(noise(20, 20, 3)), 0)]
    assert load(same, 16).shape == (3, 20, 20)  # images of one size keep it
    assert load(same, size=8).shape == (3, 8, 8)
    random = load(items, size=12, augment=Augment(crop="random-resized"))
    assert every(random).shape == (3, 3, 12, 12)


def test_modes_of_pil_images():
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 30, 60])
    mixed = [palette, Image.new("L", (8, 8), 9), Image.new("RGBA", (8, 8), (1, 2, 3, 0))]
    colors = to_bytes(every(load(mixed)))[:, :, 0, 0].tolist()
    assert colors == [[200, 30, 60], [9, 9, 9], [255, 255, 255]]
    assert load([Image.new("L", (8, 8)), Image.new("1", (8, 8))]).shape == (1, 8, 8)


class Targets(Items):
    def __init__(self, items, targets):
        super().__init__(items)
        self.targets = targets


@pytest.mark.parametrize("targets", [LABELS, torch.tensor(LABELS), np.asarray(LABELS, np.uint8)])
def test_labels_of_the_dataset_are_used_without_reading_items(targets):
    items = [(image, None) for image in pictures()]  # no labels in them
    assert open_memory(Targets(items, targets), Data())[0].labels.tolist() == LABELS


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (1.5, r"label of item 3 of the dataset is '1\.5', expected 0, 1"),
        (-1, "label of item 3 of the dataset is '-1'"),
        (True, "label of item 3 of the dataset is 'True'"),
        (None, "label of item 3 of the dataset is 'None'"),
        ([0, 1], r"label of item 3 of the dataset is '\[0, 1\]'"),
        (torch.tensor([0.0, 1.0]), "label of item 3 of the dataset is 'tensor"),
        (7, "no image has label 2"),
        (10**12, "no image has label 2"),
    ],
)
def test_wrong_labels_are_one_line(label, message):
    labels = [0, 1, 0, label, 0, 1]
    fails(lambda: load(list(zip(pictures(), labels, strict=True))), message)


def test_wrong_items_are_one_line():
    fails(lambda: load([{"picture": pictures()[0]}]), "item 0 of the dataset has the keys picture: name the")
    fails(lambda: load([]), "the dataset is empty")
    fails(lambda: open_memory({"train": Items([])}, Data()), "holds the splits train: pass one of them")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([], "data: item 0 of the dataset is empty, expected an image and its label"),
        (2**63, "data: an image is a int, expected an array of numbers"),
        (np.float64(0.5), "data: an image is a float64, expected an array of numbers"),
        (np.zeros((3, 8, 8), np.longdouble), "data: an image holds .* numbers, expected uint8 or float32"),
    ],
)
def test_items_that_are_no_images(item, message):
    fails(lambda: load([item, item]), message)
