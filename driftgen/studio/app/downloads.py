"""Zip files of the images that a page shows, kept in memory for a while: no path of the disk is served."""

from __future__ import annotations

import io
import re
import secrets
import threading
import zipfile
from collections import OrderedDict
from urllib.parse import unquote

from driftgen.studio.app.request_guard import App, Receive, Scope, Send
from driftgen.studio.requests_and_answers import Pictures

__all__ = ["Downloads", "zip_pictures"]

MOST_BYTES = 64 * 2**20  # of all files together
PREFIX = "/download/"


class Downloads:
    """The newest files, by an address that nobody can guess."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, content: bytes, name: str) -> str:
        """Keep a file and return its address; the oldest files make room."""
        key = f"{secrets.token_urlsafe(16)}/{name}"
        with self._lock:
            self._files[key] = content
            while sum(map(len, self._files.values())) > self.most_bytes and len(self._files) > 1:
                self._files.popitem(last=False)
        return PREFIX + key

    def get(self, path: str) -> bytes | None:
        """Return the file of an address; None if it is no longer stored."""
        with self._lock:
            return self._files.get(unquote(path).removeprefix(PREFIX))

    def serve(self, app: App) -> App:
        """Return an ASGI app that answers requests for files, and passes the others to ``app``."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
                await app(scope, receive, send)
                return
            found = self.get(scope["path"])
            body = b"This file is no longer stored: generate the images again." if found is None else found
            kind = b"text/plain; charset=utf-8" if found is None else b"application/zip"
            headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
            if found is not None:
                headers.append((b"content-disposition", b"attachment"))
            status = 404 if found is None else 200
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return answer


def zip_pictures(pictures: Pictures) -> bytes:
    """Return a zip file of PNG images, numbered and named after their captions."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # PNG is compressed
        for i, (content, caption) in enumerate(zip(pictures.files, pictures.captions, strict=True)):
            archive.writestr(f"{i:03d}{file_name(caption)}.png", content)
    return buffer.getvalue()


def file_name(caption: str) -> str:
    """Return a caption as the end of a file's name, without characters that lead elsewhere."""
    safe = re.sub(r"[^\w-]+", "-", caption).strip("-")[:40]
    return f"-{safe}" if safe else ""
