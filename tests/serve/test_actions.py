"""A policy as a service: observations in several forms, actions of a seed, wrong observations."""

import asyncio
import base64
import io
import json
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import driftgen as dg
from driftgen.generators import PolicyNetwork
from driftgen.serve.observation_body import parse_observation
from tests.support.helpers import fails
from tests.support.libraries import import_library
from tests.support.served import serve_here

STATE, CAMERA = "observation.state", "observation.image"
RANGE = {"low": [0.0, 0.0], "high": [10.0, 10.0]}


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx", "jinja2"):
        import_library(name, "__doc__")
    import driftgen.serve.web_app  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    network = PolicyNetwork(
        {STATE: (2,), CAMERA: (12, 16, 3)}, 2, {"action": RANGE, STATE: RANGE}, horizon=8, observed=2,
        executed=3, options={"widths": [16], "groups": 4, "kernel_size": 3}, image_widths=(8, 16),
        keypoints=4, image_features=8,
    )  # fmt: skip
    return dg.DriftingPolicy(network).save_pretrained(tmp_path_factory.mktemp("policy") / "m")


def scene(seed):
    random = np.random.default_rng(seed)
    return {
        STATE: random.random((2, 2), np.float32) * 10,
        CAMERA: random.integers(0, 256, (2, 12, 16, 3)).astype(np.uint8),
    }


def listed(observation):
    return {key: value.tolist() for key, value in observation.items()}


def test_actions_are_those_of_the_policy_whatever_the_batch(folder):
    policy = dg.DriftingPolicy.from_pretrained(folder)
    scenes = [scene(seed) for seed in range(11)]
    want = [
        policy.predict({key: value[None] for key, value in observation.items()}, seed=i)[0]
        for i, observation in enumerate(scenes)
    ]

    async def scenario(client, app):
        bodies = [{"observation": listed(o), "seed": i} for i, o in enumerate(scenes)]
        alone = await client.post("/v1/actions", json=bodies[0])
        answers = await asyncio.gather(*(client.post("/v1/actions", json=body) for body in bodies))
        for answer, chunk in zip([alone, *answers], [want[0], *want], strict=True):
            assert answer.status_code == 200, answer.text
            body = answer.json()
            np.testing.assert_allclose(body["chunk"], chunk, atol=1e-4)
            assert body["actions"] == body["chunk"][1:4]  # from the latest of two observations on
        text = (await client.get("/metrics")).text
        assert 'driftgen_latency_seconds{path="/v1/actions",quantile="0.99"}' in text
        assert "driftgen_rows_total 12.0" in text
        assert (await client.get("/healthz")).json()["kind"] == "actions"
        assert "observation.state&#34;: [0.0, 0.0]" in (await client.get("/docs")).text
        answer = await client.post("/v1/images", json={})
        assert answer.status_code == 404
        assert answer.json() == {"error": "this server answers /v1/actions: see /docs"}
        answer = await client.post("/v1/actions", json={"observation": {}})
        assert (answer.status_code, "observation.state is missing" in answer.json()["error"]) == (422, True)
        answer = await client.post("/v1/actions", json={"seed": 1})
        assert (answer.status_code, answer.json()["error"]) == (422, "observation is missing")
        unseeded = [(await client.post("/v1/actions", json={"observation": listed(scenes[0])})).json()] * 2
        assert unseeded[0]["chunk"] != want[0].tolist()

    serve_here(scenario, folder)


def coded(data):
    return base64.b64encode(data).decode()


def picture(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return coded(file.getvalue())


SHAPES = {STATE: [2], CAMERA: [12, 16, 3]}


def test_forms_of_an_observation():
    want = scene(0)
    raw = {"data": coded(want[CAMERA].tobytes()), "dtype": "uint8", "shape": [2, 12, 16, 3]}
    files = [picture(frame) for frame in want[CAMERA]]
    floats = (want[CAMERA] / 255).tolist()
    first = np.moveaxis(want[CAMERA], -1, 1) / 255
    for camera in (
        want[CAMERA].tolist(),
        raw,
        files,
        [f"data:image/png;base64,{f}" for f in files],
        floats,
        first.tolist(),
    ):
        got = parse_observation({STATE: want[STATE].tolist(), CAMERA: camera, "task": "push"}, SHAPES, 2)
        assert got.keys() == SHAPES.keys()
        assert got[STATE].dtype == np.float32
        assert got[CAMERA].dtype == np.uint8
        assert np.array_equal(got[STATE], want[STATE])
        assert np.array_equal(got[CAMERA], want[CAMERA])
    single = parse_observation({STATE: [1, 2], CAMERA: files[0]}, SHAPES, 2)
    assert single[STATE].tolist() == [[1.0, 2.0]] * 2  # one step stands for the history
    assert np.array_equal(single[CAMERA], np.stack([want[CAMERA][0]] * 2))
    jpeg = parse_observation({STATE: [1, 2], CAMERA: picture(want[CAMERA][0], "JPEG")}, SHAPES, 2)
    assert jpeg[CAMERA].shape == (2, 12, 16, 3)


def bomb():
    """A PNG file that says it is 60000 pixels wide."""
    data = bytearray(base64.b64decode(picture(np.zeros((12, 16, 3), np.uint8))))
    data[16:20] = (60_000).to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return coded(bytes(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({STATE: [1]}, r"observation.state has shape \[1\], expected \[2\] or \[2, 2\]"),
        ({STATE: [[1, 2]] * 3}, "has shape"),
        ({STATE: [[1, 2], [3]]}, "nested lists of numbers, all of one length"),
        ({STATE: "12"}, "nested lists of numbers"),
        ({STATE: None}, "nested lists of numbers"),
        ({STATE: [True, False]}, "nested lists of numbers"),
        ({STATE: [float("nan"), 0]}, "NaN or infinite"),
        ({STATE: [1e300, 0]}, "NaN or infinite"),
        ({STATE: json.loads("[" * 900 + "]" * 900)}, "nested lists of numbers"),
        ({STATE: [[[1], 2], [3, 4]]}, "nested lists of numbers"),
        ({STATE: [10**400, 0]}, "nested lists of numbers"),
        ({STATE: {"data": "AAAA", "dtype": "float32", "shape": [2]}}, "data has 3 bytes, .* need 8"),
        ({STATE: {"data": "!", "dtype": "float32", "shape": [2]}}, "is no base64"),
        ({STATE: {"data": "", "dtype": "object", "shape": [2]}}, "dtype='object' must be one of"),
        ({STATE: {"data": "", "dtype": "uint8", "shape": [-1]}}, "shape="),
        ({STATE: {"data": ""}}, "must have data, dtype and shape"),
        ({CAMERA: "AAAA"}, "cannot be read as a PNG or JPEG file"),
        ({CAMERA: "é"}, "is no base64"),
        ({CAMERA: bomb()}, "60000x12 pixels, expected 16x12"),
        ({CAMERA: picture(np.zeros((8, 8, 3), np.uint8))}, "8x8 pixels, expected 16x12"),
        ({CAMERA: picture(np.zeros((12, 16, 3), np.uint8), "GIF")}, "cannot be read as a PNG or JPEG file"),
        ({CAMERA: np.full((12, 16, 3), 256).tolist()}, "values from 256 to 256: give bytes"),
        ({CAMERA: np.full((12, 16, 3), 1.5).tolist()}, "values from 1.5 to 1.5"),
        ({CAMERA: [[1, 2]]}, "has shape"),
    ],
)  # fmt: skip
def test_wrong_observations(change, message):
    given = listed(scene(0)) | change
    fails(lambda: parse_observation(given, SHAPES, 2), message)
