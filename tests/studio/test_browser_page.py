"""The page that generates images: its folder, its runtime, its server; ``driftgen page``."""

import base64
import hashlib
import http.client
import io
import json
import signal
import socket
import tarfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from driftgen.features import ResNetMAE
from driftgen.interop import packaged
from driftgen.interop.onnx import read_metadata
from driftgen.model_io import save_model
from driftgen.pipeline import DriftPipeline
from driftgen.studio import onnxruntime_web
from driftgen.studio.browser_page import STUDIO, write_page
from driftgen.studio.onnxruntime_web import FILES, VERSION, find_runtime
from driftgen.studio.page_server import open_server
from tests.support import exported
from tests.support.fork_server import CAPTURE, start_driftgen
from tests.support.helpers import fails
from tests.support.libraries import import_library


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Import the libraries of the exporter before the first test is timed."""
    import_library("onnxscript", "ir")


@pytest.fixture
def runtime(tmp_path):
    """A node_modules whose files of the runtime are short texts."""
    folder = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name, encoding="utf-8")
    return tmp_path / "node_modules"


@pytest.fixture
def served(tmp_path):
    """A server of tmp_path."""
    with open_server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_page_is_a_folder_that_needs_nothing_else(tmp_path, runtime):
    page = write_page(exported.mlp(depth=1), tmp_path / "page", name="tiny", runtime=runtime)
    assert page == tmp_path / "page" / "index.html"
    files = {str(path.relative_to(page.parent)): path for path in page.parent.rglob("*") if path.is_file()}
    scripts = {f"browser/{path.name}" for path in (STUDIO / "browser").iterdir()} - {"browser/index.html"}
    assert set(files) == scripts | {
        *("index.html", "base.css", "portable_noise.mjs", "model.onnx", "model.json"),
        *(f"ort/{name}" for name in (*FILES, "LICENSE.txt")),
    }
    assert "Copyright (c) Microsoft Corporation" in files["ort/LICENSE.txt"].read_text()
    record = json.loads(files["model.json"].read_text())
    assert record == read_metadata(files["model.onnx"]) | {
        "name": "tiny",
        "bytes": files["model.onnx"].stat().st_size,
    }
    fails(lambda: write_page(None, page.parent, name="x", runtime=runtime), "is not an empty folder")


def test_metadata_of_files_that_are_none(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    fails(lambda: read_metadata(path), "cannot be read as an exported model")
    path.write_bytes(b"")
    fails(lambda: read_metadata(path), "has no metadata of driftgen")


def test_sources_are_readable_and_in_the_wheel():
    sources = list((STUDIO / "browser").iterdir())
    assert {path.suffix for path in sources} == {".mjs", ".css", ".html"}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in sources) <= 400
    builder = WheelBuilder(str(Path(__file__).parents[2]))
    names = {included.distribution_path for included in builder.recurse_included_files()}
    expected = {f"driftgen/studio/browser/{path.name}" for path in sources}
    expected |= {f"driftgen/studio/{name}" for name in ("base.css", "onnxruntime-LICENSE.txt")}
    assert expected <= names


def test_the_best_packaged_model_is_shown(tmp_path, monkeypatch):
    assert packaged.best_packaged() in ("cifar10", "digits")
    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    for name in ("digits", "a-policy", "cifar10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        assert packaged.best_packaged() == ("cifar10" if name == "cifar10" else "digits")


# --- the runtime ----------------------------------------------------------------------------------------


def test_a_runtime_is_found_around_its_files(runtime, tmp_path):
    files = runtime / "onnxruntime-web" / "dist"
    for given in (runtime, runtime.parent, files, files.parent):
        assert find_runtime(given) == files
    (files / FILES[1]).unlink()
    fails(lambda: find_runtime(runtime), f"does not hold onnxruntime-web .*{FILES[1]}.*npm install")
    fails(lambda: find_runtime(tmp_path / "missing"), "does not hold onnxruntime-web")


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """npm's registry, with a package of short files. Yields the paths that were asked for, and the answer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("package.json", *(f"dist/{name}" for name in FILES)):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    state = {"asked": [], "status": 200, "body": buffer.getvalue()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state["asked"].append(self.path)
            self.send_response(state["status"])
            self.end_headers()
            self.wfile.write(state["body"])

        def log_message(self, *args):
            pass

    digest = hashlib.sha512(buffer.getvalue()).digest()
    monkeypatch.setattr(onnxruntime_web, "INTEGRITY", base64.b64encode(digest).decode())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/")
        yield state
        server.shutdown()


