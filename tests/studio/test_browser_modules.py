"""Modules of the page that generates images, under Node: the model, its inputs, walks and pixels."""

import numpy as np
import pytest
import torch

from driftgen.interop.export_graph import make_graph
from driftgen.studio.browser_page import STUDIO
from driftgen.support.images import to_uint8
from driftgen.support.portable_noise import portable_noise
from tests.support import exported
from tests.support.node import needs_node, run_node

pytestmark = needs_node


def run(code, inputs, *modules):
    return run_node(code, inputs, modules, STUDIO / "browser")


def read(*records):
    """Read records of models; a sentence for each that is of no use."""
    code = """
      const read = (record) => { try { return model.readModel(record); } catch (e) { return e.message; } };
      return inputs.map(read);
    """
    return run(code, records, "model")


@pytest.fixture(scope="module")
def record():
    torch.manual_seed(0)
    return make_graph(exported.dit()).metadata | {"name": "small", "bytes": 9}


def test_a_model_is_what_its_metadata_says(record):
    no_names = record | {"classes": {"number": 3, "names": None}, "guidance": {"default": 6, "range": None}}
    plain = record | {"guidance": {"default": 1.0, "range": [1.0, 1.0]}}
    found, unnamed, unguided = read(record, no_names, plain)
    assert found == {
        "name": "small",
        "architecture": "DiT",
        "bytes": 9,
        "channels": 3,
        "height": 8,
        "width": 8,
        "classes": exported.NAMES,
        "guidance": {"low": 1, "high": 4, "preset": 1.5, "takes": True},
        "tensors": record["noise"]["tensors"],
    }
    assert unnamed["classes"] == ["0", "1", "2"]
    assert unnamed["guidance"] == {"low": 1, "high": 6, "preset": 6, "takes": True}
    assert unguided["guidance"]["takes"] is False


def test_models_of_no_use_give_a_sentence(record):
    policy = make_graph(exported.policy()).metadata
    other = record | {"noise": record["noise"] | {"generator": "mersenne"}}
    wide = record | {"outputs": {"images": {"shape": ["batch", 4, 8, 8]}}}
    found = read(policy, {}, None, other, wide)
    assert found[:3] == ["model.json does not describe a generator of images."] * 3
    assert found[3].startswith('The model takes noise of "mersenne"')
    assert found[4] == "The images have 4 channels, not 1 or 3."


def test_inputs_are_those_of_the_metadata(record):
    code = """
      const noise = portable_noise.portableNoise(inputs.noise.tensors, 2, 7, 3);
      const found = model.inputsOf(noise, [3, 1], 1.25);
      return Object.fromEntries(Object.entries(found).map(
        ([name, { type, data, dims }]) => [name, { type, dims, data: Array.from(data, Number) }]));
    """
    found = run(code, record, "model", "../portable_noise")
    assert list(found) == list(record["inputs"])
    expected = portable_noise(record["noise"]["tensors"], 2, 7, 3)
    expected |= {"labels": np.array([3, 1]), "alpha": np.full(2, 1.25, np.float32)}
    for name, about in record["inputs"].items():
        assert found[name]["dims"] == [2, *about["shape"][1:]]
        assert found[name]["type"] == about["dtype"]
        assert found[name]["data"] == expected[name].flatten().tolist()


def slerp(a, b, t):
    a, b = a.astype(np.float64), b.astype(np.float64)
    angle = np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def test_walks_are_on_the_sphere():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 300)).astype(np.float32)
    code = """
      const [a, b] = [inputs.a, inputs.b].map((values) => Float32Array.from(values));
      return [0, 0.25, 0.5, 1].map((t) => walk.slerp(a, b, t)).concat([walk.slerp(a, a, 0.3)]);
    """
    *found, same = run(code, {"a": a.tolist(), "b": b.tolist()}, "walk")
    for t, noise in zip((0, 0.25, 0.5, 1), found, strict=True):
        np.testing.assert_allclose(noise, slerp(a, b, t), rtol=0, atol=1e-6)
    assert found[0] == a.tolist()
    assert found[3] == b.tolist()
    assert same == pytest.approx(a.tolist(), abs=1e-6)
    norms = [np.linalg.norm(noise) for noise in found]
    assert norms[1] == pytest.approx(norms[0] + 0.25 * (norms[3] - norms[0]), rel=0.02)


