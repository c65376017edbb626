"""Registry of the defects in `upstream_defects`, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEFECTS: dict[str, Callable[[], None]] = {}


def defect(function: Callable[[], None]) -> Callable[[], None]:
    DEFECTS[function.__name__] = function
    return function


def raises(kind: type[BaseException], words: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        result = function(*args, **kwargs)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised; the result is {result!r}")