def test_the_runtime_is_downloaded_once(registry, tmp_path):
    lines = []
    for _ in range(2):
        folder = find_runtime(None, lines.append)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {n: f"dist/{n}" for n in FILES}
    assert registry["asked"] == [f"/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"]
    assert folder.is_relative_to(tmp_path / "cache")
    assert len(lines) == 1


def test_another_package_is_refused(registry, tmp_path):
    registry["body"] += b"x"
    fails(find_runtime, "is damaged or another package: its SHA-512 is .*npm install")
    assert not (tmp_path / "cache").exists()


def test_a_download_without_end_ends(registry, monkeypatch):
    monkeypatch.setattr(onnxruntime_web, "MOST_BYTES", 2**20)
    source, target = io.BytesIO(bytes(2**23)), io.BytesIO()
    onnxruntime_web._copy(source, target)
    assert target.tell() <= 2**21
    registry["body"] *= 2**13
    fails(find_runtime, "is damaged or another package")


def test_without_a_network_one_line_says_what_to_do(registry, monkeypatch):
    registry["status"] = 404
    fails(find_runtime, "cannot be downloaded from http.*404.*npm install onnxruntime-web.*--runtime")
    for url in ("http://127.0.0.1:1", "nonsense", "http://[", "http://a b"):
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", url)
        fails(find_runtime, "onnxruntime-web cannot be downloaded from .*npm install")


# --- the server -----------------------------------------------------------------------------------------


def test_files_are_served_with_their_types_to_this_machine_alone(served, tmp_path):
    assert served.server_address[0] == "127.0.0.1"
    types = {"a.mjs": "text/javascript", "a.wasm": "application/wasm", "a.css": "text/css"}
    types |= {"model.onnx": "application/octet-stream", "index.html": "text/html"}
    for name, kind in types.items():
        (tmp_path / name).write_text("content")
        with urllib.request.urlopen(f"http://127.0.0.1:{served.server_port}/{name}") as answer:
            assert answer.headers["Content-Type"].split(";")[0] == kind
            assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
            assert answer.read() == b"content"


def test_nothing_outside_the_folder_is_served(served, tmp_path):
    (tmp_path.parent / "secret").write_text("secret")
    (tmp_path / "inner").mkdir()
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port)
    for path in ("/../secret", "/..%2fsecret", "/%2e%2e/secret", "//etc/passwd", "/inner/", "/missing"):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 404, path
        assert b"secret" not in body
    connection.close()


# --- the command ----------------------------------------------------------------------------------------


def test_bad_input_is_one_line(here, tmp_path, runtime, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exported.policy().save_pretrained("policy")
    save_model(ResNetMAE(in_channels=3, base_channels=8), "encoder")
    DriftPipeline(exported.mlp(depth=1).generator).save_pretrained("damaged")
    weights = Path("damaged/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    Path("taken").mkdir()
    Path("taken/file").write_text("")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        used = other.getsockname()[1]
        for words, message in {
            ("policy",): "is a policy, not a generator",
            ("encoder",): "is an encoder (ResNetMAE), not a generator",
            ("damaged",): "damaged",
            ("missing",): "missing does not exist",
            ("digits", "--out", "taken"): "taken exists and is not an empty folder",
            ("digits", "--port", used): f"port {used} is in use: choose another one with --port",
            ("digits", "--port", 70000): "port=70000 must be from 0 (any free one) to 65535",
            ("digits", "--dtype", "int4"): "dtype='int4' is not known",
            ("digits", "--runtime", "taken"): "taken does not hold onnxruntime-web",
        }.items():
            out = () if "--out" in words else ("--out", "page")
            done = here("page", "--runtime", runtime, *words, *out)
            assert (done.returncode, done.stdout) == (2, ""), words
            assert message in done.stderr
            assert len(done.stderr.splitlines()) == 1
            assert not Path("page").exists()


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path, runtime, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    child = start_driftgen("page", "--runtime", runtime, cwd=tmp_path, stdout=CAPTURE, stderr=CAPTURE)
    try:
        url = child.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{url}model.json") as answer:
            assert json.load(answer)["name"] == packaged.best_packaged()
    finally:
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == [runtime]


@pytest.mark.slow
def test_the_command_writes_a_folder(here, tmp_path, runtime):
    done = here("page", "digits", "--out", tmp_path / "page", "--runtime", runtime, "--dtype", "float16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'page' / 'index.html'}\n"
    assert json.loads((tmp_path / "page" / "model.json").read_text())["dtype"] == "float16"
