"""Chromium, and pages that generate images with onnxruntime-web."""

import threading
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from driftgen.errors import InputError
from driftgen.studio.browser_page import write_page
from driftgen.studio.onnxruntime_web import find_runtime
from driftgen.studio.page_server import open_server
from tests.support.page_models import PIPELINES
from tools.chromium import open_chromium


@pytest.fixture(scope="module")
def browser():
    with open_chromium() as browser:
        yield browser


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def real_runtime():
    try:
        return find_runtime()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, real_runtime):
    """Return a function: the pipeline of a name and the folder of its page, written once."""
    place = tmp_path_factory.mktemp("pages")

    @cache
    def write(name, dtype="float32"):
        torch.manual_seed(0)
        pipe = PIPELINES[name]()
        page = write_page(pipe, place / f"{name}-{dtype}", name=name, dtype=dtype, runtime=real_runtime)
        return pipe, page.parent

    return write


@pytest.fixture
def serve():
    """Serve a folder as ``driftgen page`` does, or as any static server does. Return its address."""
    servers = []

    def call(folder, plain=False):
        if plain:
            handler = partial(Quiet, directory=str(folder))
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        else:
            server = open_server(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield call
    for server in servers:
        server.shutdown()
        server.server_close()
