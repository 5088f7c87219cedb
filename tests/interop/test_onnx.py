"""Exported models: agreement with PyTorch in onnxruntime and torch.export, metadata, weights, errors."""

import copy
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import driftgen as dg
from driftgen.generators import ImageMLP, Noise
from driftgen.interop import onnx as exporter
from driftgen.interop.export_graph import make_graph
from driftgen.interop.onnx import export_model, export_onnx, export_pt2
from driftgen.interop.onnx_weights import compress_weights
from driftgen.ops import dispatch
from driftgen.support.int8_weights import LEAST, SCALE, dequantize, quantize
from driftgen.support.portable_noise import NAME, portable_noise
from tests.support import exported
from tests.support.exported import expected, inputs_of, open_onnx, open_pt2
from tests.support.helpers import fails
from tests.support.libraries import import_library
from tests.support.pipelines import Own

TOLERANCE = 1e-4
OPENERS = {"onnx": open_onnx, "pt2": open_pt2}
MODELS = {
    "dit": exported.dit,
    "unet": exported.unet,
    "mlp": exported.mlp,
    "unet1d": exported.policy,
    "unet1d-image": lambda: exported.policy(image=True),
    "transformer": lambda: exported.policy("transformer"),
    "chunk-mlp": lambda: exported.policy("chunk-mlp"),
    "regression": lambda: exported.policy(method="regression"),
}


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Import the libraries of the exporter before the first test is timed."""
    import_library("onnxruntime", "InferenceSession")
    import_library("onnxscript", "ir")


@pytest.fixture(scope="module")
def in_onnx(tmp_path_factory):
    """Return a function: the model of a name and its ONNX file, written once."""
    folder = tmp_path_factory.mktemp("onnx")

    @cache
    def export(name):
        torch.manual_seed(0)
        model = MODELS[name]()
        return model, export_onnx(model, folder / f"{name}.onnx")

    return export


def compare(model, path, tolerance=TOLERANCE):
    """Assert that an exported file agrees with its model for batches of 1 and 5; return its metadata."""
    call, metadata = OPENERS[path.suffix[1:]](path)
    for n in (1, 5):
        inputs = inputs_of(metadata, n)
        right, result = expected(model, inputs), call(inputs)
        assert right.std() > 0.05
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, right, rtol=0, atol=tolerance)
        assert list(result.shape[1:]) == next(iter(metadata["outputs"].values()))["shape"][1:]
        for name in inputs:  # each of them has an effect
            other = {**inputs, name: inputs_of(metadata, n, seed=1)[name]}
            wrong = expected(model, other)
            if not np.array_equal(inputs[name], other[name]):
                assert np.abs(wrong - right).max() > 3 * tolerance, name
    assert str(Path(dg.__file__).parent).encode() not in path.read_bytes()
    return metadata


# --- agreement ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_agrees_with_pytorch(name, in_onnx):
    assert compare(*in_onnx(name))["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mlp"])
def test_a_program_agrees_with_pytorch(name, tmp_path):
    model = MODELS[name]()
    compare(model, export_pt2(model, tmp_path / "model.pt2"))


def test_a_program_of_a_small_network_agrees_with_pytorch(tmp_path):
    model = exported.mlp(depth=1)
    metadata = compare(model, export_pt2(model, tmp_path / "model.pt2"))
    assert metadata == make_graph(model).metadata | {"dtype": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd-vae", "tiny"])
@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_the_decoder_of_a_latent_model_is_included(kind, suffix, tmp_path):
    pipe = exported.latent(tmp_path, kind)
    pipe.tokenizer.batch_size = 2
    path = export_model(pipe, tmp_path / f"model.{suffix}", format=suffix)
    metadata = compare(pipe, path)
    most = 63 if (kind, suffix) == ("sd-vae", "pt2") else 70  # a condition in diffusers' upsampling
    call, _ = OPENERS[suffix](path)
    assert len(call(inputs_of(metadata, most))) == most
    assert metadata["outputs"]["images"]["shape"] == ["batch", 3, 16, 16]
    assert metadata["decoder"]["kind"] == kind


def test_latents_are_the_output_without_the_decoder(tmp_path):
    pipe = exported.latent(tmp_path, "tiny")
    metadata = compare(pipe.generator, export_pt2(pipe, tmp_path / "model.pt2", decoder=False))
    assert metadata["decoder"] is None
    assert metadata["outputs"] == {"samples": {"shape": ["batch", 6, 4, 4], "dtype": "float32"}}


def test_a_generator_of_ones_own_without_a_pipeline(tmp_path):
    network = Own()
    metadata = compare_own(network, export_pt2(network, tmp_path / "own.pt2"))
    assert metadata["classes"] == {"number": None, "names": None}
    assert list(metadata["outputs"]) == ["samples"]


def compare_own(network, path):
    call, metadata = open_pt2(path)
    inputs = inputs_of(metadata | {"classes": {"number": 3}}, 5)
    np.testing.assert_allclose(call(inputs), expected(network, inputs), atol=TOLERANCE)
    return metadata


def test_a_network_alone_takes_and_returns_normalized_values():
    graph = make_graph(exported.policy(image=True).network)
    assert graph.metadata["policy"]["units"] == "normalized"
    assert graph.metadata["inputs"]["observation.image"]["shape"] == ["batch", 2, 12, 12, 3]


@pytest.mark.slow
def test_a_compiled_half_precision_model_is_exported_in_float32_and_stays_as_it_is(tmp_path):
    pipe = exported.mlp()
    single = exported.mlp()
    single.generator.load_state_dict(pipe.generator.bfloat16().state_dict())
    pipe.compile()
    compare(single, export_pt2(pipe, tmp_path / "model.pt2"))
    assert next(pipe.generator.parameters()).dtype == torch.bfloat16
    assert pipe.generator._compiled_call_impl is not None


@pytest.mark.slow
def test_ops_are_in_their_plain_form(tmp_path, monkeypatch):
    """Even where kernels run on the device of the graph."""
    monkeypatch.setattr(dispatch, "DEVICES", {"cpu"})
    monkeypatch.setattr(dispatch, "_can_run", lambda device: True)
    pipe = exported.unet()
    pipe.generator.to(memory_format=torch.channels_last)
    program = torch.export.load(export_pt2(pipe, tmp_path / "model.pt2"))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.group_norm.default" in operators
    assert not [name for name in operators if "driftgen" in name]


# --- metadata -------------------------------------------------------------------------------------------


def test_metadata_of_a_generator():
    metadata = make_graph(exported.dit()).metadata
    assert json.loads(json.dumps(metadata)) == metadata == {
        "format": "driftgen",
        "version": 1,
        "driftgen": dg.__version__,
        "kind": "generator",
        "architecture": "DiT",
        "inputs": {
            "noise": {"shape": ["batch", 3, 8, 8], "dtype": "float32"},
            "style": {"shape": ["batch", 2], "dtype": "int64"},
            "labels": {"shape": ["batch"], "dtype": "int64"},
            "alpha": {"shape": ["batch"], "dtype": "float32"},
        },
        "outputs": {"images": {"shape": ["batch", 3, 8, 8], "dtype": "float32", "range": [-1, 1]}},
        "noise": {
            "generator": NAME,
            "tensors": [
                {"input": "noise", "shape": [3, 8, 8], "distribution": "normal"},
                {"input": "style", "shape": [2], "distribution": "integers", "entries": 64},
            ],
        },
        "classes": {"number": 4, "names": exported.NAMES},
        "guidance": {"default": 1.5, "range": [1.0, 4.0]},
        "decoder": None,
        "source": {"guidance_range": [1.0, 4.0]},
    }  # fmt: skip
    noise = portable_noise(metadata["noise"]["tensors"], 3, seed=0)
    graph = make_graph(exported.dit())
    assert {name: (x.shape, str(x.dtype)) for name, x in noise.items()} == {
        name: (tuple(graph.inputs[name].shape), metadata["inputs"][name]["dtype"]) for name in noise
    }


def test_metadata_of_a_policy():
    metadata = make_graph(exported.policy(image=True)).metadata
    assert metadata["kind"] == "policy"
    assert metadata["inputs"] == {
        "noise": {"shape": ["batch", 8, 2], "dtype": "float32"},
        "observation.state": {"shape": ["batch", 2, 3], "dtype": "float32"},
        "observation.image": {"shape": ["batch", 2, 16, 14, 3], "dtype": "uint8"},
    }
    assert metadata["policy"] == {
        "units": "environment",
        "method": "drifting",
        "horizon": 8,
        "observed": 2,
        "executed": 4,
        "first_action": 1,
    }
    assert metadata["noise"]["tensors"] == [{"input": "noise", "shape": [8, 2], "distribution": "normal"}]
    regression = make_graph(exported.policy(method="regression")).metadata
    assert regression["noise"]["tensors"] == []
    assert list(regression["inputs"]) == ["observation.state"]


# --- weights of fewer bits --------------------------------------------------------------------------------


def rounded(weight, dtype):
    if weight.ndim < 2 or weight.numel() < LEAST:
        return weight
    if dtype == torch.float16:
        return weight.half().float()
    stored = quantize({"w": weight})
    return dequantize(stored["w"], stored["w" + SCALE])


# The largest change of an image of [-1, 1] by the rounding of the weights of these networks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bound", "ratio"), [("float16", 4e-3, 0.62), (torch.int8, 0.1, 0.45)], ids=["float16", "int8"]
)
@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_small_weights_are_those_rounded_in_pytorch(name, dtype, bound, ratio, in_onnx, tmp_path):
    kind = torch.float16 if dtype == "float16" else dtype
    onnx = import_library("onnx", "load")
    model, whole = in_onnx(name)
    model, small = copy.deepcopy(model), tmp_path / "small.onnx"
    if name == "mlp":
        export_onnx(model, small, dtype=dtype)
        assert open_onnx(small)[1]["dtype"] == str(kind).removeprefix("torch.")
    else:
        graph = onnx.load(whole)
        compress_weights(graph, kind)
        small.write_bytes(graph.SerializeToString())
    assert small.stat().st_size < ratio * whole.stat().st_size
    inputs = inputs_of(open_onnx(whole)[1], 16)
    exact, result = open_onnx(whole)[0](inputs), open_onnx(small)[0](inputs)
    assert 0 < np.abs(result - exact).max() < bound
    for parameter in model.generator.parameters():
        parameter.data = rounded(parameter.data, kind)
    compare(model, small)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_each_weight_is_followed_by_its_conversion(dtype):
    onnx = import_library("onnx", "helper")
    runtime = import_library("onnxruntime", "InferenceSession")
    helper, kind = onnx.helper, onnx.TensorProto
    random = np.random.default_rng(0)
    matrix = random.normal(size=(32, 48)).astype(np.float32) * np.linspace(0.01, 10, 48, dtype=np.float32)
    table = random.normal(size=(32, 48)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "matrix"], ["y"]),
        helper.make_node("Add", ["y", "table"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", kind.FLOAT, [32, 32])],
        [helper.make_tensor_value_info("z", kind.FLOAT, [32, 48])],
        [onnx.numpy_helper.from_array(a, n) for n, a in (("matrix", matrix), ("table", table))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    compress_weights(model, dtype)
    onnx.checker.check_model(model)
    stored = {i.name: i for i in model.graph.initializer}
    assert stored["table"].data_type == kind.FLOAT  # a table of constants, no weight
    assert stored["matrix.stored"].data_type == (kind.FLOAT16 if dtype == torch.float16 else kind.INT8)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.eye(32, dtype=np.float32)})
    # One scale per output channel, the last axis: half a step of the channel's largest weight.
    step = 2.0**-11 * np.abs(matrix) if dtype == torch.float16 else np.abs(matrix).max(0) / 254
    assert (np.abs(result - table - matrix) <= step + 1e-5).all()


@pytest.mark.slow
def test_weights_beyond_float16_and_beyond_two_gigabytes(tmp_path, monkeypatch):
    pipe = exported.mlp()
    monkeypatch.setattr(exporter, "LARGEST", 1000)
    fails(lambda: export_onnx(pipe, tmp_path / "x.onnx"), "GB, an ONNX file holds 2 GB: choose dtype float16")
    pipe.generator.layers[1].weight.data[0, 0] = 1e6
    fails(lambda: export_onnx(pipe, tmp_path / "x.onnx", dtype="float16"), "has values beyond 65504")
    assert not list(tmp_path.iterdir())


# --- errors ---------------------------------------------------------------------------------------------


def test_wrong_arguments_are_one_line(tmp_path, monkeypatch):
    pipe, path = exported.mlp(), tmp_path / "x.onnx"
    fails(lambda: export_onnx(pipe, tmp_path / "x.pt2"), "a file of format onnx must be named NAME.onnx")
    fails(lambda: export_pt2(pipe, path), "a file of format pt2 must be named NAME.pt2")
    fails(lambda: export_onnx(pipe, path, dtype=torch.bfloat16), "dtype='bfloat16' is not known: .*float16")
    fails(lambda: export_model(pipe, tmp_path / "x.pt2", format="pt2", dtype="int8"), "pt2 are float32")
    fails(lambda: export_model(pipe, path, format="tflite"), "format='tflite'")
    for wrong in (nn.Linear(2, 2), "digits", None):
        fails(lambda wrong=wrong: export_onnx(wrong, path), "cannot be exported: give a DriftPipeline")
    diffusion = exported.policy(method="diffusion").network
    fails(lambda: export_onnx(diffusion, path), "a diffusion policy takes many network calls")
    path.write_text("mine")
    fails(lambda: export_onnx(pipe, path), "x.onnx exists already: choose another file")
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    fails(lambda: export_onnx(pipe, path), "exists already")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    fails(lambda: export_onnx(pipe, tmp_path / "y.onnx"), r"onnxscript is not installed.*driftgen\[onnx\]")


class ReadsValues(Own):
    """A network that no graph can hold: it reads its input."""

    def forward(self, noise, labels, alpha):
        return noise.gaussian * (1.0 if float(alpha.sum()) > 0 else 2.0) * self.scale


class Styled(Own):
    def sample_noise(self, n, generator=None):
        return Noise(torch.zeros(n, 3, 4, 4), torch.zeros(n, 2, dtype=torch.long))


def test_networks_that_cannot_be_exported_are_one_line(tmp_path):
    fails(lambda: export_pt2(ReadsValues(), tmp_path / "x.pt2"), "ReadsValues cannot be exported to pt2: ")
    fails(lambda: export_pt2(Styled(), tmp_path / "x.pt2"), "Styled has styles, but no config.style_entries")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def full(program, path, **options):
        Path(path).write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", full)
    network = ImageMLP(input_size=4, hidden_size=8, depth=1)
    with pytest.raises(OSError, match="No space left"):
        export_pt2(network, tmp_path / "x.pt2")
    assert not list(tmp_path.iterdir())


# --- the command ----------------------------------------------------------------------------------------


def test_the_command_exports_a_packaged_model_and_refuses_to_replace_it(tmp_path, here):
    out = tmp_path / "new" / "digits.pt2"
    done = here("export", "digits", out)
    assert (done.returncode, done.stdout.strip()) == (0, str(out)), done.stderr
    metadata = compare(dg.DriftPipeline.from_pretrained("digits"), out)
    assert metadata["classes"] == {"number": 10, "names": list("0123456789")}
    before = out.read_bytes()
    again = here("export", "digits", out, "--format", "pt2")
    assert again.returncode == 2
    message = f"{out} exists already: choose another file (driftgen explain file-exists)"
    assert again.stderr.strip() == f"driftgen: error: {message}"
    assert out.read_bytes() == before


@pytest.mark.slow
def test_the_command_exports_a_policy_to_onnx(tmp_path, here):
    policy = exported.policy()
    policy.save_pretrained(tmp_path / "policy")
    done = here("export", tmp_path / "policy", tmp_path / "policy.onnx")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    compare(policy, tmp_path / "policy.onnx")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing", "x.onnx"], "missing does not exist"),
        (["digits", "x.bin"], "x.bin: a file of format onnx must be named NAME.onnx"),
        (["digits", "x.onnx", "--dtype", "int4"], "dtype='int4' is not known"),
        (["digits", "x.onnx", "--format", "xyz"], "format='xyz' is not known"),
        (["text", "x.onnx"], "text"),
        (["folder", "x.onnx"], "folder holds no model"),
        (["digits", "text/x.pt2", "--format", "pt2"], "text"),
    ],
)
def test_wrong_words_are_one_line(words, message, tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text")
    Path("folder").mkdir()
    done = here("export", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "text"]
