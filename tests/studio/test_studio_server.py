"""The address of the studio, and its answers to plain HTTP requests."""

import json
import socket
import sys
import threading

import pytest
import torch

from driftgen.report.page import scoped_style
from driftgen.studio.app.gradio_import import import_gradio
from driftgen.studio.app.studio_server import check_address, check_folders
from tests.support.helpers import fails
from tests.support.studio_folders import add_photos, add_run, make_folders
from tests.support.studio_process import run_studio

SAMPLE = ("digits", [], 1.5, 0, 1, 4, "Images", "sample")


def test_this_machine_needs_no_token():
    address = check_address("127.0.0.1", 0, None)
    assert address.token is None
    assert address.url == f"http://127.0.0.1:{address.port}/"
    assert address.port > 0


def test_other_machines_need_a_token():
    made = [check_address("0.0.0.0", 0, None) for _ in range(2)]
    assert made[0].token != made[1].token
    assert all(len(address.token) >= 24 for address in made)
    assert made[0].url == f"http://{socket.gethostname()}:{made[0].port}/?token={made[0].token}"
    assert check_address("0.0.0.0", 0, "a-token-of-mine").token == "a-token-of-mine"
    for token in ("", "short", "twelve chars", "x" * 11, "with;semicolon"):
        fails(lambda token=token: check_address("0.0.0.0", 0, token), "--token: use at least 12")


def test_addresses_that_cannot_be_used():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        fails(lambda: check_address("127.0.0.1", port, None), f"port {port} .*choose another --port")
    for port in (-1, 65536, 10**30):
        fails(lambda port=port: check_address("127.0.0.1", port, None), "--port")
    for host in ("300.1.1.1", "", "\udcff", "8.8.8.8"):
        if host:
            fails(lambda host=host: check_address(host, 0, None), "cannot listen on")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a GPU")
def test_a_device_that_is_not_there_ends_it_before_the_page(tmp_path, here):
    done = here("studio", "--runs", tmp_path, "--data", tmp_path, "--port", 0, "--device", "cuda")
    assert done.returncode == 2
    assert done.stderr.startswith("driftgen: error: device=cuda: torch finds no NVIDIA GPU here")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_folders_must_be_folders(tmp_path):
    (tmp_path / "file").write_text("x")
    assert check_folders(tmp_path / "none", tmp_path).runs == tmp_path / "none"
    fails(lambda: check_folders(tmp_path / "file", tmp_path), "--runs .* is no folder")
    fails(lambda: check_folders(tmp_path, tmp_path / "none"), "--data .* is no folder")


def test_without_gradio_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    fails(import_gradio, r"^the studio needs gradio: pip install 'driftgen\[studio\]'$")


