"""A server with the endpoints of the Hugging Face hub that huggingface_hub calls, and its settings in this process."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

Files = dict[str, bytes]


@dataclass
class Repository:
    """A repository with its commits. `refs`: the commit of each branch and tag. `gated`: files need the token `good`."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: Files, *refs: str) -> str:
        """Add a commit with these files, and move `refs` (default: main) to it. Returns the commit."""
        content = repr(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()))
        number = hashlib.sha1(f"{len(self.commits)}{content}".encode()).hexdigest()
        self.commits[number] = files
        self.refs.update(dict.fromkeys(refs or ("main",), number))
        return number


class FakeHub:
    """Repositories by "models/OWNER/NAME" and "datasets/OWNER/NAME". `requests`: (method, path) of each request so far."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.fails = False  # answer 503 to everything
        self.refuses: int | None = None  # answer this status to everything
        self.waits = 0.0  # s before each answer
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def model(self, name: str) -> Repository:
        return self.repositories.setdefault(f"models/{name}", Repository())

    def dataset(self, name: str) -> Repository:
        return self.repositories.setdefault(f"datasets/{name}", Repository())

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def downloads(self) -> list[str]:
        """Return the last part of the path of each downloaded file."""
        return [path.rsplit("/", 1)[-1] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path))
        time.sleep(self.waits)
        if self.fails:
            return _send(handler, 503, b"")
        if self.refuses is not None:
            return _send(handler, self.refuses, b"")
        if path.startswith("/api/"):
            return self._api(handler, path.removeprefix("/api/"))
        name, _, rest = path.lstrip("/").partition("/resolve/")
        name = name if name.startswith("datasets/") else f"models/{name}"
        return self._file(handler, name, rest)

    def _api(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        """Answer /models/OWNER/NAME, ../revision/REVISION and ../tree/REVISION."""
        kind, owner, repo, *rest = path.split("/")
        repository = self.repositories.get(f"{kind}/{owner}/{repo}")
        if repository is None:
            return _refuse(handler, 404, "RepoNotFound")
        verb, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return _refuse(handler, 404, "RevisionNotFound")
        files = repository.commits[commit]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        answer: Any = {"id": f"{owner}/{repo}", "sha": commit, "siblings": siblings}
        if verb == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        return _send(handler, 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, handler: BaseHTTPRequestHandler, name: str, path: str) -> None:
        repository = self.repositories.get(name)
        if repository is None:
            return _refuse(handler, 404, "RepoNotFound")
        if repository.gated and handler.headers.get("Authorization") != "Bearer good":
            return _refuse(handler, 403, "GatedRepo")
        revisions = [*repository.refs, *repository.commits]
        revision = next((each for each in revisions if path.startswith(f"{each}/")), None)
        if revision is None:
            return _refuse(handler, 404, "RevisionNotFound")
        commit = repository.refs.get(revision, revision)
        data = repository.commits[commit].get(path.removeprefix(f"{revision}/"))
        if data is None:
            return _refuse(handler, 404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        return _send(handler, 200, data, headers)


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    _send(handler, status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Point huggingface_hub in this process, and processes that it starts, to a server and an empty cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    for name, value in environment(url, cache, offline=offline).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    _http.close_session()


def environment(url: str, cache: Path, *, offline: bool = False) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline)), "HF_TOKEN": "none"}


def folder_files(folder: Path) -> Files:
    """Return the files of a folder by their relative names."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
