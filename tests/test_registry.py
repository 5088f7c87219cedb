"""Classes registered from Python and by plugins: in recipes, saved, loaded; one line for what is wrong."""

import json
import os
import textwrap

import pytest
import torch
from torch import nn

import driftgen as dg
from driftgen import model_io
from driftgen.training.build import build_features, build_generator
from driftgen.training.config import TrainConfig
from tests.support.fork_server import run_code
from tests.support.pipelines import Own


class Net(nn.Module):
    """Takes some of the options that the data fixes, and says nothing about itself."""

    def __init__(self, width, in_channels, num_classes=3):
        super().__init__()
        self.scale = nn.Parameter(torch.full((in_channels, 1, 1), float(width)))
        self.embed = nn.Embedding(num_classes, 1)

    def forward(self, noise, labels, alpha):
        return noise.gaussian * self.scale + self.embed(labels)[:, :, None, None]

    def sample_noise(self, n, generator=None):
        gaussian = torch.randn(n, len(self.scale), 8, 8, generator=generator)
        return dg.generators.Noise(gaussian, torch.zeros(n, 0, dtype=torch.long))


class Tied(Net):
    """Two names for one tensor, and a buffer that no file holds."""

    def __init__(self, **options):
        super().__init__(**options)
        self.again = self.scale
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Thirds(nn.Module):
    """An encoder."""

    def __init__(self, parts=3):
        super().__init__()
        self.parts = parts
        self.gain = nn.Parameter(torch.ones(()))

    def options(self):
        return {"parts": self.parts}

    def features(self, x, scale=1.0):
        return {
            f"part{i}": scale * self.gain * part.flatten(1)[:, None]
            for i, part in enumerate(x.chunk(self.parts, 2))
        }


def recipe(**changes):
    return TrainConfig.model_validate({"vanilla": False, "encoders": [{"kind": "thirds"}], **changes})


def test_a_recipe_names_what_is_registered(tmp_path):
    dg.register_generator("net", Net)
    dg.register_encoder("thirds", Thirds)
    config = recipe(
        generator={"kind": "net", "options": {"width": 2}},
        encoders=[{"kind": "thirds", "options": {"parts": 2}, "switches": {"scale": 3.0}}],
    )
    network = build_generator(config.generator, (1, 8, 8), 5)
    assert (network.scale.shape, network.embed.num_embeddings) == ((1, 1, 1), 5)
    phi = build_features(config, (1, 8, 8), None, torch.device("cpu"))
    features = phi.features(torch.ones(2, 1, 8, 8))
    assert {name: value.shape for name, value in features.items()} == {
        "part0": (2, 1, 32),
        "part1": (2, 1, 32),
    }
    assert features["part0"].unique().tolist() == [3.0]

    # Saved with the options it was built with, also those that the data fixed.
    dg.save_model(network, tmp_path / "net")
    assert json.loads((tmp_path / "net" / "config.json").read_text())["options"] == {
        "width": 2,
        "in_channels": 1,
        "num_classes": 5,
    }
    loaded = dg.load_model(tmp_path / "net")
    assert type(loaded) is Net
    assert torch.equal(loaded.embed.weight, network.embed.weight)

    dg.save_model(Thirds(4), tmp_path / "thirds")
    config = recipe(encoders=[{"kind": "thirds", "path": str(tmp_path / "thirds")}])
    phi = build_features(config, (1, 8, 8), None, torch.device("cpu"))
    assert len(phi.features(torch.ones(2, 1, 8, 8))) == 4
    assert not phi.networks[0].training


def test_shared_tensors_and_buffers_survive(tmp_path):
    dg.register_generator("tied", Tied)
    entry = model_io.get_architecture("generator", "tied")
    network = model_io.build_model(entry, {"width": 2, "in_channels": 3}).bfloat16()
    for size in ("5GB", 4):
        dg.save_model(network, tmp_path, max_shard_size=size, overwrite=True)
        loaded = dg.load_model(tmp_path)
        assert loaded.again is loaded.scale
        assert loaded.scale.dtype == torch.bfloat16
        assert torch.equal(loaded.scale, network.scale)
        assert loaded.table.tolist() == [0, 1, 2]


def test_built_in_names_in_recipes_and_files():
    names = {entry.name: entry.saved_as for entry in model_io._REGISTRY.values()}
    assert names == {
        **{"dit": "DiT", "unet": "UNet2D", "mlp": "ImageMLP", "mae": "ResNetMAE", "convnext": "ConvNeXtV2"},
        **{"decoder": "ConvDecoder", "backbone": None, "resnet50": None, "efficientnet-lite0": None},
        **{"unet1d": "UNet1D", "transformer": "ChunkTransformer", "policy": "PolicyNetwork"},
        "chunk-mlp": "ChunkMLP",
    }


