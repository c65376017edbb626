"""The server of the page, without a socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from megarl.commands.view.server import make_app
from megarl.observe.page.viewed_run import ViewedRun, labels

TOKEN = "the-token"
Open = Callable[..., TestClient]


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
