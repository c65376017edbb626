"""Profiler settings of a device kind and of a run, in plain values, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass

CONTENTS = ("device", "cpu", "memory", "shapes", "modules", "stack")
CHEAP = ("device", "cpu", "shapes")  # default contents


@dataclass(frozen=True)
class Tracing:
    """Settings that the profiler of a device kind supports. Empty: the profiler has no such setting.

    contents: supported values of CONTENTS. levels, metrics, exports: names of the values in recipes. levels_of_metrics:
    levels that record metrics. level_of_marks: level that records only marks. marks: supports marks that libraries set in
    the stream. analysis: writes raw data first, so that the analysis can be postponed. engines: notice about settings that
    engines ignore.
    """

    contents: tuple[str, ...] = ("device", "cpu", "memory", "shapes", "stack")
    levels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    levels_of_metrics: tuple[str, ...] = ()
    level_of_marks: str = ""
    marks: bool = False
    analysis: bool = False
    engines: str = ""


@dataclass(frozen=True)
class TraceOptions:
    """Profiler settings of a run. Empty `contents`: CHEAP. "" for `level`, `metrics`, `export`: the profiler's default."""

    contents: tuple[str, ...] = ()
    level: str = ""
    metrics: str = ""
    export: str = ""
    marks: bool = False
    analysis: bool = True

    def records(self, content: str) -> bool:
        """Return True if `content`, one of CONTENTS, is recorded."""
        return content in (self.contents or CHEAP)
