"""Events of a run as JSON lines, for programs. docs/console.md lists them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megarl.observe.console.base import Console
from megarl.observe.json_lines import json_line
from megarl.observe.restarts import restart_cause
from megarl.observe.run_dir import RunDirectory


class JsonConsole(Console):
    """Prints one object per line: start, progress, step, eval, checkpoint, notice and end.

    Each object has ``event``, ``time`` (seconds since the epoch) and ``run`` (the run's name). NaN and infinities are strings, as
    in metrics.jsonl.
    """

    def __init__(self, name: str, run: Path, steps_done: int, total_steps: int, stream: TextIO) -> None:
        self._name, self._directory, self._stream = name, RunDirectory(run), stream
        self._step, self._total = steps_done, total_steps
        self._checkpoint: Path | None = None
        self._guard = threading.Lock()  # notices come from several threads
        first = {"first_step": steps_done + 1, "total_steps": total_steps}
        cause = {"restarted_after": restart_cause()} if restart_cause() else {}
        self._print("start", **first, directory=str(run), **cause)

    def reached(self, text: str, seconds: float) -> None:
        self._print("progress", text=text, seconds=round(seconds, 3))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._print("step", step=step, total_steps=self._total, metrics=dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._print("eval", step=step, metrics=dict(metrics))

    def checkpoint(self, step: int, path: Path) -> None:
        self._checkpoint = path
        self._print("checkpoint", step=step, path=str(path))

    def notice(self, text: str, warning: bool) -> None:
        self._print("notice", level="warning" if warning else "notice", text=text)

    def end(self, status: str, error: str | None) -> None:
        model = self._directory.path / "hf"
        paths: dict[str, Path | None] = {
            "report": self._directory.report if self._directory.report.exists() else None,
            "checkpoint": self._checkpoint,
            "model": model if model.is_dir() else None,
        }
        shown = {name: None if path is None else str(path) for name, path in paths.items()}
        directory = str(self._directory.path)
        self._print("end", status=status, error=error, last_step=self._step, directory=directory, **shown)

    def _print(self, event: str, **facts: Any) -> None:
        line = json_line({"event": event, "time": time.time(), "run": self._name, **facts}).decode()
        with self._guard:
            self._stream.write(line)
            self._stream.flush()
