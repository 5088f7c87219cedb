"""Serve a folder of static files on this machine."""

from __future__ import annotations

import errno
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from driftgen.errors import InputError

__all__ = ["HOST", "check_port", "open_server"]

HOST = "127.0.0.1"
TYPES = {
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
    ".css": "text/css",
    ".json": "application/json",
    ".onnx": "application/octet-stream",
}


class _Handler(SimpleHTTPRequestHandler):
    # Of our own: those of the system may be wrong, and browsers run no module that is text/plain.
    extensions_map = SimpleHTTPRequestHandler.extensions_map | TYPES

    def end_headers(self) -> None:
        # The page is alone in its process, which lets it use several threads.
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")  # another page may follow at the same address
        super().end_headers()

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


def check_port(port: int | None) -> int:
    """Return the port, 0 for any that is free."""
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"port={port} must be from 0 (any free one) to 65535")
    return port or 0


def open_server(folder: Path, port: int | None = None) -> ThreadingHTTPServer:
    """Listen on 127.0.0.1; ``serve_forever`` of the result answers. Any free port if 0 or None."""
    handler = partial(_Handler, directory=str(folder))
    try:
        return ThreadingHTTPServer((HOST, check_port(port)), handler)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "needs more rights"
        raise InputError(f"port {port} {why}: choose another one with --port") from None
