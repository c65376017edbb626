"""What processes are given to do, and what becomes of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


class CallError(Exception):
    """Raised by a `Job`'s function: this call failed, for a reason that `cause` says whole."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True)
class Job:
    """A function that answers a request with anything that can be pickled, or raises; it may be ``async def``.

    `prepare` is called once, before processes are forked: what takes long to import is imported there.
    """

    function: Callable[[Any], Any]
    prepare: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Answered:
    """What a function returned. `retries`: attempts that failed before; `seconds`: that the last one ran."""

    value: Any
    retries: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Why there is no answer after `attempts` attempts: what the last one did, and for how many `seconds` it ran."""

    kind: Literal["error", "timeout", "crash"]
    cause: str
    attempts: int
    seconds: float


Outcome = Answered | Failed


def load_jobs(finder: str, names: Sequence[str], settings: dict[str, Any]) -> dict[str, Job]:
    """The work of each name, as `finder` ("module:function", called with a name and the settings) finds it; prepared."""
    module, _, function = finder.partition(":")
    find: Callable[[str, dict[str, Any]], Job] = getattr(importlib.import_module(module), function)
    works = {name: find(name, settings) for name in names}
    for work in works.values():
        if work.prepare is not None:
            work.prepare()
    return works
