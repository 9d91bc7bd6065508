"""A hub on this machine: the routes of huggingface.co that fetching a model takes, over a directory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GATED, MISSING, NO_REVISION = "GatedRepo", "RepoNotFound", "RevisionNotFound"


class Hub:
    """Serves `models`, directories by id; `gated` ids are refused, `fetched` are the files that were asked for."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.revisions = {"main"}
        self.url = ""

    def commit(self, name: str) -> str:
        """The one commit of a model."""
        return hashlib.sha1(name.encode()).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET; a HEAD is the same without the body."""
        parts = path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner, model, kind, revision, *rest = [*parts[2 * api :], "", "", ""]
        name = f"{owner}/{model}"
        if name in self.gated:
            return self._refuse(403, GATED)
        if name not in self.models:
            return self._refuse(404, MISSING)
        commit = self.commit(name)
        if revision not in (*self.revisions, commit):
            return self._refuse(404, NO_REVISION)
        if not api:
            return self._file(name, "/".join(filter(None, rest)))
        tree = [self._entry(self.models[name], file) for file in sorted(self.models[name].rglob("*")) if file.is_file()]
        body: Any = tree
        if kind == "revision":
            body = {"id": name, "sha": commit, "siblings": [{"rfilename": entry["path"]} for entry in tree]}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _file(self, name: str, file: str) -> tuple[int, dict[str, str], bytes]:
        content = (self.models[name] / file).read_bytes()
        self.fetched.append(file)
        etag = hashlib.sha1(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit(name)}, content

    @staticmethod
    def _entry(root: Path, file: Path) -> dict[str, Any]:
        content = file.read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": file.relative_to(root).as_posix(), "size": len(content), "oid": oid}

    @staticmethod
    def _refuse(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
        return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve a hub within the block, at its `url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(with_body=True)

        def do_HEAD(self) -> None:
            self.reply(with_body=False)

        def reply(self, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
