"""Messages are one line of bounded length, whatever a file or an argument holds."""

import pytest
import torch

import driftgen as dg
from driftgen.errors import InputError, unknown_name
from driftgen.generators.dit import DiTConfig


def test_a_long_message_keeps_its_ends():
    text = str(InputError(f"config.json: {'a' * 10_000}: copy it again"))
    assert len(text) < 1500
    assert text.startswith("config.json: aaa")
    assert text.endswith("aaa: copy it again")


def test_a_long_name_is_shortened():
    text = str(unknown_name("kernel", "b" * 10_000, ["laplace", "gaussian"]))
    assert text.endswith(" ... is not known: choose from gaussian, laplace")
    assert len(text) < 300


def test_the_fitting_patch_of_an_absurd_one_is_found_at_once():
    with pytest.raises(InputError, match="patch_size=1000000000 does not divide input_size=32"):
        DiTConfig(patch_size=10**9)


def test_changes_with_a_tensor(tmp_path):
    with pytest.raises(InputError, match=r"optim\.lr"):
        dg.train("digits", tmp_path / "run", device="cpu", **{"optim.lr": torch.zeros(2, 3)})


def test_a_dataset_without_values(tmp_path):
    images = torch.zeros(12, 8, 8, 1, dtype=torch.uint8, device="meta")
    with pytest.raises(InputError, match="data is on the meta device"):
        dg.train("digits", tmp_path / "run", device="cpu", data=(images,))
