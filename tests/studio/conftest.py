"""Chromium, the studio in it, and pages that generate images with onnxruntime-web."""

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
from tests.support.studio_folders import add_run, make_folders, smooth_photos
from tests.support.studio_pages import choose
from tests.support.studio_process import run_studio
from tests.support.web_pages import SIZES
from tools.chromium import open_chromium

SECONDS = 60_000  # milliseconds that a loaded machine may take


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


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    place = tmp_path_factory.mktemp("studio")
    folders = make_folders(place)
    add_run(folders, command="driftgen train digits --out runs/old")
    smooth_photos(folders)
    (folders.data / "empty").mkdir()
    with run_studio(place, "--data", "data", "--device", "cpu") as studio:
        studio.folders = folders
        yield studio


@pytest.fixture
def visit(browser, studio):
    """Open the page; at the end nothing may have been written to the console, or asked of others."""
    complaints, contexts = [], []

    def call(tab="Sample", size="desktop", scheme="light", model="digits"):
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(SECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: remote(request.url))
        page.goto(studio.url)
        page.wait_for_function("document.querySelector('#model input')?.value.startsWith('cifar10')")
        if model != "cifar10":
            choose(page, "#model", model)
        if tab != "Sample":
            page.get_by_role("tab", name=tab).click()
        return page

    def remote(url):
        if not url.startswith((studio.url, "data:", "blob:")):
            complaints.append(url)

    yield call
    for context in contexts:
        context.close()
    assert not complaints
