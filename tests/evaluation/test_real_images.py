"""Real images in the shape of a model."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import driftgen as dg
from driftgen.data.config import Augment, Data
from driftgen.data.images import digits
from driftgen.evaluation.real_images import load_bytes, open_in_shape, run_data
from driftgen.evaluation.session import is_images
from tests.support.image_data import noise, write_tar


def every(data):
    return load_bytes(data, torch.arange(len(data.labels)))


def test_bytes_of_an_array_are_exact(tmp_path):
    pixels = np.arange(256, dtype=np.uint8).reshape(4, 8, 8)
    np.save(tmp_path / "a.npy", pixels)
    assert np.array_equal(every(open_in_shape(str(tmp_path / "a.npy"), (1, 8, 8)))[:, 0], pixels)
    color = every(open_in_shape(str(tmp_path / "a.npy"), (3, 8, 8)))
    assert np.array_equal(color, pixels[:, None].repeat(3, axis=1))


def test_both_parts_of_the_digits():
    for source, split in (("digits", "train"), ("digits-heldout", "heldout")):
        found, (pixels, labels) = open_in_shape(source, (1, 8, 8)), digits(split)
        assert torch.equal(found.labels, labels)
        assert torch.equal(every(found), ((pixels + 1) * 127.5).round().to(torch.uint8))
        assert open_in_shape(source, (3, 16, 16), resize=True).shape == (3, 16, 16)


def test_files_of_a_folder_take_the_size_of_the_model(tmp_path):
    Image.fromarray(noise(20, 12, 3)).save(tmp_path / "a.png")
    data = open_in_shape(str(tmp_path), (3, 8, 8))
    try:
        assert every(data).shape == (1, 3, 8, 8)
    finally:
        data.close()


def test_shards_take_the_size_of_the_model(tmp_path):
    body = io.BytesIO()
    Image.fromarray(noise(20, 12, 3)).save(body, "PNG")
    for shard in range(2):
        write_tar(tmp_path / f"a-{shard}.tar", [(f"{shard}.png", body.getvalue())])
    for source, count in (("a-{0..1}.tar", 2), ("a-*.tar", 2), ("a-1.tar", 1), (".", 2)):
        path = str(tmp_path / source)
        assert is_images(path)
        data = open_in_shape(path, (3, 8, 8))
        assert every(data).shape == (count, 3, 8, 8)
        data.close()
    assert not is_images("owner/model")


def test_the_name_of_a_packaged_model_is_the_model():
    assert not is_images("digits")
    assert is_images("data:digits")
    assert is_images("digits-heldout")


def test_data_of_another_shape(tmp_path):
    path = str(tmp_path / "a.npy")
    np.save(path, noise(5, 12, 12, 3))
    with pytest.raises(dg.InputError) as error:
        open_in_shape(path, (3, 8, 8))
    assert str(error.value) == (
        f"the model generates 8x8 images of 3 channels, {path} holds 12x12 images of 3 channels: give the "
        "data that the model was trained on, or add --resize"
    )
    assert open_in_shape(path, (3, 8, 8), resize=True).shape == (3, 8, 8)
    with pytest.raises(
        dg.InputError, match=r"12x12 images of 1 channel, .* holds 12x12 images of 3 channels"
    ):
        open_in_shape(path, (1, 12, 12))
    assert open_in_shape(path, (1, 12, 12), resize=True).shape == (1, 12, 12)
    with pytest.raises(dg.InputError, match="8x6 images of 3 channels: data can be resized to square"):
        open_in_shape(path, (3, 8, 6), resize=True)


def test_missing_data():
    with pytest.raises(dg.InputError, match="data nowhere does not exist: give a folder of images"):
        open_in_shape("nowhere", (3, 8, 8))


def test_data_of_a_run(tmp_path):
    assert run_data(str(tmp_path)) is None
    config = tmp_path / "config.yaml"
    config.write_text("data: {kind: digits, size: 8, channels: 1, augment: {rotate: 8.0}}\n")
    section = run_data(str(tmp_path))
    assert section == Data(kind="digits", size=8, channels=1, augment=Augment(rotate=8.0))
    data = open_in_shape(section, (1, 8, 8))
    assert torch.equal(every(data), every(open_in_shape("digits", (1, 8, 8))))  # without augmentation
    config.write_text("data: {kind: latents, path: cache}\n")
    assert run_data(str(tmp_path)) is None
    config.write_text("data: {kind: latent}\n")
    with pytest.raises(dg.InputError, match=r"config\.yaml holds no readable data section"):
        run_data(str(tmp_path))
