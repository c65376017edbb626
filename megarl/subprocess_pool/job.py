"""Jobs that pool processes execute, and the outcome of a call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


class CallError(Exception):
    """Raised by a `Job`'s function to fail one call. `cause` is the complete message."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True)
class Job:
    """A function from a request to any picklable value. It may be ``async def``.

    `prepare` runs once, before processes are forked: slow imports belong there.
    """

    function: Callable[[Any], Any]
    prepare: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Answered:
    """Return value of a call. `retries`: failed attempts before it; `seconds`: duration of the last attempt."""

    value: Any
    retries: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A call that failed `attempts` times. `kind`, `cause` and `seconds` describe the last attempt."""

    kind: Literal["error", "timeout", "crash"]
    cause: str
    attempts: int
    seconds: float


Outcome = Answered | Failed


def load_jobs(factory: str, names: Sequence[str], settings: dict[str, Any]) -> dict[str, Job]:
    """Build and prepare the job of each name. `factory`: "module:function", called with a name and the settings."""
    module, _, function = factory.partition(":")
    make_job: Callable[[str, dict[str, Any]], Job] = getattr(importlib.import_module(module), function)
    jobs = {name: make_job(name, settings) for name in names}
    for job in jobs.values():
        if job.prepare is not None:
            job.prepare()
    return jobs
