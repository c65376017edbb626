"""Parameters of which every test run takes some, and `launch/test.sh --all` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_except(is_quick: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Return the values, and mark those as slow that are not quick. A value is one entry of `parametrize`."""
    return [value if is_quick(value) else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
