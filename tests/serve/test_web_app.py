"""The HTTP interface: images of a seed, formats, limits, tokens, errors, metrics, the page."""

import asyncio
import base64
import io
import json
import threading

import numpy as np
import pytest
from PIL import Image

import driftgen as dg
from driftgen.serve.served_model import ServedImages
from tests.support.libraries import import_library
from tests.support.served import serve_here, until


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx", "jinja2"):
        import_library(name, "__doc__")
    import driftgen.serve.web_app  # noqa: F401


def pixels(answer):
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return np.stack([np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in body["images"]])


def sampled(labels, seed, number=None, guidance=None, batch_size=8):
    pipe = dg.DriftPipeline.from_pretrained("digits", batch_size=batch_size)
    return pipe(labels, seed=seed, num_images=number, guidance=guidance, output="numpy")[..., 0]


def close(ours, other):
    """Equal up to one of 255 levels, which rounding may change between batch sizes."""
    return np.abs(ours.astype(int) - other.astype(int)).max() <= 1


def test_images_are_those_of_the_pipeline():
    async def scenario(client, app):
        answer = await client.post("/v1/images", json={"labels": [3, "5"], "seed": 7, "number": 5})
        assert close(pixels(answer), sampled([3, 5], 7, 5))
        body = answer.json()
        assert (body["labels"], body["classes"]) == ([3, 5, 3, 5, 3], ["3", "5", "3", "5", "3"])
        assert (body["seed"], body["guidance"], body["format"]) == (7, 1.5, "png")
        assert (body["width"], body["height"]) == (8, 8)
        guided = await client.post("/v1/images", json={"labels": 3, "seed": 7, "guidance": 1})
        assert close(pixels(guided), sampled(3, 7, guidance=1))
        drawn = [(await client.post("/v1/images", json={})).json() for _ in range(2)]
        assert len(drawn[0]["images"]) == 1
        assert drawn[0]["seed"] != drawn[1]["seed"]
        again = await client.post("/v1/images", json={"seed": drawn[0]["seed"]})
        assert again.json()["images"] == drawn[0]["images"]

    serve_here(scenario)


@pytest.mark.parametrize("exact", [False, True])
def test_the_same_seed_gives_the_same_image_whatever_the_batch(exact):
    requests = [{"labels": i % 10, "seed": i, "number": 1 + i % 5, "guidance": 1 + i % 3} for i in range(24)]

    async def scenario(client, app):
        alone = [pixels(await client.post("/v1/images", json=request)) for request in requests]
        answers = await asyncio.gather(*(client.post("/v1/images", json=request) for request in requests))
        together = [pixels(answer) for answer in answers]
        text = (await client.get("/metrics")).text
        batches = float(text.split("driftgen_batch_rows_count ")[1].split()[0])
        rows = sum(request["number"] for request in requests)
        assert batches < 24 + rows / 2  # they did share batches
        if exact:
            assert all(map(np.array_equal, alone, together))
        else:
            assert all(map(close, alone, together))

    serve_here(scenario, exact=exact)


def test_formats():
    want = sampled([4, 9], 1)

    async def scenario(client, app):
        for name in ("png", "jpeg", "webp"):
            answer = await client.post("/v1/images", json={"labels": 4, "seed": 1, "format": name})
            data = base64.b64decode(answer.json()["images"][0])
            picture = Image.open(io.BytesIO(data))
            assert picture.format == name.upper()
            if name == "png":
                assert close(np.asarray(picture), want[0])
        for name in ("png", "jpeg", "webp"):
            headers = {"Accept": f"text/html, image/{name};q=0.9, */*"}
            answer = await client.post("/v1/images", json={"labels": 4, "seed": 1}, headers=headers)
            assert answer.headers["content-type"] == f"image/{name}"
            assert answer.headers["x-seed"] == "1"
            assert Image.open(io.BytesIO(answer.content)).format == name.upper()
        answer = await client.post("/v1/images", json={"labels": [4, 9], "seed": 1, "format": "npy"})
        arrays = [np.load(io.BytesIO(base64.b64decode(data))) for data in answer.json()["images"]]
        assert close(np.stack(arrays)[..., 0], want)
        headers = {"Accept": "application/x-npy"}
        answer = await client.post("/v1/images", json={"labels": [4, 9], "seed": 1}, headers=headers)
        assert close(np.load(io.BytesIO(answer.content))[..., 0], want)
        headers = {"Accept": "image/png"}
        answer = await client.post("/v1/images", json={"labels": [4, 9]}, headers=headers)
        assert (answer.status_code, "2 images do not fit" in answer.json()["error"]) == (422, True)
        answer = await client.post("/v1/images", json={"format": "jpeg"}, headers=headers)
        assert (answer.status_code, "format is jpeg" in answer.json()["error"]) == (422, True)

    serve_here(scenario)


