"""The pipeline: one network call per image, seeds, labels, saving and loading."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import driftgen as dg
from driftgen.data.arrays import to_float
from driftgen.generators import DiT, UNet2D
from driftgen.model_io import from_official, to_official
from driftgen.support.images import contact_sheet, rounded_bytes, to_pil, to_uint8
from driftgen.tokenizers import Identity, TinyVAE
from tests.support.autoencoders import kl_network, taesd_files
from tests.support.pipelines import Own, lively, small

ARTIFACTS = Path(__file__).parent / "data" / "artifacts"
PIXEL, LATENT = ARTIFACTS / "ditgen_C_pixel_patch4", ARTIFACTS / "ditgen_A_full"
MAE, CONVNEXT = ARTIFACTS / "mae_enc_b8_2222", ARTIFACTS / "convnext_tiny"


@pytest.fixture
def pipe():
    return dg.DriftPipeline(small(), class_names=["ant", "bee", "cat", "dog"], guidance=1.5, batch_size=4)


def test_one_network_evaluation_per_image(pipe):
    rows = []
    pipe.generator.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    images = pipe([0, 1, 2], num_images=10, seed=0)
    assert len(images) == 10
    assert rows == [4, 4, 2]  # bounded batches, each sample once


def test_image_i_of_a_seed_is_always_the_same(pipe):
    whole = pipe(1, num_images=9, seed=3, output="tensor")
    pipe.batch_size = 2
    torch.testing.assert_close(pipe(1, num_images=9, seed=3, output="tensor"), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(pipe(1, num_images=3, seed=3, output="tensor"), whole[:3], rtol=0, atol=1e-5)
    assert (pipe(1, num_images=9, seed=4, output="tensor") - whole).abs().max() > 0.01
    rest = list(pipe.stream([1] * 9, seed=3, output="tensor", skip=5))
    torch.testing.assert_close(torch.cat(rest), whole[5:], rtol=0, atol=1e-5)
    first, second = (pipe(1, output="tensor") for _ in range(2))
    assert not torch.equal(first, second)  # without a seed, every call differs
    torch.manual_seed(5)
    pipe(1, output="tensor")
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)  # the caller's random numbers are not touched


def test_arguments_reach_the_network(pipe):
    seen = []
    pipe.generator.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    pipe(["cat", 3], guidance=2.5, seed=0)
    noise, labels, alpha = seen[0]
    assert labels.tolist() == [2, 3]
    assert alpha.tolist() == [2.5, 2.5]
    assert torch.equal(
        noise.gaussian, pipe.generator.sample_noise(2, torch.Generator().manual_seed(0)).gaussian
    )
    pipe(0)
    assert seen[1][2].tolist() == [1.5]  # the model's own guidance


def test_labels(pipe):
    assert pipe.labels() == [0, 1, 2, 3]
    assert pipe.labels(num_images=6) == [0, 1, 2, 3, 0, 1]
    assert pipe.labels(num_images=2) == [0, 1]
    assert pipe.labels([3, 1], 5) == [3, 1, 3, 1, 3]
    assert pipe.labels([3, 1], 4) == [3, 1, 3, 1]
    assert pipe.labels([3, "dog", np.int64(1)]) == [3, 3, 1]
    assert pipe.labels("dog") == [3]
    assert pipe.labels(torch.tensor([2, 0])) == [2, 0]
    assert pipe.labels(np.array([2, 0])) == [2, 0]
    assert pipe.labels((np.int64(1),)) == [1]


def test_outputs(pipe):
    tensor = pipe([0, 1], seed=0, output="tensor")
    assert tensor.shape == (2, 3, 8, 8)
    assert tensor.abs().max() <= 1
    array = pipe([0, 1], seed=0, output="numpy")
    assert array.dtype == np.uint8
    assert array.shape == (2, 8, 8, 3)
    assert np.array_equal(array, to_uint8(tensor))
    images = pipe([0, 1], seed=0)
    assert all(np.array_equal(np.asarray(image), a) for image, a in zip(images, array, strict=True))
    latent = pipe([0, 1], seed=0, output="latent")
    torch.testing.assert_close(latent.clamp(-1, 1), tensor)


def test_a_tokenizer_decodes():
    class Doubling(torch.nn.Module):
        latent_channels, factor = 3, 2

        def decode(self, latents):
            return latents.repeat_interleave(2, 2).repeat_interleave(2, 3) / 4

    network = small()
    decoded = dg.DriftPipeline(network, Doubling())(0, seed=0, output="tensor")
    plain = dg.DriftPipeline(network)(0, seed=0, output="latent")
    torch.testing.assert_close(decoded[:, :, ::2, ::2], (plain / 4).clamp(-1, 1))


def test_latents_through_an_sd_vae_that_travels_with_the_model(tmp_path):
    kl_network().save_pretrained(tmp_path / "vae")
    pipe = dg.DriftPipeline.from_pretrained(LATENT, tokenizer=str(tmp_path / "vae"))
    images = pipe([1, 2], seed=0, output="numpy")
    assert images.shape == (2, 32, 32, 3)
    pipe.save_pretrained(tmp_path / "m")
    shutil.rmtree(tmp_path / "vae")
    assert (tmp_path / "m" / "tokenizer" / "config.json").is_file()
    assert str(tmp_path) not in (tmp_path / "m" / "config.json").read_text()
    back = dg.DriftPipeline.from_pretrained(tmp_path / "m")
    assert np.array_equal(back([1, 2], seed=0, output="numpy"), images)


def test_bytes_are_those_of_the_release():
    """Inputs and outputs of the release's conversion to uint8; its images are in [0, 1]."""
    given = [-0.1, 0.0, 0.00196, 0.5, 0.4999, 0.9999, 1.0, 1.2, float("nan"), float("inf"), -float("inf")]
    want = [0, 0, 0, 127, 127, 254, 255, 255, 0, 255, 0]
    images = (2 * torch.tensor(given) - 1).reshape(1, 1, 1, -1)
    assert to_uint8(images).ravel().tolist() == want


