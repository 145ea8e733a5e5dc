"""A local model hub: the endpoints that downloads use, and a log of the requests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

from tests.cli.terminal_process import ROOT

TOKEN = "hf_secret"
Files = dict[str, bytes]


@dataclass
class Hub:
    """Models by id and revision; those in `gated` require the token."""

    models: dict[str, dict[str, Files]]
    gated: tuple[str, ...] = ()
    url: str = ""
    asked: list[str] = field(default_factory=list)  # "GET api/...", in order

    def fetched(self) -> list[str]:
        """Return the names of the files whose content was sent."""
        files = [line for line in self.asked if line.startswith("GET ") and "/resolve/" in line]
        return sorted(line.split("/resolve/")[1].partition("/")[2] for line in files)

    def commit(self, repo_id: str, revision: str) -> str:
        return hashlib.sha1(f"{repo_id}@{revision}".encode()).hexdigest()

    def files(self, repo_id: str, revision: str) -> Files | None:
        """Find a revision by its name or by its commit."""
        for name, files in self.models[repo_id].items():
            if revision in (name, self.commit(repo_id, name)):
                return files
        return None


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve on a free port until the context exits."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_python(
    hub: Hub, cache: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this hub and cache, whatever the environment says about others."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment_without_hub(), **settings(hub, cache), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def settings(hub: Hub, cache: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache)}


def environment_without_hub() -> dict[str, str]:
    is_odd = re.compile("HF_.*|.*_proxy", re.IGNORECASE).fullmatch
    inherited = {key: value for key, value in os.environ.items() if not is_odd(key)}
    return {**inherited, "OMP_NUM_THREADS": "1"}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/", 4)
        if len(parts) < 4:
            return self._send(404, b"")  # not about a model
        self.hub.asked.append(f"{self.command} {path}")
        repo_id, verb, revision = "/".join(parts[:2]), parts[2], parts[3]
        if repo_id not in self.hub.models:
            return self._send(401, b"", {"X-Error-Message": "Invalid username or password."})
        files = self.hub.files(repo_id, revision)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if verb == "revision":
            names = [name for name, at in self.hub.models[repo_id].items() if at is files]
            answer = {"id": repo_id, "sha": self.hub.commit(repo_id, names[0]), "siblings": []}
            return self._send(200, json.dumps(answer).encode())
        if verb == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in files.items()
            ]
            return self._send(200, json.dumps(entries).encode())
        has_token = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if repo_id in self.hub.gated and not has_token:
            return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        if parts[4] not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = files[parts[4]]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": revision}
        self._send(200, content, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
