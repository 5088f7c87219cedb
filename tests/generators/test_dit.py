import json
import shutil

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.generators.dit import PRESETS, DiTConfig, patchify, sincos_positions, unpatchify
from driftgen.interop.dit_names import official_dit_names
from driftgen.interop.flax_msgpack import read_parameters, write_parameters
from driftgen.interop.official import load_official, save_official
from driftgen.ops.rope import rope_tables, rotate
from tests.support.fork_server import run_code
from tests.support.golden_dit import CASES, DATA, GOLDEN, artifact, golden, noise_of
from tests.support.helpers import fails

TINY = {
    "input_size": 8,
    "hidden_size": 64,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 10,
    "style_codebooks": 3,
}


def tiny(**options):
    torch.manual_seed(0)
    net = dg.generators.DiT(**TINY | options)
    for p in net.parameters():  # adaLN and the output start at zero
        torch.nn.init.normal_(p, std=0.2)
    return net


# --- the released generators ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_samples_and_conditions(case):
    net = load_official(artifact(case))
    noise, labels = noise_of(case), golden(case, "c")
    for alpha, suffix in ((golden(case, "cfg"), ""), (1.7, "_cfg1p7")):
        condition = net.condition(labels, alpha, noise.style)
        torch.testing.assert_close(condition, golden(case, "cond" + suffix), rtol=0, atol=1e-6)
        samples = net(noise, labels, alpha)
        torch.testing.assert_close(samples, golden(case, "samples" + suffix), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients(case, checkpoint):
    net = load_official(artifact(case))
    net.checkpoint_blocks = checkpoint
    gaussian = golden(case, "x").requires_grad_()
    samples = net(
        dg.generators.Noise(gaussian, golden(case, "noise_labels")), golden(case, "c"), golden(case, "cfg")
    )
    (samples * golden(case, "target")).sum().backward()
    torch.testing.assert_close(gaussian.grad, golden(case, "grad_x"), rtol=1e-5, atol=1e-5)
    parameters = dict(net.named_parameters())
    for theirs, ours in official_dit_names(net.config).items():
        want = float(GOLDEN[f"{case}/gradnorm/{theirs}"])
        assert float(parameters[ours].grad.norm()) == pytest.approx(want, rel=1e-5, abs=1e-5), theirs


@pytest.mark.parametrize("attention_float32", [True, False])
def test_bfloat16_is_as_accurate_as_the_release(attention_float32):
    net = load_official(artifact("A_full"))
    for block in net.blocks:
        block.attention.float32 = attention_float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        samples = net(noise_of("A_full"), golden("A_full", "c"), golden("A_full", "cfg"))
    assert (samples.float() - golden("A_full", "samples")).abs().max() < 0.015  # the release: 0.011 and 0.008


def test_bfloat16_weights():
    net = load_official(artifact("A_full")).bfloat16()
    samples = net(noise_of("A_full"), golden("A_full", "c"), golden("A_full", "cfg"))
    assert samples.dtype == torch.bfloat16
    assert (samples.float() - golden("A_full", "samples")).abs().max() < 0.03


def test_rope_and_position_tables():
    q, want = (torch.tensor(GOLDEN[f"rope/{k}"]) for k in ("q", "q_out"))
    cos, sin = rope_tables(q.shape[1], q.shape[-1])
    got = rotate(q.transpose(1, 2), cos, sin).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        sincos_positions(64, 4), torch.tensor(GOLDEN["sincos/dim64_grid4"]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", [*(f"ditgen_{case}" for case in CASES), "mae_enc_b8_2222"])
def test_round_trip_is_bit_exact(name, tmp_path):
    source = DATA / "artifacts" / name / "params_ema"
    metadata = json.loads((source / "metadata.json").read_text())
    save_official(load_official(source), tmp_path, metadata)
    assert (tmp_path / "ema_params.msgpack").read_bytes() == (source / "ema_params.msgpack").read_bytes()
    assert json.loads((tmp_path / "metadata.json").read_text()) == metadata


def test_a_released_encoder_gives_features():
    net = dg.load_official(DATA / "artifacts" / "mae_enc_b8_2222")
    assert isinstance(net, dg.features.ResNetMAE)
    assert net.features(torch.randn(2, 4, 32, 32))["layer1_mean"].shape == (2, 1, 8)
    save = pytest.raises(dg.InputError, match="the model is of class Linear: only DiT")
    with save:
        save_official(torch.nn.Linear(2, 2), "nowhere")


@pytest.mark.slow
def test_peak_memory_of_loading(tmp_path):
    """Loading a few hundred megabytes takes at most 1.3 times their size."""
    net = dg.generators.DiT(hidden_size=1024, depth=4, num_heads=16, style_codebooks=2)
    size = sum(p.numel() * 4 for p in net.parameters())
    assert size > 250e6
    save_official(net, tmp_path)
    code = """
import sys, driftgen as dg
from driftgen.interop import official
from tests.support.helpers import peak
before = peak()
net = dg.load_official(sys.argv[1])
print(peak() - before)
"""
    done = run_code(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert size < int(done.stdout) < 1.3 * size


# --- the file format ------------------------------------------------------------------------------------


def test_msgpack_types_and_chunks(tmp_path):
    import msgpack

    tensors = {"a/w": torch.randn(3, 2).bfloat16(), "a/n": torch.arange(4), "e": torch.empty(0, 3)}
    tensors["s"] = torch.tensor(2.5)
    write_parameters(tmp_path / "p", tensors)
    back = read_parameters(tmp_path / "p")
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)

    # A chunked array, as Flax writes large ones, and a scalar of extension type 3.
    def piece(values, code=1):
        array = np.asarray(values, np.float32)
        return msgpack.ExtType(code, msgpack.packb((array.shape, "float32", array.tobytes())))

    chunks = {"0": piece([0, 1, 2, 3]), "1": piece([4, 5])}
    big = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": chunks}
    tree = {"big": big, "one": piece(7.0, 3), "z": msgpack.ExtType(2, msgpack.packb((1.0, -2.0)))}
    (tmp_path / "q").write_bytes(msgpack.packb(tree))
    back = read_parameters(tmp_path / "q")
    assert torch.equal(back["big"], torch.arange(6.0).reshape(2, 3))
    assert back["one"].item() == 7
    assert back["z"].item() == 1 - 2j

    wrong = msgpack.ExtType(1, msgpack.packb(((3,), "float32", b"1234")))
    del chunks["1"]
    for tree, message in (
        ({"w": wrong}, "an array of shape .3. and dtype float32 has 4 bytes, expected 12"),
        ({"big": big}, "an array of shape .2, 3. has chunks of 16 bytes, expected 24"),
        ({"w": msgpack.ExtType(9, b"12345678")}, "extension type 9"),
        ({"w": 3}, "w is not an array but int"),
        ([1], "does not hold a tree"),
    ):
        (tmp_path / "q").write_bytes(msgpack.packb(tree))
        fails(lambda: read_parameters(tmp_path / "q"), message)
    (tmp_path / "q").write_bytes(b"")
    fails(lambda: read_parameters(tmp_path / "q"), "q is empty")


def broken(tmp_path, change):
    folder = tmp_path / "model"
    shutil.copytree(artifact("A_full") / "params_ema", folder)
    change(folder)
    with pytest.raises(dg.InputError, match=r".") as error:
        load_official(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_metadata(**changes):
    def change(folder):
        path = folder / "metadata.json"
        record = json.loads(path.read_text())
        for key, value in changes.items():
            place = record if key in ("kind", "model_config") else record["model_config"]
            place[key] = value
        path.write_text(json.dumps(record))

    return change


def edit_parameters(edit):
    def change(folder):
        parameters = read_parameters(folder / "ema_params.msgpack")
        edit(parameters)
        write_parameters(folder / "ema_params.msgpack", parameters)

    return change


def truncate(folder):
    path = folder / "ema_params.msgpack"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, "ends too early: it is truncated"),
        (lambda f: (f / "ema_params.msgpack").unlink(), "ema_params.msgpack does not exist"),
        (
            lambda f: (f / "ema_params.msgpack").write_bytes(b"\xc1garbage"),
            "cannot be read as a flax parameter file",
        ),
        (lambda f: (f / "metadata.json").unlink(), "holds no released model"),
        (lambda f: (f / "metadata.json").write_text("{"), "metadata.json cannot be read"),
        (edit_metadata(model_config=None), "holds no model_config"),
        (edit_metadata(kind="classifier"), "is of kind 'classifier'"),
        (edit_metadata(kind="mae"), "model_config lacks 'base_channels'"),
        (edit_metadata(patch_size=3), "patch_size=3 does not divide input_size=8"),
        (edit_metadata(hidden_size=128, cond_dim=128), "has shape [10, 64], expected [10, 128]"),
        (edit_metadata(depth=3), "missing: LightningDiT_0/blocks_2/"),
        (edit_parameters(lambda p: p.pop("RMSNorm_0/weight")), "missing: RMSNorm_0/weight"),
        (edit_parameters(lambda p: p.update({"extra/w": torch.ones(1)})), "unknown: extra/w"),
    ],
)
def test_broken_artifacts(tmp_path, change, message):
    assert message in broken(tmp_path, change)


