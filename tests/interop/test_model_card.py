"""The model card of every architecture."""

from contextlib import suppress

import pytest
import torch

import driftgen as dg
from driftgen.features import Backbone, ResNetMAE
from driftgen.generators import DiT, ImageMLP, UNet2D
from driftgen.interop.model_card import model_card
from driftgen.training.model_shards import save_shards
from tests.support.pipelines import Own
from tests.support.small_policy import save_small_policy

with suppress(ImportError):
    from transformers import ConvNextV2Model  # noqa: F401, its import takes longer than a test may

NETWORKS = {
    "DiT": lambda: DiT(input_size=8, hidden_size=32, depth=1, num_heads=2),
    "UNet2D": lambda: UNet2D(input_size=8, widths=(16, 32), blocks=(1, 1), attention_levels=()),
    "ImageMLP": ImageMLP,
    "ResNetMAE": lambda: ResNetMAE(1, 40, (1,), patchify=2),
    "ConvNeXtV2": lambda: Backbone.from_convnext((1, 1), (8, 16)),
    "own_net": Own,
}
ENCODERS = ("ResNetMAE", "ConvNeXtV2")


@pytest.fixture(params=NETWORKS)
def card(request, tmp_path):
    name = request.param
    if name == "ConvNeXtV2":
        pytest.importorskip("transformers")
    if name == "own_net":
        dg.register_generator(name, Own)
    folder = dg.save_model(NETWORKS[name](), tmp_path, source={"recipe": "folder", "step": 100})
    return name, (folder / "README.md").read_text()


def test_a_card_says_what_the_model_is(card):
    name, text = card
    sentence = next(line for line in text.splitlines() if "Drifting Models" in line)
    kind = "An encoder" if name in ENCODERS else "A one-step generator"
    assert sentence.startswith(f"{kind} for [Drifting Models](https://")
    assert text.count("\n# ") == 1
    assert f"\n# {name}, " in text


def test_tags_of_the_hub(card):
    name, text = card
    _, head, _ = text.split("---\n", 2)
    assert "library_name: driftgen\n" in head
    assert ("- feature-extraction\n" in head) == (name in ENCODERS)
    assert ("- one-step-generation\n" in head) == (name not in ENCODERS)


def test_no_count_is_rounded_to_nothing(card):
    assert ", 0.0M parameters" not in card[1]


def test_counts(tmp_path):
    def heading(network):
        text = (dg.save_model(network, tmp_path, overwrite=True) / "README.md").read_text()
        return next(line for line in text.splitlines() if line.startswith("# "))

    dg.register_generator("one", Own)
    assert heading(Own()) == "# one, 1 parameter"
    assert heading(DiT(input_size=8, hidden_size=256, depth=2, num_heads=4)).endswith("M parameters")


def test_the_code_of_a_card_runs(card, tmp_path, monkeypatch):
    """In the folder of the model, as the card says."""
    name, text = card
    monkeypatch.chdir(tmp_path)
    code = text.split("```python\n")[1].split("```")[0]
    if name == "DiT":  # latents, whose tokenizer is not here
        code = code.replace("seed=0", "seed=0, output='latent'")
    names = {}
    exec(compile(code, name, "exec"), names)
    assert len(names["features" if name in ENCODERS else "images"])


def test_license_and_evaluation_have_their_places(tmp_path):
    evaluation = {"columns": ["alpha", "FID"], "rows": [["1", "9.50"]], "about": "1,000 samples."}
    source = {"recipe": "digits", "license": "apache-2.0", "evaluation": evaluation}
    text = (dg.save_model(ImageMLP(), tmp_path, source=source) / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert "license: apache-2.0\n" in head
    assert "| alpha | FID |\n|---|---|\n| 1 | 9.50 |\n\n1,000 samples.\n" in body
    assert "- recipe: digits\n" in body
    assert "- license" not in body
    assert "- evaluation" not in body


@pytest.mark.parametrize("odd", [3, "text", {}, {"columns": 1, "rows": 2, "about": 3}, [1], {"rows": None}])
def test_an_odd_evaluation_is_left_out(tmp_path, odd):
    text = (dg.save_model(ImageMLP(), tmp_path, source={"evaluation": odd}) / "README.md").read_text()
    assert "Evaluation:" not in text


def test_long_options_are_left_to_the_configuration():
    ranges = {"action": {"low": [0.123] * 50, "high": [1.0] * 50}}
    card = model_card("PolicyNetwork", "policy", 5, {"horizon": 16, "statistics": ranges}, {}, 1.0)
    assert "| horizon | 16 |" in card
    assert "| statistics | see config.json |" in card


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"observation.state": [20]}, "observation.state: 20"),
        ((64, 128, 256, 384), "64, 128, 256, 384"),
        ([2], "2"),
        (None, "none"),
        ({}, "none"),
        ((), "none"),
        ([1.0, 3.0], "1, 3"),
        (0.123456789, "0.123456789"),
        (True, "True"),
        ("small", "small"),
    ],
)
def test_options_are_plain_text(value, shown):
    card = model_card("UNet2D", "generator", 5, {"crop": value}, {"range": value}, 1.0)
    assert f"| crop | {shown} |" in card
    assert f"- range: {shown}\n" in card


def test_the_code_of_a_policy_runs(tmp_path, monkeypatch):
    folder = save_small_policy(tmp_path)
    text = (folder / "README.md").read_text()
    assert (
        "\nA robot policy of one network call per chunk of actions, trained as in [Drifting Models]" in text
    )
    monkeypatch.chdir(folder)
    names = {}
    exec(compile(text.split("```python\n")[1].split("```")[0], "policy", "exec"), names)
    assert names["action"].shape == (2,)


def test_a_baseline_is_called_one():
    card = model_card("PolicyNetwork", "policy", 5, {"method": "regression"}, {}, 1.0)
    assert "\nA robot policy trained by regression, a baseline of [Drifting Models]" in card


def test_saving_again_keeps_license_and_figures(tmp_path):
    evaluation = {"columns": ["alpha", "FID"], "rows": [["1", "9.50"]], "about": "1,000 samples."}
    source = {"data": "digits", "license": "apache-2.0", "evaluation": evaluation}
    dg.save_model(ImageMLP(), tmp_path / "a", source=source)
    exact = save_shards(tmp_path / "a", tmp_path / "b", dtype=None)
    rounded = save_shards(tmp_path / "a", tmp_path / "c", dtype=torch.int8)
    again = save_shards(rounded, tmp_path / "d", dtype=torch.int8)
    note = "Measured before the weights were rounded to int8."
    for folder, about in ((exact, ""), (rounded, f" {note}"), (again, f" {note}")):
        text = (folder / "README.md").read_text()
        assert "license: apache-2.0\n" in text
        assert "- data: digits\n" in text
        assert f"| 1 | 9.50 |\n\n1,000 samples.{about}\n" in text
