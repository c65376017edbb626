"""The model that the tests of `megarl convert-weights` convert."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fp8_model import write_fp8_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_fp8_model(tmp_path / "fp8")
    return tmp_path / "fp8"
