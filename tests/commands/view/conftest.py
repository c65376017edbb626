"""The server of the page: without a socket, and as a process for a browser."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from megarl.commands.view.server import make_app
from megarl.observe.page.viewed_run import ViewedRun, labels
from tests.support.chromium import Chromium

TOKEN = "the-token"
Open = Callable[..., TestClient]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def open_page() -> Open:
    """Return a client of the page about `paths`, which has the token."""

    def client(*paths: Path, follow: bool = False, host: str = "127.0.0.1") -> TestClient:
        runs = [
            ViewedRun(n, path, label) for n, (path, label) in enumerate(zip(paths, labels(list(paths)), strict=True))
        ]
        app = make_app(runs, follow=follow, token=TOKEN, host=host, port=8421)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return TestClient(app, base_url="http://127.0.0.1:8421", headers=headers, follow_redirects=False)

    return client


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    started = Chromium(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@contextlib.contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """Run `megarl view --follow` about `paths`. Yields the address of the page."""
    command = [sys.executable, "-m", "megarl", "view", *map(str, paths), "--port", "0", "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        printed = re.search(r"http://\S+", process.stdout.readline())
        assert printed
        try:
            yield printed[0]
        finally:
            process.kill()