WRONG = [
    (b"{", 400, "the body is not valid JSON"),
    (b"\xff\xfe", 400, "the body is not valid JSON"),
    (b"[" * 100_000, 400, "the body is not valid JSON"),
    (b"1" * 5000, 400, "the body is not valid JSON"),
    (b"[1]", 400, "must be a JSON object"),
    (b"null", 400, "must be a JSON object"),
    (b'{"colour": 1}', 422, "colour is not known: give labels, number, guidance, seed, format"),
    (b'{"labels": 10}', 422, "10 is not a class of this model, classes are 0 to 9"),
    (b'{"labels": -1}', 422, "-1 is not a class"),
    (b'{"labels": "cow"}', 422, "labels='cow' is not known"),
    (b'{"labels": []}', 422, "labels is empty"),
    (b'{"labels": 1.5}', 422, "labels=1.5"),
    (b'{"labels": true}', 422, "labels=True"),
    (b'{"labels": [[1]]}', 422, "labels=[[1]]"),
    (b'{"labels": [1, 2], "number": 1}', 422, "number=1 is less than the 2 labels"),
    (b'{"number": 1000000000}', 422, "1000000000 images are above the limit of 64"),
    (b'{"number": 1e9}', 422, "number=1000000000.0"),
    (b'{"number": 0}', 422, "number=0"),
    (b'{"number": "3"}', 422, "number='3'"),
    (b'{"guidance": NaN}', 422, "guidance=nan must be 1"),
    (b'{"guidance": Infinity}', 422, "guidance=inf must be 1"),
    (b'{"guidance": 0.5}', 422, "guidance=0.5 must be 1"),
    (b'{"guidance": 1' + b"0" * 400 + b"}", 422, "must be 1"),
    (b'{"guidance": "2"}', 422, "guidance='2'"),
    (b'{"seed": -1}', 422, "seed=-1"),
    (b'{"seed": 9223372036854775808}', 422, "seed=9223372036854775808"),
    (b'{"seed": 0.5}', 422, "seed=0.5"),
    (b'{"format": "gif"}', 422, "format='gif'"),
    (b'{"format": null}', 422, "format=None"),
    (b'{"labels": "' + b"x" * 10_000 + b'"}', 422, "labels='xxxx"),
    (b'{"seed": 0, "x": "' + b" " * 200_000 + b'"}', 413, "larger than the limit of 131,072 bytes"),
]


def test_wrong_requests_get_one_sentence():
    async def scenario(client, app):
        for body, status, message in WRONG:
            answer = await client.post("/v1/images", content=body)
            assert answer.status_code == status, (body[:60], answer.text)
            assert answer.json().keys() == {"error"}
            error = answer.json()["error"]
            assert message in error, (body[:60], error)
            assert len(error) < 400
            assert "\n" not in error
            assert "Traceback" not in error

        async def endless():
            for _ in range(10):
                yield b" " * 50_000

        answer = await client.post("/v1/images", content=endless())  # without a Content-Length
        assert answer.status_code == 413
        for method, path, status in (
            ("GET", "/v2", 404),
            ("GET", "/v1/images", 405),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, list(answer.json())) == (status, ["error"])
        answer = await client.post("/v1/actions", json={})
        assert answer.status_code == 404
        assert answer.json() == {"error": "this server answers /v1/images: see /docs"}
        assert (await client.post("/v1/images", json={"seed": 1})).status_code == 200

    serve_here(scenario, limits={"body": 2**17})


