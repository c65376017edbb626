"""Modules of verl that megarl provides without it, and that tests of this process have imported."""

from __future__ import annotations

import sys

import pytest

from megarl.agents.custom.verl_base import LOOP_MODULES


def forget_loop_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, let verl's agent loops be unknown, as in a process without a loop."""
    for name in LOOP_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