def test_bytes_that_became_floats_come_back():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(rounded_bytes(to_float(every)), every)
    assert (to_uint8(to_float(every)).ravel() != every.numpy().ravel()).any()  # it truncates


def test_sheet():
    gray = to_pil(np.full((5, 8, 8, 1), 7, np.uint8))
    sheet = contact_sheet(gray)
    assert sheet.mode == "L"
    assert sheet.size == (3 * 66 + 2, 2 * 66 + 2)
    assert np.asarray(sheet)[2:66, 2:66].tolist() == [[7] * 64] * 64
    assert np.asarray(sheet)[-1, -1] == 255
    assert contact_sheet(gray, columns=5).size[1] == 68


def test_a_users_network(tmp_path):
    pipe = dg.DriftPipeline(Own())
    assert pipe([5, 6], seed=0, output="numpy").shape == (2, 4, 4, 3)
    with pytest.raises(dg.InputError, match=r"Own is not registered: call driftgen\.register_generator"):
        pipe.save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own").exists()
    with pytest.raises(dg.InputError, match="generator is a Linear: it needs forward"):
        dg.DriftPipeline(torch.nn.Linear(2, 2))


# --- folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DiT, UNet2D])
def test_saved_and_loaded(kind, tmp_path):
    builders = {
        DiT: small,
        UNet2D: lambda: lively(UNet2D(input_size=8, in_channels=1, num_classes=4, **UNET)),
    }
    network = builders[kind]()
    pipe = dg.DriftPipeline(network, class_names=list("abcd"), guidance=1.2, source={"step": 7})
    pipe.save_pretrained(tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    back = dg.DriftPipeline.from_pretrained(tmp_path / "m")
    assert (back.class_names, back.guidance, back.source) == (list("abcd"), 1.2, {"step": 7})
    assert torch.equal(back([0, 3], seed=0, output="latent"), pipe([0, 3], seed=0, output="latent"))
    card = (tmp_path / "m" / "README.md").read_text()
    assert kind.__name__ in card
    assert "- step: 7" in card
    run = tmp_path / "run"
    shutil.move(tmp_path / "m", run / "model")
    assert dg.DriftPipeline.from_pretrained(str(run)).guidance == 1.2


UNET = {
    "widths": (16, 32),
    "blocks": (1, 1),
    "attention_levels": (1,),
    "head_size": 16,
    "groups": 8,
    "style_codebooks": 2,
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_that_no_network_computes_in(dtype):
    words = "networks compute in torch.float32, torch.bfloat16, torch.float16, torch.float64"
    with pytest.raises(dg.InputError, match=f"dtype={dtype}: {words}"):
        dg.DriftPipeline.from_pretrained("digits", dtype=dtype)
    with pytest.raises(dg.InputError, match=words):
        dg.DriftPipeline(small()).to(dtype=dtype)


def test_dtypes(tmp_path):
    dg.DriftPipeline(small().bfloat16()).save_pretrained(tmp_path)
    saved = dg.DriftPipeline.from_pretrained(tmp_path)
    assert saved.generator.positions.dtype == torch.bfloat16
    assert saved(0, seed=0, output="tensor").dtype == torch.float32
    wide = dg.DriftPipeline.from_pretrained(tmp_path, dtype=torch.float32)
    assert wide.generator.positions.dtype == torch.float32


@pytest.mark.parametrize("folder", [PIXEL, LATENT])
def test_an_official_artifact_is_a_pipeline(folder, tmp_path):
    pipe = dg.DriftPipeline.from_pretrained(folder)
    want = dg.load_official(folder)(
        pipe.generator.sample_noise(2, torch.Generator().manual_seed(5)), torch.tensor([1, 9]), 2.0
    )
    assert torch.equal(pipe([1, 9], guidance=2.0, seed=5, output="latent"), want)
    pipe.save_pretrained(tmp_path / "m")
    to_official(tmp_path / "m", tmp_path / "back")
    source = folder / "params_ema"
    assert (tmp_path / "back" / "metadata.json").read_text() == (source / "metadata.json").read_text()


@pytest.mark.parametrize("folder", [PIXEL, LATENT, MAE, CONVNEXT], ids=lambda f: f.name)
def test_conversion_round_trip_is_bit_exact(folder, tmp_path):
    from_official(str(folder), tmp_path / "ours")
    to_official(tmp_path / "ours", tmp_path / "theirs")
    source = folder / "params_ema" if (folder / "params_ema").is_dir() else folder
    names = sorted(p.name for p in source.iterdir())
    assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == names
    for name in names:
        assert (tmp_path / "theirs" / name).read_bytes() == (source / name).read_bytes()
    loaded, read = dg.load_model(tmp_path / "ours"), dg.load_official(folder)
    assert type(loaded) is type(read)
    assert all(torch.equal(value, read.state_dict()[key]) for key, value in loaded.state_dict().items())
    with pytest.raises(dg.InputError, match="exists and is not an empty folder"):
        from_official(str(folder), tmp_path / "ours")


def broken(tmp_path, change):
    folder = tmp_path / "m"
    dg.DriftPipeline(small()).save_pretrained(folder)
    change(folder)
    with pytest.raises(dg.InputError) as error:
        dg.DriftPipeline.from_pretrained(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "holds no model: config.json and model.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text('{"_class_name": "UNet"}'), "_class_name is 'UNet'"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object: the description of a model"),
        (edit(version=2), "has version 2, driftgen 0.1.0 reads version 1"),
        (edit(color="red"), "config.json: color: Extra inputs are not permitted"),
        (edit(guidance=0.5), "config.json: guidance: Input should be greater than or equal to 1"),
        (edit(architecture="GPT"), "'GPT' is not registered, only ChunkMLP, ChunkTransformer, ConvDecoder"),
        (
            edit(options={"depht": 1}),
            "options do not fit DiT: option='depht' is not known: did you mean 'depth'",
        ),
        (edit(options={}), "does not fit config.json; missing"),
        (edit(class_names=["a"]), "class_names has 1 names, the generator has 4 classes"),
        (edit(tokenizer={"kind": "gzip"}), "gzip"),
        (lambda f: (f / "model.safetensors").unlink(), "does not exist: the folder is incomplete"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot be read as weights"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "cannot be read as weights",
        ),
    ],
)
def test_a_broken_folder_says_what_is_wrong(change, message, tmp_path):
    assert message in broken(tmp_path, change)


