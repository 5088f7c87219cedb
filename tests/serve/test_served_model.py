"""The model behind a server: padded sizes, dropped requests, its process."""

import asyncio
import errno

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.serve import model_process
from driftgen.serve.batcher import UnavailableError
from driftgen.serve.image_formats import preferred_format
from driftgen.serve.model_process import ModelProcess
from driftgen.serve.served_model import ModelOptions, ServedImages
from driftgen.serve.service_metrics import QUANTILES, ServiceMetrics
from tests.support.helpers import fails
from tests.support.libraries import import_library
from tests.support.pipelines import Own, small
from tests.support.served import ModelThread, until


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2"):
        import_library(name, "__doc__")
    import driftgen.serve.web_app  # noqa: F401


def request(seed, *labels):
    return {"seed": seed, "labels": labels, "guidance": 1.5}


@pytest.mark.parametrize(("exact", "sizes"), [(False, [1, 2, 4, 6]), (True, [6])])
def test_batches_have_few_sizes(exact, sizes):
    served = ServedImages(dg.DriftPipeline(small(), batch_size=6), exact=exact)
    rows = []
    served.pipe.generator.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    served.warm_up()
    assert rows == sizes == served.describe()["sizes"]
    assert served.describe()["image_shape"] == [8, 8, 3]
    rows.clear()
    for count in (1, 2, 3, 4, 5, 6):
        served.add(count, request(count, *[0] * count), {})
        assert served.run([(count, 0, count)]).shape == (count, 8, 8, 3)
    assert rows == ([6] * 6 if exact else [1, 2, 4, 4, 6, 6])


def test_dropped_requests_leave_the_others_in_their_places():
    served = ServedImages(dg.DriftPipeline(small(), batch_size=8))
    served.warm_up()
    for ticket in range(3):
        served.add(ticket, request(ticket, 1, 2), {})
    want = [served.pipe([1, 2], seed=ticket, guidance=1.5, output="numpy") for ticket in (0, 2)]
    served.drop(1)
    served.drop(1)
    got = served.run([(0, 0, 2), (1, 0, 2), (2, 0, 2)])
    assert np.abs(got[[0, 1, 4, 5]].astype(int) - np.concatenate(want).astype(int)).max() <= 1
    assert not got[2:4].any()
    assert served.run([(1, 0, 2)]).shape == (2, 8, 8, 3)
    assert not served._requests  # nothing is kept of what is computed


def test_a_client_that_hangs_up_while_its_batch_is_put_together():
    served = ServedImages(dg.DriftPipeline(small(), batch_size=8))
    served.warm_up()

    class HangsUp(dict):
        """Requests of clients that hang up once their request has been read."""

        def get(self, ticket, default=None):
            return self.pop(ticket, default)

    served._requests = HangsUp()
    for ticket in range(2):
        served.add(ticket, request(ticket, 1), {})
    assert served.run([(0, 0, 1), (1, 0, 1)]).shape == (2, 8, 8, 3)


def test_a_generator_with_noise_of_its_own_kind_is_refused():
    network = Own()
    network.sample_noise = lambda n, generator=None: torch.zeros(n, 3, 4, 4)
    fails(lambda: ServedImages(dg.DriftPipeline(network)), "returns no Noise cannot be served")


def test_the_loss_of_the_process_is_told_once():
    async def main():
        lost = []
        model = ModelProcess(
            ModelOptions("digits", device="cpu", batch_size=2),
            on_lost=lambda: lost.append(model.ready),
            timeout=20,
            start=ModelThread,
        )
        await model.start()
        model.add(0, request(0, 1), {})
        assert (await model.run([(0, 0, 1)])).shape == (1, 8, 8, 1)
        model._process.kill()
        await until(lambda: lost)
        with pytest.raises(UnavailableError, match="being restarted"):
            model.add(1, request(0, 1), {})
        with pytest.raises(UnavailableError, match="being restarted"):
            await model.run([(0, 0, 1)])
        await until(lambda: model.ready)
        assert (lost, model.restarts) == ([False], 1)
        await model.close()
        assert lost == [False]  # an end on purpose is no loss

    asyncio.run(main())


def test_a_restart_that_fails_for_lack_of_resources_is_tried_again(monkeypatch, capsys):
    monkeypatch.setattr(model_process, "FIRST_PAUSE", 0.01)
    starts = []

    def start(connection, options):
        starts.append(connection)
        if len(starts) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return ModelThread(connection, options)

    async def main():
        model = ModelProcess(
            ModelOptions("digits", device="cpu", batch_size=2), on_lost=lambda: None, timeout=20, start=start
        )
        await model.start()
        model._process.kill()
        await until(lambda: model.restarts)
        await until(lambda: model.ready)
        assert all(connection.fileno() == -1 for connection in starts)  # none is left open
        await model.close()

    asyncio.run(main())
    assert "Too many open files; again in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", None),
        ("*/*", None),
        ("text/html,application/xhtml+xml,*/*;q=0.8", None),
        ("image/webp", "webp"),
        ("text/html, IMAGE/PNG;q=0.9, */*", "png"),
        ("application/json, image/png", None),
        ("*/*, image/png", None),
        ("application/x-npy", "npy"),
        ("image/gif", None),
    ],
)
def test_the_accept_header(accept, expected):
    assert preferred_format(accept) == expected


def test_percentiles():
    metrics = ServiceMetrics(None, None)
    for number in range(2000):
        metrics.count("/v1/actions", 200, float(number))
        metrics.count("/v1/actions", 429, 1e6)  # not among them
    latency = next(metrics.collect())
    values = [sample.value for sample in latency.samples if "quantile" in sample.labels]
    assert values == pytest.approx(np.quantile(np.arange(976, 2000), QUANTILES))  # of the last 1,024
    assert [sample.value for sample in latency.samples[-2:]] == [2000, sum(range(2000))]
