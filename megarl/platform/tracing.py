"""What a device's profiler can record, and what a run asks of it, in plain values: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

CONTENTS = ("device", "cpu", "memory", "shapes", "modules", "stack")
CHEAP = ("device", "cpu", "shapes")  # recorded where a run names no contents


@dataclass(frozen=True)
class Tracing:
    """The settings that the profiler of a kind of device understands. Empty: it has no such setting.

    contents: of CONTENTS. levels, metrics, exports: values by their names in recipes. levels_of_metrics: the levels that
    record metrics. level_of_marks: the level that records marks alone. marks: whether it records marks that libraries set in
    the stream. analysis: whether it writes raw data first and tables afterwards, so that the second may be left for later.
    engines: what an engine's traces have fixed, for a notice.
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
    """What one run records. `contents`: empty for those of CHEAP that the device has. `level`, `metrics`, `export`: "" for
    the profiler's own default."""

    contents: tuple[str, ...] = ()
    level: str = ""
    metrics: str = ""
    export: str = ""
    marks: bool = False
    analysis: bool = True

    def records(self, content: str) -> bool:
        """Return whether `content`, one of CONTENTS, is recorded."""
        return content in (self.contents or CHEAP)