def test_a_tensor_of_another_shape(tmp_path):
    dg.DriftPipeline(small()).save_pretrained(tmp_path)
    edit(options=json.loads((tmp_path / "config.json").read_text())["options"] | {"num_classes": 5})(tmp_path)
    with pytest.raises(
        dg.InputError, match=r"conditioning.classes.weight has shape \[4, 32\], expected \[5, 32\]"
    ):
        dg.load_model(tmp_path)


def test_an_encoder_is_not_a_generator():
    with pytest.raises(dg.InputError, match="is an encoder \\(ResNetMAE\\), not a generator"):
        dg.DriftPipeline.from_pretrained(MAE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": 4}, "labels: 4 is not a class of this model, classes are 0 to 3"),
        ({"labels": [-1]}, "labels: -1 is not a class"),
        ({"labels": [0, 4, 1]}, "labels: 4 is not a class"),
        ({"labels": [0, True]}, "labels: True is not a class"),
        ({"labels": [0.5]}, "labels: 0.5 is not a class"),
        ({"labels": []}, "labels is empty"),
        ({"labels": "cow"}, "labels='cow' is not known"),
        ({"guidance": 0.9}, "guidance=0.9 must be 1"),
        ({"guidance": float("nan")}, "guidance=nan must be 1"),
        ({"seed": -1}, "seed=-1 must be an integer from 0"),
        ({"num_images": 0}, "num_images=0 must be from 1 to"),
        ({"labels": [1, 2], "num_images": 1}, "num_images=1 is less than the 2 labels"),
        ({"output": "jpeg"}, "output='jpeg' is not known"),
    ],
)
def test_wrong_calls(pipe, options, message):
    with pytest.raises(dg.InputError, match=r".") as error:
        pipe(**options)
    assert message in str(error.value)


