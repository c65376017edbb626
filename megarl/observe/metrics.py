"""metrics.jsonl: one line per step, flat keys; each metric is named where it is computed. docs/metrics.md lists all.

A crash loses at most the running step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.atomic_files import AppendFile, write_atomically
from megarl.observe.json_lines import drop_torn_line, json_line
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sinks import Sink

STEP_SECONDS = "timing_s/step"
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}
_TIMES = (
    "timing_s/", "run/", "perf/throughput", "perf/tflops", "perf/max_memory", "perf/mfu", "checkpoint/", "rollout/judge_seconds",
    "weight_sync/seconds/", "rollout/wait_seconds/", "rollout/engines_idle", "rollout/load_seconds", "rollout/engines_behind",
    "fleet/restart_seconds", "recovery/", "host/",
    "rollout/outage_seconds",
)  # fmt: skip
# Figures of all samples, of an evaluation or of a data source. A repeated attempt at scoring changes no reward.
_TIMES_OF_SAMPLES = re.compile(r"(?:.*/)?(?:agent/tool_seconds/(?:mean|max)|scoring_retries)", re.DOTALL)


def without_times(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics that a repeated run must repeat bit for bit: all but times, rates, memory and repeated attempts."""
    return [{name: value for name, value in line.items() if not _depends_on_time(name)} for line in lines]


def _depends_on_time(name: str) -> bool:
    return name.startswith(_TIMES) or _TIMES_OF_SAMPLES.fullmatch(name) is not None


def plain_number(name: str, value: Any) -> float | int:
    """Convert `value` to a Python number: numpy scalars and one-element tensors by ``item()``, bools to 0 or 1."""
    if hasattr(value, "item"):
        value = value.item()
    assert isinstance(value, (int, float)), f"metric {name!r} is not a number: {value!r}"
    return int(value) if isinstance(value, bool) else value


class MetricsLog:
    """Writes metrics.jsonl and passes every line to the sinks.

    Opening it drops an incomplete last line, left by a crash (kept in `torn`). Steps increase from line to line; a step
    has one line.
    """

    def __init__(self, run_dir: RunDirectory, sinks: Sequence[Sink] = ()) -> None:
        self._run_dir = run_dir
        self._sinks = list(sinks)
        self.torn = drop_torn_line(run_dir.metrics)
        lines = read_metrics(run_dir.metrics)
        self.last_step: int | None = int(lines[-1]["step"]) if lines else None
        self._file = AppendFile(run_dir.metrics)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the line of `step`, sync it to the disk, then pass it to the sinks."""
        assert "step" not in metrics, "`step` is a separate argument"
        assert self.last_step is None or step > self.last_step, f"step {step} after step {self.last_step}"
        numbers = {name: plain_number(name, value) for name, value in metrics.items()}
        self._file.write(json_line({"step": step, **numbers}), sync=True)
        self.last_step = step
        for sink in self._sinks:
            sink.write(step, numbers)

    def merge(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add keys to the last line, the line of `step`. The file is replaced atomically."""
        assert step == self.last_step, f"step {step} is not the last step ({self.last_step})"
        numbers = {name: plain_number(name, value) for name, value in metrics.items()}
        lines = self._run_dir.metrics.read_bytes().splitlines(keepends=True)
        last = read_metrics(self._run_dir.metrics)[-1]
        self._rewrite([*lines[:-1], json_line({**last, **numbers})])
        for sink in self._sinks:
            sink.write(step, numbers)

    def truncate_after(self, step: int) -> int:
        """Move the lines after `step` to metrics.discarded.jsonl, for a resume. Returns their number."""
        kept: list[bytes] = []
        dropped: list[bytes] = []
        for line in self._run_dir.metrics.read_bytes().splitlines(keepends=True):
            (kept if _step_of(line) <= step else dropped).append(line)
        if dropped:
            discarded = AppendFile(self._run_dir.discarded_metrics)
            try:  # append first, remove afterwards: a crash in between duplicates lines, but loses none
                discarded.write(b"".join(dropped), sync=True)
            finally:
                discarded.close()
            self._rewrite(kept)
        self.last_step = _step_of(kept[-1]) if kept else None
        return len(dropped)

    def close(self, status: str) -> None:
        """Close the file and the sinks; `status` is the status of the run."""
        self._file.close()
        for sink in self._sinks:
            sink.close(status)

    def _rewrite(self, lines: list[bytes]) -> None:
        self._file.close()
        write_atomically(self._run_dir.metrics, b"".join(lines))
        self._file = AppendFile(self._run_dir.metrics)


def _step_of(line: bytes) -> int:
    return int(json.loads(line)["step"])


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl, oldest first, with NaN and infinities as numbers. Empty if the file is missing.

    An incomplete last line (the run is writing, or crashed) is left out. Raises ValueError with the line number for any
    other invalid line.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    metrics = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is not a line of metrics ({error}): {line[:80]!r}") from error
        metrics.append(restore_non_finite(record))
    return metrics


def restore_non_finite(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a line read from JSON with its NaN and infinities as numbers; see `json_line`."""
    return {
        name: float(value) if isinstance(value, str) and value in _NON_FINITE else value
        for name, value in record.items()
    }
