"""A local server with the part of the Hugging Face Hub API that downloads and uploads use."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40


@contextmanager
def hub_server(repositories):
    """Serve ``{repository: {path: bytes}}``, store uploads in it, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def answer(self, body=b"", status=200, **headers):
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            parts = unquote(urlparse(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                files = repositories.get("/".join(parts[2:4]))
                if files is None:
                    return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
                listing = [{"rfilename": name} for name in files]
                if "tree" in parts:
                    return self.answer(
                        [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in files.items()]
                    )
                return self.answer({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": listing})
            if len(parts) > 4 and parts[2] == "resolve":
                content = repositories["/".join(parts[:2])].get("/".join(parts[4:]))
                if content is None:
                    return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
                return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
            return self.answer({"error": self.path}, 404)

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self):
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlparse(self.path).path.strip("/").split("/")
            if parts[:3] == ["api", "repos", "create"]:
                record = json.loads(body)
                name = f"{record.get('organization', 'me')}/{record['name']}"
                repositories.setdefault(name, {})
                return self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name})
            if "preupload" in parts:
                files = json.loads(body)["files"]
                plain = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                return self.answer({"files": plain})
            if "commit" in parts:
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        value = entry["value"]
                        files = repositories["/".join(parts[2:4])]
                        files[value["path"]] = base64.b64decode(value["content"])
                url = f"http://{self.headers['Host']}/{'/'.join(parts[2:4])}/commit/{COMMIT}"
                return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
            return self.answer({})  # requests for validation only

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
