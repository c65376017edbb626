"""Modules and losses of a bundle are registered in this process: they must not reach other tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.algorithms.catalogue import LOSSES


@pytest.fixture(autouse=True)
def forgets_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))
    yield
    modules_of_test = [
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}/")
    ]
    for name in modules_of_test:
        del sys.modules[name]