@pytest.mark.slow
def test_behind_a_proxy_it_starts_on_another_address_of_the_machine(tmp_path, monkeypatch):
    """The server asks itself whether it runs, which a proxy would refuse."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with run_studio(tmp_path, "--device", "cpu", "--host", "127.0.0.2") as studio:
        assert studio.url.startswith("http://127.0.0.2:")


def test_the_style_of_reports_stays_in_its_element():
    style = scoped_style(".report")
    assert style.startswith(".report {")
    assert style.count("{") == style.count("}")
    for page in (":root", "\nbody", "\nhtml"):
        assert f"{page} {{" not in style
    assert "--ink" in style


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    place = tmp_path_factory.mktemp("studio")
    folders = make_folders(place)
    add_run(folders)
    add_photos(folders)
    (place / "secret.txt").write_text("secret")
    (folders.runs / "link.txt").symlink_to(place / "secret.txt")
    (folders.data / "empty").mkdir()
    with run_studio(place, "--data", "data", "--device", "cpu") as studio:
        studio.place = place
        yield studio


@pytest.mark.slow
def test_fifty_requests_at_once_are_answered_in_order(studio):
    assert "network call" in studio.call("sample", *SAMPLE)
    finished, lock = [], threading.Lock()

    def finish(i, event):
        answer = studio.finish_call("sample", event)
        with lock:
            finished.append((i, answer))

    threads = []
    for i in range(50):  # each arrives before the next one is sent
        event = studio.start_call("sample", "digits", ["3"], 1.5, i, 1, 16, "Images", "sample")
        threads.append(threading.Thread(target=finish, args=(i, event)))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
    assert len(finished) == 50
    assert all(f"digits-seed-{i}-015" in answer for i, answer in finished)
    # Answers come over 50 connections, read by 50 threads: neighbors may change places there.
    assert all(abs(place - i) <= 5 for place, (i, _) in enumerate(finished))


@pytest.mark.slow
def test_no_file_can_be_read(studio):
    secret, passwd = str(studio.place / "secret.txt"), "/etc/passwd"
    for path in (secret, passwd, "runs/link.txt", "runs/old/config.yaml", "../secret.txt"):
        for route in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/", "/svelte/"):
            for dots in ("", "../../../../../../..", "..%2f..%2f..%2f..%2f..%2f..%2f.."):
                status, _, body = studio.request("GET", f"{route}{dots}{path}")
                assert status in (403, 404), (status, route + dots + path)
                assert b"secret" not in body.replace(path.encode(), b"")
                assert b"root:" not in body
    for name in (secret, passwd, "..", "runs/../..", str(studio.place), "~"):
        assert "leads outside" in studio.call("sample", name, *SAMPLE[1:]), name
        assert "is outside" in studio.call("check", name), name
    event = {"path": secret, "meta": {"_type": "gradio.FileData"}}
    for answer in (studio.call("check", event), studio.call("sample", event, *SAMPLE[1:])):
        assert answer is None or "secret" not in answer.replace(str(studio.place), "")
    assert "network call" in studio.call("sample", *SAMPLE)


@pytest.mark.slow
def test_uploads_and_large_requests_are_refused(studio):
    large = b"x" * (3 * 2**20)
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    status, _, body = studio.request("POST", "/gradio_api/upload", b"--x--", **kind)
    assert status == 403
    assert b"takes no uploads" in body
    for path in ("/gradio_api/upload", "/gradio_api/queue/join", "/gradio_api/call/sample"):
        try:
            status, _, _ = studio.request("POST", path, large, **{"Content-Type": "application/json"})
        except (BrokenPipeError, ConnectionResetError):  # closed before all was sent
            continue
        assert status in (403, 413)
    assert "network call" in studio.call("sample", *SAMPLE)


@pytest.mark.slow
def test_odd_values_are_answered_in_a_sentence_or_refused(studio):
    odd = [None, "", "x", -1, 1e300, float("inf"), [], {}, [[]], {"a": 1}, True, "é" * 1000, "\0", 10**30]
    for position in range(len(SAMPLE)):
        for value in odd:
            data = [*SAMPLE]
            data[position] = value
            body = json.dumps({"data": data})
            status, _, answer = studio.request(
                "POST", "/gradio_api/call/sample", body, **{"Content-Type": "application/json"}
            )
            assert status in (200, 422), answer
            if status == 200:
                html = studio.finish_call("sample", json.loads(answer)["event_id"])
                assert html is None or 'role="alert"' in html or "network call" in html
    for value in odd:
        for answer in (studio.call("check", value), studio.call("roll_out", value, 0)):
            assert answer is None or 'role="alert"' in answer
        studio.call("train", value, "tiny", value)
    assert not (studio.place / "runs" / ".studio").exists()  # nothing was started
    for body in ("", "{", "[]", '{"data": 1}', '{"data": []}'):
        kind = {"Content-Type": "application/json"}
        assert studio.request("POST", "/gradio_api/call/sample", body, **kind)[0] in (200, 400, 422, 500)
    assert "holds no images" in studio.call("check", "empty")
    assert "from 0 to" in studio.call("roll_out", "x", -1)
    assert "seed is -1" in studio.call("sample", *SAMPLE[:3], -1, *SAMPLE[4:])
    assert "network call" in studio.call("sample", *SAMPLE)
    assert "driftgen/studio" not in (studio.place / "studio.txt").read_text()  # no traceback of its own


@pytest.mark.slow
def test_nothing_outside_this_machine_is_asked(studio):
    assert studio.calls.read_text() == ""


@pytest.mark.slow
def test_a_token_from_the_command_line(tmp_path):
    with run_studio(tmp_path, "--host", "0.0.0.0", "--token", "a-token-of-mine") as studio:
        text = (tmp_path / "studio.txt").read_text()
        assert "listens on 0.0.0.0" in text
        assert "?token=a-token-of-mine" in text
        assert studio.request("GET", "/config")[0] == 401
        assert studio.request("GET", "/?token=wrong")[0] == 401
        status, headers, _ = studio.request("GET", "/?token=a-token-of-mine")
        assert status == 303
        cookie = {"Cookie": next(v for k, v in headers.items() if k.lower() == "set-cookie").split(";")[0]}
        assert studio.request("GET", "/config", **cookie)[0] == 200
        assert studio.request("POST", "/gradio_api/call/sample", "{}")[0] == 401
    assert studio.process.returncode == 0
    assert (tmp_path / "studio.txt").read_text().endswith("driftgen studio: ended\n")  # and no traceback
