"""``driftgen serve`` as a command: wrong options; a real server under signals, kills, overload, hang-ups."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from driftgen.bench.serve_bench import Plan, measure_faults, measure_modes, started_server
from driftgen.cli import serve_command
from tests.support.libraries import import_library


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2"):
        import_library(name, "__doc__")
    import driftgen.serve.web_app  # noqa: F401


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist: give a folder"),
        (["digits", "--batch-size", 0], "--batch-size=0 must be from 1 to 65536"),
        (["digits", "--queue", 8, "--max-images", 9], "--max-images=9 must be from 1 to 8"),
        (["digits", "--queue", 8, "--host", "no.such.host.invalid"], "cannot listen on 'no.such.host.inv"),
        (["digits", "--queue", 0], "--queue=0 must be from 1 to 16777216"),
        (["digits", "--max-body", 10**10], "--max-body=10000000000 must be from 1 to 2147483648"),
        (["pusht", "--fp8"], "pusht is a policy: --fp8 applies to image models alone"),
        (["pusht", "--compile", "--dtype", "float16"], "--compile and --dtype apply to image models alone"),
        (["digits", "--port", 70000], "--port=70000 must be from 0 to 65535"),
        (["digits", "--window", "nan"], "--window=nan must be from 0 to 1000"),
        (["digits", "--timeout", 0], "--timeout=0 must be from 1"),
        (["digits", "--token", ""], "the token must be visible ASCII"),
        (["digits", "--token", "a b"], "the token must be visible ASCII"),
        (["digits", "--host", "no.such.host.invalid"], "cannot listen on 'no.such.host.invalid' port 8000"),
        (["digits", "--dtype", "int3"], "int3"),
        (["digits", "--device", "tpu9"], "tpu9"),
    ],
)
def test_wrong_options(here, words, message):
    done = here("serve", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_in_use(here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = here("serve", "digits", "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert "Address already in use" in done.stderr


def test_a_missing_library_says_what_to_install(here, monkeypatch):
    real = serve_command.importlib.util.find_spec
    monkeypatch.setattr(
        serve_command.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    done = here("serve", "digits")
    assert done.returncode == 2
    assert "serve needs uvicorn: pip install " in done.stderr
    assert "[serve]" in done.stderr


def ask(url, body=None, token=None):
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


QUICK = Plan("digits", ("--device", "cpu", "--batch-size", "8"), clients=(1, 4), seconds=1.0)


@pytest.mark.slow
def test_a_real_server_answers_and_stops(monkeypatch):
    monkeypatch.setenv("DRIFTGEN_TOKEN", "from-the-environment")
    with started_server(QUICK) as server:
        assert ask(f"{server.url}/healthz")[1]["status"] == "ready"
        assert ask(f"{server.url}/v1/images", {"labels": 3})[0] == 401
        status, body = ask(f"{server.url}/v1/images", {"labels": 3, "seed": 1}, "from-the-environment")
        assert (status, body["labels"]) == (200, [3])
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(30) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{server.url}/healthz", timeout=5)


@pytest.mark.slow
def test_nothing_is_lost():
    """Overload, a killed model, hang-ups and SIGTERM: every request is answered."""
    rows = {row["fault"]: row for row in measure_faults(QUICK, print)}
    for row in rows.values():
        assert row["lost"] == 0, row
        assert row["exit_code"] == 0, row
        assert set(row["statuses"]) <= {"200", "429", "503"}, row
        refused = row["requests"] - row["statuses"].get("200", 0)
        assert row["retry_after"] == refused, row  # all of them say when to retry
    assert rows["overload"]["statuses_after"].keys() == {200}
    killed = rows["killed model"]["statuses"]
    assert killed["503"] > 0
    assert killed["200"] > 0
    assert rows["hang-ups"]["hung_up"] > 0
    assert rows["SIGTERM"]["statuses"] == {"200": 64}


@pytest.mark.slow
def test_clients_and_modes():
    rows = measure_modes(QUICK, print)
    assert [(row["mode"], row["clients"]) for row in rows] == [
        ("batched", 1), ("batched", 4), ("one at a time", 1), ("one at a time", 4),
    ]  # fmt: skip
    assert all(row["lost"] == 0 and row["statuses"].keys() == {"200"} for row in rows)
    assert all(0 < row["p50_seconds"] <= row["p99_seconds"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_the_model_loads(number):
    command = [sys.executable, "-m", "driftgen", "serve", "digits", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    while not (found := open(children).read().split()):  # noqa: SIM115
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert out == ""
    for child in found:
        assert not os.path.exists(f"/proc/{child}/cmdline") or not open(f"/proc/{child}/cmdline").read()  # noqa: SIM115
