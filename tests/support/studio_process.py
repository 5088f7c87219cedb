"""``driftgen studio`` in a process of its own, and plain HTTP requests to it."""

import http.client
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
# Runs the command and writes every address that is looked up or connected to, except this machine's.
PROGRAM = """
import runpy, sys
out = open(sys.argv.pop(1), "w", buffering=1)
def listen(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments[1] if event == "socket.connect" else arguments[0]
        host = address[0] if isinstance(address, tuple) else address
        if host not in ("127.0.0.1", "localhost", "::1", "0.0.0.0", None) and not str(host).startswith("/"):
            print(event, arguments[:2], file=out)
sys.addaudithook(listen)
runpy.run_module("driftgen", run_name="__main__", alter_sys=True)
"""


class Studio:
    """A running studio: its address, its process, and the file of its connections to other machines."""

    def __init__(self, process, url, calls):
        self.process, self.url, self.calls = process, url, calls
        parts = urlsplit(url)
        self.host, self.port = "127.0.0.1", parts.port

    def request(self, method, path, body=None, **headers):
        """Return the status, the headers and the body of an answer; the path is sent as it is."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def start_call(self, name, *data):
        """Begin a call of gradio's API and return its event."""
        body = json.dumps({"data": data})
        status, _, answer = self.request(
            "POST", f"/gradio_api/call/{name}", body, **{"Content-Type": "application/json"}
        )
        assert status == 200, answer
        return json.loads(answer)["event_id"]

    def finish_call(self, name, event):
        """Wait for the answer of a call: the HTML, or None for an error."""
        _, _, answer = self.request("GET", f"/gradio_api/call/{name}/{event}")
        last = answer.decode().strip().split("\n\n")[-1]
        kind, _, data = last.partition("\ndata: ")
        return json.loads(data)[0] if kind == "event: complete" else None

    def call(self, name, *data):
        """Call gradio's API and return the HTML of the answer."""
        return self.finish_call(name, self.start_call(name, *data))


@contextmanager
def run_studio(place, *words):
    """Start the studio in a folder, on any free port; end it with Ctrl-C."""
    calls = place / "connections.txt"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (place / "studio.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(calls), "studio", "--port", "0", *words],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until = time.monotonic() + 120
        while "driftgen studio: http" not in (text := (place / "studio.txt").read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < until, text
            time.sleep(0.05)
        line = next(row for row in text.splitlines() if row.startswith("driftgen studio: http"))
        yield Studio(process, line.split()[-1], calls)
    finally:
        process.send_signal(2)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("the studio did not end within 20 s of Ctrl-C") from None
