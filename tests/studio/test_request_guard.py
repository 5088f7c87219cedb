"""The guard before gradio's routes, as an ASGI app sees requests."""

import asyncio

import pytest

from driftgen.studio.app.downloads import Downloads
from driftgen.studio.app.request_guard import MOST_BYTES, RequestGuard

TOKEN = "a-long-secret-token"


def ask(path="/", method="GET", token=None, query=b"", app=None, kind="http", **headers):
    """Return the status, the headers and the body of an answer; 200 and "passed" if it reached the app."""
    sent = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"passed"})

    async def send(message):
        sent.append(message)

    headers = {"host": "127.0.0.1:7860", **{k.replace("_", "-"): v for k, v in headers.items()}}
    listed = [(k.encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": kind, "path": path, "method": method, "query_string": query, "headers": listed}
    asyncio.run(RequestGuard(app or inner, token)(scope, None, send))
    if kind != "http":
        return sent
    start, body = sent
    return start["status"], dict(start["headers"]), body["body"].decode()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/config",
        "/theme.css",
        "/assets/index.js",
        "/static/x.js",
        "/gradio_api/queue/data",
        "/download/x",
    ],
)
def test_the_page_and_its_calls_pass(path):
    assert ask(path)[2] == "passed"


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=runs/a/config.yaml",
        "/file=/etc/passwd",
        "/gradio_api/proxy=http://x",
        "/gradio_api/component_server",
        "/gradio_api/stream/x",
        "/gradio_api/vibe-edit",
        "/gradio_api/dev/reload",
        "/gradio_api/custom_component/x",
        "/gradio_api/upload_progress",
        "/monitoring",
        "/login",
        "/docs",
        "/openapi.json",
        "/assets/../../secret",
        "/assets\\..\\secret",
        "/static/..",
        "/etc/passwd",
        "//etc/passwd",
    ],
)
def test_other_routes_do_not_exist(path):
    assert ask(path)[0] == 404


def test_uploads_are_refused_in_a_sentence():
    status, _, body = ask("/gradio_api/upload", "POST", content_length="10")
    assert status == 403
    assert body.startswith("The studio takes no uploads")


def test_large_bodies_and_those_of_unknown_length_are_refused():
    path = "/gradio_api/queue/join"
    assert ask(path, "POST", content_length=str(MOST_BYTES))[2] == "passed"
    assert ask(path, "POST", content_length=str(MOST_BYTES + 1))[0] == 413
    assert ask(path, "POST")[0] == 411
    assert ask(path, "POST", content_length="-1")[0] == 411


def test_only_names_of_this_machine_are_answered_without_a_token():
    for host in ("127.0.0.1:7860", "localhost:7860", "[::1]:7860", "localhost"):
        assert ask(host=host)[2] == "passed"
    for host in ("evil.example:7860", "127.0.0.1.evil.example", "", "[", "10.0.0.1"):
        assert ask(host=host)[0] == 403


def test_pages_of_other_sites_cannot_start_anything():
    path, length = "/gradio_api/call/train", {"content_length": "2"}
    assert ask(path, "POST", origin="http://127.0.0.1:7860", **length)[2] == "passed"
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://localhost:7860"):
        assert ask(path, "POST", origin=origin, **length)[0] == 403
        # Gradio would let pages of other ports of this machine read the answer.
        assert ask("/config", origin=origin)[0] == 403
    assert ask("/config", origin="http://127.0.0.1:7860")[2] == "passed"


def test_the_token_opens_the_page():
    assert ask(token=TOKEN, host="machine:7860")[0] == 401
    assert "needs its token" in ask(token=TOKEN)[2]
    status, headers, _ = ask(token=TOKEN, query=f"token={TOKEN}".encode())
    assert (status, headers[b"location"]) == (303, b"/")
    cookie = headers[b"set-cookie"].decode()
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask("/config", token=TOKEN, host="machine:7860", cookie=cookie.split(";")[0])[2] == "passed"
    assert ask("/config", token=TOKEN, authorization=f"Bearer {TOKEN}")[2] == "passed"
    for wrong in ("", TOKEN[:-1], TOKEN + "x", "é"):
        assert ask(token=TOKEN, query=f"token={wrong}".encode())[0] == 401
        assert ask("/gradio_api/queue/data", token=TOKEN, cookie=f"driftgen_studio={wrong}")[0] == 401
    assert ask("/gradio_api/startup-events", token=TOKEN)[2] == "passed"
    assert ask("/assets/index.js", token=TOKEN)[0] == 401


def test_websockets_are_closed():
    assert ask("/", kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_downloads_are_kept_for_a_while():
    downloads = Downloads(most_bytes=100)
    first = downloads.add(b"x" * 60, "a.zip")
    assert ask(first, app=downloads.serve(None))[2] == "x" * 60
    second = downloads.add(b"y" * 60, "b.zip")
    assert downloads.get(first) is None
    status, headers, body = ask(second, app=downloads.serve(None))
    assert (status, body) == (200, "y" * 60)
    assert headers[b"content-disposition"] == b"attachment"
    status, _, body = ask(first, app=downloads.serve(None))
    assert status == 404
    assert "generate the images again" in body
    large = downloads.add(b"z" * 500, "c.zip")  # kept, though alone
    assert downloads.get(large) == b"z" * 500