def test_a_missing_tokenizer_is_reported_before_sampling(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pipe = dg.DriftPipeline.from_pretrained(LATENT)
    pipe.generator.register_forward_hook(lambda *a: pytest.fail("sampled before the tokenizer was there"))
    missing = "the samples are latents, and their tokenizer is missing: stabilityai/sd-vae-ft-mse is neither"
    with pytest.raises(dg.InputError, match=rf"{missing}.* \(--tokenizer\), .* \(--latents\)$"):
        pipe(0)
    with pytest.raises(dg.InputError, match="the tokenizer decodes 3 channels, the generator produces 4"):
        dg.DriftPipeline(pipe.generator, Identity(3))


def test_class_names_are_needed_to_use_them():
    with pytest.raises(dg.InputError, match="the model has no class names"):
        dg.DriftPipeline(small())("cat")


def test_pictures_open(pipe, tmp_path):
    pipe("cat", seed=0)[0].save(tmp_path / "cat.png")
    assert Image.open(tmp_path / "cat.png").size == (8, 8)


def test_repr_of_a_generator_of_images():
    pipe = dg.DriftPipeline(small())
    count = sum(p.numel() for p in pipe.generator.parameters())
    assert repr(pipe) == (
        f"DriftPipeline(DiT, {count:,} parameters, 8x8 pixels with 3 channels, 4 classes, guidance 1, cpu, "
        "float32)"
    )
    assert "4 classes (cat, dog, owl, ox)" in repr(
        dg.DriftPipeline(small(), class_names=["cat", "dog", "owl", "ox"])
    )
    assert repr(dg.DriftPipeline(small().bfloat16(), guidance=1.5)).endswith("guidance 1.5, cpu, bfloat16)")


def test_repr_names_few_of_many_classes_and_no_missing_tokenizer():
    sizes = {"input_size": 8, "hidden_size": 32, "depth": 1, "num_heads": 2, "num_classes": 9}
    pipe = dg.DriftPipeline(DiT(in_channels=4, **sizes), class_names=[f"class-{i}" for i in range(9)])
    assert "8x8 latents with 4 channels, 9 classes (class-0, class-1, class-2, ...)" in repr(pipe)
    assert pipe._tokenizer is None  # nothing is downloaded


def test_repr_of_latents_with_their_tokenizer(tmp_path):
    tokenizer = TinyVAE(taesd_files(tmp_path))
    channels, factor = tokenizer.latent_channels, tokenizer.factor
    net = DiT(input_size=8, in_channels=channels, hidden_size=32, depth=1, num_heads=2, num_classes=1)
    text = repr(dg.DriftPipeline(net, tokenizer))
    assert f"8x8 latents with {channels} channels, decoded by TinyVAE to {8 * factor}x{8 * factor}" in text
    assert ", 1 class, " in text


def test_repr_of_a_users_network_says_what_is_known():
    assert repr(dg.DriftPipeline(Own())) == "DriftPipeline(Own, 1 parameter, guidance 1, cpu, float32)"
    assert "Own, 1 parameter, 2 classes (a, b), " in repr(dg.DriftPipeline(Own(), class_names=["a", "b"]))
