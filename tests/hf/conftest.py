"""A server with the hub's endpoints, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub, running_hub, use_hub


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with running_hub() as server:
        yield server


@pytest.fixture
def home(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, server.url, tmp_path / "home")
    return tmp_path / "home"