# --- the network ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "millions"), [("B/2", 133), ("L/2", 463), ("B/16", 134), ("L/16", 464)])
def test_parameter_counts(preset, millions):
    with torch.device("meta"):
        net = dg.generators.DiT.preset(preset)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(millions * 1e6, rel=5e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_256_image_tokens(preset):
    assert DiTConfig(**PRESETS[preset]).tokens == 256


def test_starts_at_zero_and_with_sincos_positions():
    net = dg.generators.DiT(**TINY)
    assert (net(net.sample_noise(2), torch.tensor([1, 2])) == 0).all()
    torch.testing.assert_close(net.positions[0], sincos_positions(64, 4))


def test_patches():
    images = torch.randn(2, 3, 8, 8)
    tokens = patchify(images, 4)
    assert tokens.shape == (2, 4, 48)
    assert torch.equal(
        tokens[0, 1, :3], images[0, :, 0, 4]
    )  # second patch of the first row, channels innermost
    assert torch.equal(unpatchify(tokens, 4, 3), images)


@pytest.mark.slow
def test_compiles_whole_with_a_dynamic_batch():
    net = tiny()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (2, 3, 5):
        noise, labels = net.sample_noise(n), torch.arange(n)
        torch.testing.assert_close(compiled(noise, labels, torch.full((n,), 1.5)), net(noise, labels, 1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 3}, "patch_size=3 does not divide input_size=8"),
        ({"num_heads": 5}, "num_heads=5 must divide hidden_size=64"),
        ({"depth": 0}, "depth=0 is too small"),
        ({"qk_norm": "rm"}, "qk_norm='rm' is not known: did you mean 'rms'"),
        ({"mlp": "relu"}, "mlp='relu' is not known"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(dg.InputError, match=r".") as error:
        dg.generators.DiT(**TINY | options)
    assert message in str(error.value)