def refused(function, *arguments, **options):
    with pytest.raises(dg.InputError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_registered():
    dg.register_generator("net", Net)
    dg.register_generator("net", Net)  # a cell of a notebook that runs again
    assert "name='net' is registered for tests.test_registry.Net" in refused(
        dg.register_generator, "net", Own
    )
    for name in ("dit", "DiT", "mae"):
        assert f"name={name!r} is registered for driftgen" in refused(dg.register_generator, name, Net)
    assert "name='a-b': use letters" in refused(dg.register_generator, "a-b", Net)
    assert "name='module': use letters" in refused(dg.register_encoder, "module", Thirds)
    assert "Thirds has no method sample_noise" in refused(dg.register_generator, "x", Thirds)
    assert "Net has no method features" in refused(dg.register_encoder, "x", Net)
    assert "is not a subclass of torch.nn.Module" in refused(dg.register_encoder, "x", dict)


def test_wrong_options_and_shapes_are_one_line():
    dg.register_generator("net", Net)

    def build(shape=(1, 8, 8), **options):
        config = TrainConfig.model_validate({"generator": {"kind": "net", "options": options}})
        return refused(build_generator, config.generator, shape, 5)

    assert (
        "generator: net: missing a required argument: 'width'; its options are width, in_channels" in build()
    )
    assert "generator: net: got an unexpected keyword argument 'wdth'" in build(width=1, wdth=1)
    assert "generator.options.num_classes=4, but the data has 5" in build(width=1, num_classes=4)
    assert "Net generates [1, 8, 8], the data has [1, 6, 6]" in build((1, 6, 6), width=1)
    config = TrainConfig.model_validate({"generator": {"kind": "net", "preset": "big"}})
    assert "net has no presets" in refused(build_generator, config.generator, (1, 8, 8), 5)
    config = TrainConfig.model_validate({"generator": {"kind": "net", "options": {"width": 1}}})
    message = refused(build_generator, config.generator, (1, 8, 8), 5, checkpoint_blocks=True)
    assert "net does not take checkpoint_blocks" in message


def test_unregistered_names():
    message = refused(model_io.get_architecture, "generator", "ditt")
    assert (
        "generator 'ditt' is not registered: did you mean 'dit'? choose from decoder, dit, mlp, unet, or call"
        in message
    )
    assert "choose from backbone, convnext, efficientnet-lite0, mae, resnet50" in refused(
        model_io.get_architecture, "encoder", "dit"
    )
    with pytest.raises(ValueError, match="encoder 'thirds' is not registered"):
        recipe()


PLUGIN = """
import torch
from torch import nn
import driftgen as dg

class Far(nn.Module):
    def __init__(self, in_channels, input_size):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(in_channels, input_size, input_size))

    def forward(self, noise, labels, alpha):
        return noise.gaussian + self.bias

    def sample_noise(self, n, generator=None):
        gaussian = torch.stack([torch.randn(self.bias.shape, generator=generator) for _ in range(n)])
        return dg.generators.Noise(gaussian, torch.zeros(n, 0, dtype=torch.long))

def register():
    print("registering")
    dg.register_generator("far", Far)
"""


def package(folder, name, entry, source):
    """Write a package and the metadata that an installer would write."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[driftgen.plugins]\n{name} = {entry}\n")


def python(code, folder):
    path = os.pathsep.join([str(folder), os.getcwd()])
    done = run_code(textwrap.dedent(code), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_package_brings_its_own_generator(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    package(site, "far_away", "far_away:register", PLUGIN)
    package(site, "broken_one", "broken_one:register", "import there_is_no_such_module\n")
    lines = python(
        f"""
        import driftgen as dg
        from driftgen import model_io
        from driftgen.training.build import build_generator
        from driftgen.training.config import TrainConfig
        model_io.get_architecture("generator", "dit")
        print("nothing so far")
        config = TrainConfig.model_validate({{"generator": {{"kind": "far"}}}})
        network = build_generator(config.generator, (1, 4, 4), 2)
        dg.save_model(network, {str(tmp_path / "model")!r})
        try: model_io.get_architecture("generator", "farther")
        except dg.InputError as error: print(error)
        """,
        site,
    )
    assert lines[:2] == ["nothing so far", "registering"]
    assert len(lines) == 3  # loaded once, and the broken plugin is one line in the error
    assert "did you mean 'far'?" in lines[2]
    assert "plugins that failed to load: broken_one (broken_one:register): ModuleNotFoundError" in lines[2]
    lines = python(
        f"import driftgen as dg; print(type(dg.load_model({str(tmp_path / 'model')!r})).__name__)", site
    )
    assert lines == ["registering", "Far"]
    message = refused(dg.load_model, tmp_path / "model")
    assert "config.json: architecture='far' is not registered, only ChunkMLP, ChunkTransf" in message
    assert "call driftgen.register_generator('far', YourClass)" in message
