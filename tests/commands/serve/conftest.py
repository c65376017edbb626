"""The API with stand-in trainers, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from megarl.commands.serve.api import TrainingApi
from megarl.commands.serve.server import make_app
from tests.support.tinker_api import KEY, stand_in_api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[TrainingApi]:
    with stand_in_api(tmp_path) as api:
        yield api


@pytest.fixture
def client(api: TrainingApi) -> TestClient:
    return TestClient(make_app(api, KEY), headers={"x-api-key": KEY}, raise_server_exceptions=False)
