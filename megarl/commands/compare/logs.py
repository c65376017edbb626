"""Readers of logs: megarl's run directories, and verl's console output, JSONL and TensorBoard events."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import pluralize
from megarl.observe.json_lines import read_lines
from megarl.observe.metrics import restore_non_finite
from megarl.observe.run_dir import RunDirectory

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Ray's "(TaskRunner pid=123, ip=10.0.0.1)", a time stamp or a progress bar may precede it.
_STEP = re.compile(r"(?<![\w/])step:(\d+) - ")
# Newer versions print numpy scalars by their repr: np.float64(0.5).
_VALUE = re.compile(
    r"(?P<name>[^\s:][^:]*):(?:np\.\w+\(|tensor\()?(?P<value>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))(?![\w.])"
)


@dataclass
class Log:
    """The metrics of one run: name -> step -> value. If a step was written twice (after a resume), the last one counts."""

    path: Path
    kind: str  # "megarl", "verl console", "JSONL", "TensorBoard"
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    rewritten: dict[str, set[int]] = field(default_factory=dict)  # metric -> steps written more than once
    notes: list[str] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            curve = self.metrics.setdefault(name, {})
            if step in curve:
                self.rewritten.setdefault(name, set()).add(step)
            curve[step] = value

    def curve(self, metric: str, side: str) -> dict[int, float]:
        """Return step -> value of `metric`. Raises ValueError, with similar names, if the log lacks it."""
        if metric not in self.metrics:
            raise ValueError(
                f"{side} ({self.path}, {self.kind}) has no metric {metric}. {self._near(metric)}"
                f"Choose with --metric{'-b' if side == 'B' else ''}."
            )
        return self.metrics[metric]

    def _near(self, metric: str) -> str:
        close = difflib.get_close_matches(metric, self.metrics, n=3, cutoff=0.4)
        names = close or sorted(self.metrics)[:5]
        return f"{'Nearest' if close else 'It has'}: {', '.join(names)}{'' if close else ', ...'}. "


def read_log(path: Path) -> Log:
    """Read a run directory, a folder of event files, an event file, JSONL or console output.

    Raises ValueError, with a description of these formats, if `path` has none of them or no metric.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist. Give a run directory (runs/my-run), a log of verl (console output or JSONL), "
            "or a folder of TensorBoard events."
        )
    try:
        log = _read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not log.metrics:
        raise ValueError(
            f"{path} has no metrics (read as {log.kind}). A console log has lines such as "
            "'step:12 - critic/rewards/mean:0.5 - ...', JSONL has lines such as "
            '\'{"step": 12, "data": {"critic/rewards/mean": 0.5}}\', and a run of megarl has one line per step.'
        )
    return log


def _read(path: Path) -> Log:
    if path.is_dir():
        return _read_folder(path)
    return _read_events(path) if "tfevents" in path.name else _read_text(path)


def _read_folder(path: Path) -> Log:
    run = RunDirectory(path)
    if run.metrics.exists():
        return _read_json_lines(run.metrics, Log(path, "megarl"))
    if any("tfevents" in file.name for file in path.iterdir()):
        return _read_events(path)
    inside = sorted({file.parent for file in path.rglob("*tfevents*")})
    runs = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
    if len(inside) == 1 and not runs:
        return _read_events(inside[0])
    hint = "".join(f"\n  {folder}" for folder in [*runs, *inside][:8])
    raise ValueError(
        f"{path} has no metrics.jsonl and no TensorBoard events (files named *tfevents*)."
        + (f" Give one of these folders inside it:{hint}" if hint else "")
    )


def _read_events(path: Path) -> Log:
    """Read the events of a folder, sorted by wall time, so that the events of a resumed run come last."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    log = Log(path, "TensorBoard")
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})  # 0: keep all events
    events.Reload()
    for tag in events.Tags()[SCALARS]:
        for event in sorted(events.Scalars(tag), key=lambda event: event.wall_time):
            log.add(int(event.step), {tag: float(event.value)})
    return log


def _read_text(path: Path) -> Log:
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        structured = isinstance(json.loads(first), dict)
    except ValueError:
        structured = False
    return _read_json_lines(path, Log(path, "JSONL")) if structured else _read_console(path)


def _read_json_lines(path: Path, log: Log) -> Log:
    """Read one JSON object per step: flat (megarl), or with the metrics under ``data`` (verl's file logger)."""
    records, bad = read_lines(path)
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            bad += 1
            continue
        values = record["data"] if isinstance(record.get("data"), dict) else record
        log.add(step, {name: value for name, value in _numbers(values) if name != "step"})
    if bad:
        log.notes.append(f"{pluralize(bad, 'line')} of {path.name} could not be read as metrics of a step")
    return log


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in restore_non_finite(values).items():
        if value is None:  # some JSON writers replace NaN by null
            yield name, math.nan
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def _read_console(path: Path) -> Log:
    """Read verl's console logger: lines ``step:12 - critic/rewards/mean:0.5 - ...`` among any other output."""
    log = Log(path, "verl console")
    with path.open(encoding="utf-8", errors="replace") as file:  # the \r of a progress bar also ends a line
        for line in file:
            if parsed := console_line(line):
                step, values, left_out = parsed
                log.add(step, values)
                if left_out:
                    log.notes.append(f"step {step:,} ends without a newline: its last value, {left_out}, may be cut")
    return log


def console_line(line: str) -> tuple[int, dict[str, float], str] | None:
    """Parse a line of metrics into (step, metrics, name of the omitted metric or ""), or return None.

    A line without a newline at its end may be cut within its last number, so its last metric is omitted.
    """
    plain = _ANSI.sub("", line)
    if not (head := _STEP.search(plain)):
        return None
    matches = [_VALUE.match(part.strip()) for part in plain[head.end() :].split(" - ")]
    values = {match["name"]: float(match["value"]) for match in matches if match}
    cut = "" if line.endswith("\n") or matches[-1] is None else matches[-1]["name"]
    values.pop(cut, None)
    return int(head[1]), values, cut