def test_the_token():
    async def scenario(client, app):
        good = {"Authorization": "Bearer s3cret"}
        wrong = [{}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}]
        wrong += [
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer "},
            {"Authorization": b"Bearer \xff"},
        ]
        for headers in wrong:
            for method, path in (("POST", "/v1/images"), ("GET", "/metrics")):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401, (headers, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json() == {"error": "the bearer token is missing or wrong"}
        assert (await client.post("/v1/images", json={}, headers=good)).status_code == 200
        assert (await client.get("/metrics", headers=good)).status_code == 200
        for path in ("/healthz", "/docs", "/openapi.json"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "s3cret" not in answer.text

    serve_here(scenario, limits={"token": "s3cret"})


@pytest.fixture
def gate(monkeypatch):
    """An event that batches of images wait for."""
    event, real = threading.Event(), ServedImages.run

    def run(self, parts):
        assert event.wait(20)
        return real(self, parts)

    monkeypatch.setattr(ServedImages, "run", run)
    yield event
    event.set()


async def waiting(client):
    return (await client.get("/healthz")).json()["waiting"]


def test_a_full_queue(gate):
    async def scenario(client, app):
        accepted = []
        for count in (8, 8, 7, 8):  # two batches at work, 15 of 16 in the queue
            accepted.append(asyncio.create_task(client.post("/v1/images", json={"number": count, "seed": 0})))
            await asyncio.sleep(0.02)
        answer = await client.post("/v1/images", json={"number": 2})
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert "the queue is full" in answer.json()["error"]
        gate.set()
        assert [(await task).status_code for task in accepted] == [200] * 4
        assert (await client.post("/v1/images", json={"number": 2})).status_code == 200

    serve_here(scenario, queue=16, limits={"images": 16})


def test_a_client_that_hangs_up_frees_its_place(gate):
    async def scenario(client, app):
        running = asyncio.create_task(client.post("/v1/images", json={"number": 8}))
        await asyncio.sleep(0.05)
        hang_up = asyncio.Event()
        body = [{"type": "http.request", "body": json.dumps({"number": 5}).encode(), "more_body": False}]

        async def receive():
            if body:
                return body.pop()
            await hang_up.wait()
            return {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/images", "headers": [], "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "raw_path": b"/v1/images", "root_path": ""}
        gone = asyncio.create_task(app(scope, receive, send))
        await asyncio.sleep(0.05)
        before = await waiting(client)
        hang_up.set()
        await gone
        assert (before, await waiting(client)) == (5, 0)
        gate.set()
        assert (await running).status_code == 200
        assert 'path="/v1/images",status="499"} 1.0' in (await client.get("/metrics")).text

    serve_here(scenario)


def test_a_failed_batch_and_a_lost_model(gate, monkeypatch):
    threads = []

    async def scenario(client, app):
        model = app.metrics.model
        threads.append(model._process)
        inside, waits = (asyncio.create_task(client.post("/v1/images", json={"number": n})) for n in (8, 3))
        await asyncio.sleep(0.05)
        model._process.kill()
        for task in (inside, waits):
            answer = await task
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert "is being restarted: try again" in answer.json()["error"]
        health = await client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "restarting")
        assert (await client.post("/v1/images", json={})).status_code == 503
        gate.set()
        await until(lambda: model.ready)
        assert (await client.post("/v1/images", json={})).status_code == 200
        assert (await client.get("/healthz")).json()["restarts"] == 1

        def fail(self, parts):
            raise RuntimeError("CUDA out of memory\nmore lines")

        monkeypatch.setattr(ServedImages, "run", fail)
        answer = await client.post("/v1/images", json={})
        assert answer.status_code == 503
        assert answer.json()["error"] == "the batch failed (RuntimeError: CUDA out of memory): try again"

    serve_here(scenario)


def test_a_stuck_model_is_restarted(gate):
    async def scenario(client, app):
        answer = await client.post("/v1/images", json={})
        assert answer.status_code == 503
        assert "did not answer within 0.3 s" in answer.json()["error"]
        gate.set()
        await until(lambda: app.metrics.model.ready)
        assert (await client.post("/v1/images", json={})).status_code == 200

    serve_here(scenario, timeout=0.3)


def test_metrics_and_the_page():
    async def scenario(client, app):
        for _ in range(3):
            await client.post("/v1/images", json={"number": 3})
        await client.post("/v1/images", json={"number": 0})
        await client.get("/nowhere")
        text = (await client.get("/metrics")).text
        for line in (
            'driftgen_requests_total{path="/v1/images",status="200"} 3.0',
            'driftgen_requests_total{path="/v1/images",status="422"} 1.0',
            'driftgen_requests_total{path="other",status="404"} 1.0',
            "driftgen_rows_total 9.0",
            "driftgen_batch_rows_sum 9.0",
            'driftgen_latency_seconds_count{path="/v1/images"} 3.0',
            "driftgen_model_ready 1.0",
            "driftgen_waiting_rows 0.0",
        ):
            assert line in text, line
        values = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith('driftgen_latency_seconds{path="/v1/images",quantile=')
        ]
        assert len(values) == 4
        assert values == sorted(values)
        page = await client.get("/docs")
        assert page.text == (await client.get("/")).text
        assert "/v1/images" in page.text
        assert "http://" not in page.text  # loads nothing from elsewhere
        assert "https://" not in page.text
        schema = (await client.get("/openapi.json")).json()
        body = schema["paths"]["/v1/images"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["properties"].keys() == {"labels", "number", "guidance", "seed", "format"}

    serve_here(scenario)


def test_a_model_that_cannot_be_loaded():
    async def scenario(client, app):
        raise AssertionError("it was served")

    with pytest.raises(dg.InputError, match="nowhere does not exist: give a folder"):
        serve_here(scenario, "nowhere")
