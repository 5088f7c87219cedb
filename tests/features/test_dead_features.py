"""Widths of a masked autoencoder whose features do not depend on the image."""

import pytest
import torch

from driftgen.features.resnet_layers import count_dead_stages
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.support.distributed import Distributed
from driftgen.training.dry_run import dry_run
from driftgen.training.pretrain import pretrain
from driftgen.training.recipes import load_recipe, recipe_names
from tests.support.helpers import fails
from tests.support.runs import Silent

BLOCKS = (1, 1, 1)


@torch.no_grad()
def constant_features(width):
    """Return the features that are the same for different images, up to rounding."""
    network = ResNetMAE(3, width, BLOCKS, decoder=False).double()
    for parameter in network.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    images = torch.randn(8, 3, 16, 16, dtype=torch.float64).cumsum(2).cumsum(3)
    features = network.features(images / images.abs().amax())
    return {
        name
        for name, value in features.items()
        if (value.std(0) < 1e-3 * value.abs().mean()).double().mean() > 0.9
    }


@pytest.mark.parametrize("width", [3, 8, 9, 16, 17, 24, 31, 32, 33, 34, 40, 48, 63, 64, 96])
def test_constant_features_are_those_of_the_stages_that_are_counted(width):
    dead = count_dead_stages(width, len(BLOCKS))
    constant = constant_features(width)
    for i in range(1, len(BLOCKS) + 1):
        # The mean and the standard deviation over the whole map.
        assert {f"layer{i}_mean", f"layer{i}_std"} <= constant if i <= dead else True
        assert not any(name.startswith(f"layer{i}_") for name in constant) or i <= dead
    assert bool(constant) == bool(dead)


def changed(width):
    return load_recipe("mae-digits", [f"mae.options.base_channels={width}", "optim.steps=1"], "pretrain")


@pytest.mark.parametrize(
    ("width", "features"),
    [(8, "layer1_mean, layer1_std, layer2_mean and layer2_std"), (24, "layer1_mean and layer1_std")],
)
def test_pretraining_refuses_such_a_width_before_anything_is_written(width, features, tmp_path):
    message = (
        f"mae.options.base_channels={width}: {features} would be the same for every image, since up to 32 "
        "channels each channel is normalized on its own; the nearest widths without such "
        "features are 40 and 48: --set mae.options.base_channels=40"
    )
    run, processes = tmp_path / "run", Distributed.start("cpu")
    fails(lambda: dry_run(changed(width), run, view=Silent(), device="cpu"), message)
    fails(lambda: pretrain(changed(width), run, processes, Silent()), message)
    assert not run.exists()


def test_the_nearest_widths_pass():
    for width in (40, 48):
        assert count_dead_stages(width, 4) == 0


@pytest.mark.parametrize("name", [recipe.name for recipe in recipe_names() if recipe.task == "pretrain"])
def test_no_packaged_recipe_has_dead_features(name):
    masking = load_recipe(name).mae
    options = (ResNetMAE.preset_options(masking.preset) if masking.preset else {}) | masking.options
    assert count_dead_stages(options["base_channels"], 4) == 0


def test_a_run_that_started_with_such_a_width_resumes(tmp_path, monkeypatch):
    from driftgen.training import run_folder as module

    with monkeypatch.context() as patch:
        patch.setattr(module, "check_mae_width", lambda config: None)  # as older versions had it
        pretrain(changed(24), tmp_path, Distributed.start("cpu"), Silent())
    longer = changed(24).model_copy(update={"optim": changed(24).optim.model_copy(update={"steps": 2})})
    assert pretrain(longer, tmp_path, Distributed.start("cpu"), Silent(), override=True)
