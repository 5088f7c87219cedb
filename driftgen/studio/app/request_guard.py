"""The door of the studio: who may ask, for what, and how much. An ASGI middleware before gradio.

Gradio has more routes than the studio uses, among them uploads, files by path and a proxy. Only the routes of
this list pass; everything else does not exist.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["LOCAL_HOSTS", "RequestGuard"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
COOKIE = "driftgen_studio"
MOST_BYTES = 2**20  # of a request: settings of a page need a few thousand
API = "/gradio_api"
PAGES = ("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt")
FOLDERS = ("/assets/", "/static/", "/svelte/", "/download/")
CALLS = ("queue/", "call/", "run/", "heartbeat/", "startup-events", "info", "reset", "cancel", "app_id")
STARTUP = f"{API}/startup-events"  # gradio asks itself
UPLOAD = f"{API}/upload"

FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><title>driftgen studio</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<body style="font: 1rem/1.5 system-ui, sans-serif; max-width: 34rem; margin: 3rem auto; padding: 0 1rem">
<h1>driftgen studio</h1><p>This studio needs its token, which it printed when it was started.</p>
<form method="get" action="/"><label>Token <input name="token" type="password" autofocus required></label>
<button>Enter</button></form></body></html>"""


class RequestGuard:
    """Refuses requests without the token, from other sites, for other routes, or with large bodies.

    Args:
        app: answers the others.
        token: that a browser must have; None if only this machine can connect.
    """

    def __init__(self, app: App, token: str | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass a request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (answer := self._refuse(scope)) is not None:
            await _respond(send, *answer)
        else:
            await self.app(scope, receive, send)

    def _refuse(self, scope: Scope) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
        """Return status, text and headers of a refusal; None for a request that passes."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, method, host = scope["path"], scope["method"], headers.get("host", "")
        # A page of another site whose name points to this machine (DNS rebinding) sends that name.
        if self.token is None and _hostname(host) not in LOCAL_HOSTS:
            return 403, "This studio answers to 127.0.0.1 and localhost only.", []
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "This request comes from a page of another site.", []
        if path == UPLOAD:
            return 403, "The studio takes no uploads: it reads the folders it was started with.", []
        if not _exists(path):
            return 404, "There is no such page in the studio.", []
        if self.token is not None and path != STARTUP:
            given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
            if given and path == "/" and _equal(given, self.token):
                # Without the token in the address bar, where others could read it.
                cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                return 303, "", [(b"location", b"/"), (b"set-cookie", cookie.encode())]
            if not _equal(_cookie(headers), self.token) and not _equal(_bearer(headers), self.token):
                return 401, FORM, []
        if method not in ("GET", "HEAD"):
            length = headers.get("content-length", "")
            if not length.isdecimal():
                return 411, "A request must state its length.", []
            if int(length) > MOST_BYTES:
                return 413, f"The request has {int(length):,} bytes, more than {MOST_BYTES:,}.", []
        return None


def _exists(path: str) -> bool:
    if ".." in path.split("/") or "\\" in path:
        return False
    if path in PAGES or path.startswith(FOLDERS):
        return True
    return path.startswith(f"{API}/") and path.removeprefix(f"{API}/").startswith(CALLS)


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _equal(given: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), token.encode())


def _cookie(headers: dict[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _bearer(headers: dict[str, str]) -> str:
    return headers.get("authorization", "").removeprefix("Bearer ")


async def _respond(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = text.encode()
    kind = b"text/html; charset=utf-8" if text.startswith("<") else b"text/plain; charset=utf-8"
    length = (b"content-length", str(len(body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind), length, *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})