def test_a_walk_goes_around_and_keeps_integers_of_the_nearer_noise():
    places = run("return [0, 0.4, 1.6, 3.5, 4].map((place) => walk.around(place, 4));", None, "walk")
    assert [(p["left"], p["right"], p["nearer"]) for p in places] == [
        *((0, 1, 0), (0, 1, 0), (1, 2, 2), (3, 0, 0), (0, 1, 0)),
    ]
    assert [p["way"] for p in places] == pytest.approx([0, 0.4, 0.6, 0.5, 0])
    code = """
      const noise = (value) => ({
        noise: { data: Float32Array.of(value, 1 - value), dims: [1, 2] },
        style: { data: BigInt64Array.of(BigInt(value)), dims: [1, 1] },
      });
      return [0.4, 0.6].map((t) => {
        const { noise: x, style } = walk.between(noise(0), noise(1), t);
        return [Number(style.data[0]), Array.from(x.data), x.dims, style.dims];
      });
    """
    (first, before, *dims), (second, after, *_) = run(code, None, "walk")
    assert (first, second, dims) == (0, 1, [[1, 2], [1, 1]])
    assert before == pytest.approx(after[::-1], abs=1e-6)
    assert before[0] < before[1]


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_the_pipeline(channels):
    """Values at and around each step of 1/255, beyond the range, and NaN."""
    steps = np.arange(256) / 127.5 - 1
    odd = [-1, 1, -1.5, 1.5, np.nan, np.inf, -np.inf, 0, -0.0]
    values = np.concatenate([steps, steps - 1e-7, steps + 1e-7, odd]).astype(np.float32)
    values = np.resize(values, 2 * channels * 12 * 25).astype(np.float32)
    words = values.view(np.uint32).tolist()  # JSON has no NaN
    code = f"""
      const data = new Float32Array(Uint32Array.from(inputs).buffer);
      const size = {{ channels: {channels}, height: 12, width: 25 }};
      return [0, 1].map((i) => pixels.toPixels(data, i, size));
    """
    found = np.array(run(code, words, "pixels")).reshape(2, 12, 25, 4)
    expected = to_uint8(torch.from_numpy(values).view(2, channels, 12, 25))
    assert (found[..., 3] == 255).all()
    np.testing.assert_array_equal(found[..., :3], np.broadcast_to(expected, (2, 12, 25, 3)))


def test_batches_and_grids():
    code = "return inputs.map(([remaining, milliseconds]) => model.batchSize(remaining, milliseconds));"
    assert run(code, [[20, 0.5], [20, 40], [20, 1000], [1, 0.01]], "model") == [20, 5, 1, 1]
    code = "return inputs.map(([count, narrow]) => pixels.columnsOf(count, narrow));"
    assert run(code, [[1, True], [4, False], [10, False], [50, False], [50, True]], "pixels") == [
        1,
        2,
        5,
        10,
        5,
    ]
    assert run("return [8, 32, 256].map(pixels.zoomOf);", None, "pixels") == [16, 4, 1]


def test_seeds():
    code = """
      globalThis.document = { getElementById: () => ({ classList: { toggle() {} } }) };
      return inputs.map((value) => controls.readSeed({ value }));
    """
    texts = ["0", " 42 ", "9007199254740991", "9007199254740992", "-1", "1.5", "", "1e3", "x", "0x10"]
    assert run(code, texts, "controls") == [0, 42, 2**53 - 1, *[None] * 7]
