"""RunLog: the controller's interface to all output of a run."""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.atomic_files import AppendFile, Reserve, write_atomically
from megarl.errors import command_name
from megarl.hf import hub
from megarl.observe.advice.of_run import Adviser
from megarl.observe.alerts import Alerts
from megarl.observe.console import Console, ConsoleStream, make_console
from megarl.observe.json_lines import drop_torn_line, json_line, read_lines, strict
from megarl.observe.metrics import MetricsLog, read_metrics
from megarl.observe.page.report import write_report_or_warn
from megarl.observe.restarts import restart_cause, restarts_by_command
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import discard_steps_after, write_samples
from megarl.observe.sessions import effective_time, faults, productive_seconds, read_sessions, step_seconds
from megarl.observe.sinks import make_sinks
from megarl.observe.spans import make_spans
from megarl.observe.stdout import output
from megarl.observe.summary import before_and_after, summarize
from megarl.observe.token_values import write_token_values
from megarl.observe.trace import Trace
from megarl.recipe import Recipe, to_yaml
from megarl.recipe.observe import WARNINGS, Event

_open_phases: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("open_phases", default=())


class RunLog:
    """Metrics, trace, samples, notices and console of one session of a run.

    Use it as a context manager: an exception closes it as "failed", completes the files and restores the terminal. ::

        with RunLog(recipe, run_dir, first_step=1, total_steps=100) as log:
            for step in range(1, 101):
                with log.phase("gen"):
                    ...
                log.add({"critic/rewards/mean": 0.5})
                log.step(step)

    Added metrics belong to the next step. Opening the log locks the directory (ValueError if another run has the lock)
    and discards the metrics and samples that an earlier session wrote after ``first_step - 1``, but for samples of `trained_steps`.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDirectory | Path,
        first_step: int,
        total_steps: int,
        trained_steps: int = 0,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """trained_steps: of the checkpoint or journal, which may contain step `first_step` already: its samples are kept.
        provenance: of this start (megarl/preflight/provenance.py); None: unknown."""
        self.run_dir = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
        self.next_step = first_step
        self._recipe, self._total_steps = recipe, total_steps
        self.provenance: dict[str, Any] = dict(provenance or {})
        self._guard = threading.RLock()
        self._pending: dict[str, Any] = {}
        self._non_finite: set[str] = set()
        self._closed = self._repeats = False
        self._parts = contextlib.ExitStack()  # undone in reverse order if a later part fails to start
        with self._parts, contextlib.ExitStack() as sinks:
            self._open(first_step, trained_steps, sinks)
            sinks.pop_all()  # they stay open until `close`
            self._parts = self._parts.pop_all()
        self._clock = self._began = time.perf_counter()

    def _open(self, first_step: int, trained_steps: int, sinks: contextlib.ExitStack) -> None:
        unlockable = self.run_dir.lock()
        self._parts.callback(self.run_dir.unlock)
        self.run_dir.write_recipe(to_yaml(self._recipe))
        drop_torn_line(self.run_dir.notices)
        self._notices = AppendFile(self.run_dir.notices)
        self._parts.callback(self._notices.close)
        self._alerts = Alerts(self._recipe.observe.alerts, self._recipe.name, self._warn_of_alerts)
        self._parts.callback(self._close_alerts)
        for sink in (opened := make_sinks(self._recipe, self.run_dir, first_step, self.warn)):
            sinks.callback(sink.close, "failed")
        self._metrics = MetricsLog(self.run_dir, opened)
        # A fresh run discards step 0 too, the evaluation at the start.
        kept = first_step - 1 if first_step > 1 or trained_steps else -1
        discarded = self._metrics.truncate_after(kept)
        for folder in (self.run_dir.samples, self.run_dir.tokens):
            discard_steps_after(folder, max(kept, trained_steps))
        about = {"megarl.first_step": first_step, "megarl.total_steps": self._total_steps}
        self._spans = make_spans(self._recipe.observe.otlp, self._recipe.name, about, self.warn)
        self.trace = Trace(self.run_dir.trace)
        self._stream = ConsoleStream(output())
        done, total = first_step - 1, self._total_steps
        self._console: Console = make_console(self._recipe, done, total, self._stream, run=self.run_dir.path)
        self._parts.callback(self._console.close)
        self._adviser = Adviser(self.run_dir, self._recipe, first_step - 1)
        self._productive = productive_seconds(read_metrics(self.run_dir.metrics))
        self._sessions = read_sessions(self.run_dir.summary, restart_cause())
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        start = {"first_step": first_step, "began": time.time(), "status": "running", **process}
        self._sessions.append({**start, "provenance": self.provenance})
        self._reserve = Reserve(self.run_dir.path / ".reserve")
        self._parts.callback(self._reserve.release)
        self._write_summary("running", None)
        if unlockable:
            self.warn(unlockable)
        if self._metrics.torn:
            self.notice(f"{self.run_dir.metrics} ended in an incomplete line after a crash. The line was dropped.")
        if discarded:
            self.warn(f"{discarded} later steps of an earlier session were moved to {self.run_dir.discarded_metrics}.")
        if self._metrics.last_step is not None and self._metrics.last_step < first_step - 1:
            self.warn(
                f"metrics.jsonl goes to step {self._metrics.last_step}, the checkpoint to step {first_step - 1}: the "
                "earlier session ended before it wrote the metrics in between. They are lost."
            )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as ``timing_s/<name>`` of the next step. Phases may nest and repeat; times add up."""
        outer = _open_phases.get()
        assert name not in outer, f"phase {name!r} is already open: its time would count twice"
        token = _open_phases.set((*outer, name))
        self._console.phase(name)
        began, clock = time.time(), time.perf_counter()
        try:
            with self._spans.phase(name, nested=bool(outer)):
                yield
        finally:
            seconds = time.perf_counter() - clock
            _open_phases.reset(token)
            self._console.phase(outer[-1] if outer else None)
            with self._guard:
                key = f"timing_s/{name}"
                self._pending[key] = self._pending.get(key, 0.0) + seconds
                # Phases after the last step (the export) belong to no step.
                labels: dict[str, Any] = {"step": self.next_step} if self.next_step <= self._total_steps else {}
            labels |= {"inside": outer[-1]} if outer else {}
            thread = threading.current_thread().name
            self.trace.add(name, "controller", thread, began, seconds, **labels)

    @contextlib.contextmanager
    def repeating(self) -> Iterator[dict[str, Any]]:
        """In the block a finished step is computed again: its metrics, times, samples and notices of updates are not logged.

        Yields a dict that holds the metrics at the end of the block.
        """
        metrics: dict[str, Any] = {}
        with self._guard:
            logged, self._pending, self._repeats = self._pending, {}, True
        try:
            yield metrics
        finally:
            with self._guard:
                metrics.update(self._pending)
                self._pending, self._repeats = logged, False

    def withdraw_metrics(self, earlier: Mapping[str, Any], *, phase: str) -> None:
        """Return to `earlier` metrics of the next step. The times added since then become time of `phase`."""
        with self._guard:
            since = sum(self._take_times().values()) - sum(v for k, v in earlier.items() if k.startswith("timing_s/"))
            self._pending = {**earlier, (key := f"timing_s/{phase}"): earlier.get(key, 0.0) + since}

    def begin(self, earlier: float = 0.0) -> None:
        """Begin the first step. The times so far become the session's start in summary.json, not part of that step. `earlier`: seconds
        that another process has spent on the step."""
        with self._guard:
            times = self._take_times()
            now = time.perf_counter()
            self._sessions[-1]["start"] = {"seconds": now - self._clock, **times}
            self._clock = now - earlier
        self._begin_span()
        self._write_summary("running", None)
        self._alerts.send("start", f"the first step is {self.next_step} of {self._total_steps}", self.next_step)

    def add_provenance(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the provenance of this start, such as its hosts. `begin` and the end of the run write them."""
        self.provenance.update(facts)

    def reached(self, text: str) -> None:
        """Show the progress of the start on the console. It is not written to a file."""
        self._console.reached(text, time.perf_counter() - self._began)

    def call(self, name: str, process: str, thread: str, began: float, seconds: float, **args: Any) -> None:
        """Add the call of a worker or engine to the trace; `began` in seconds since the epoch."""
        self.trace.add(name, process, thread, began, seconds, **args)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics of the next step. An existing key is replaced."""
        with self._guard:
            self._pending.update(metrics)

    def pending(self) -> dict[str, Any]:
        """Return a copy of the metrics added for the next step so far."""
        with self._guard:
            return dict(self._pending)

    def elapsed(self) -> float:
        """Return the seconds since the last step's line was written: timing_s/step if the step ended now."""
        return time.perf_counter() - self._clock

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the results of an evaluation after `step` (0: before the first) to that step's line, as ``eval/<name>``.

        `step` is the next step or a finished step. Step 0 has no line yet: this writes it, with the times added so far.
        """
        assert step <= self.next_step, f"evaluation of step {step}, but the next step is {self.next_step}"
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        if step == self.next_step:
            self.add(named)
        elif step == self._metrics.last_step:
            self._metrics.merge(step, named)
        else:
            with self._guard:
                times = self._take_times()
            self._write_line(step, {**named, **times})
        self._console.evaluation(step, named)

    def checkpoint(self, step: int, path: Path) -> None:
        """Show on the console that the checkpoint of `step` is complete, at `path`."""
        self._console.checkpoint(step, path)

    def samples(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Write samples of `step` (see `samples.sample_records`), at most ``observe.samples_per_step`` of them."""
        if self._recipe.observe.samples_per_step and not self._repeats:
            write_samples(self.run_dir, step, records, self._recipe.observe.samples_per_step)

    def tokens(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Write the tokens of samples of `step` (see `token_values.token_records`)."""
        if not self._repeats:
            write_token_values(self.run_dir, step, records)

    def step(self, step: int) -> None:
        """Finish `step`: write and sync its line, with ``timing_s/step``, the seconds since the last line."""
        assert step == self.next_step, f"step {step} is not the next step, {self.next_step}"
        with self._guard:
            metrics, self._pending = self._pending, {}
            self.next_step = step + 1
        self._write_line(step, metrics)

    def notice(self, text: str, event: Event | None = None) -> None:
        """Show a notice, or a warning for an event of `WARNINGS`, on the console, in notices.jsonl and in the report. event: for alerts."""
        self._say(text, "warning" if event in WARNINGS else "notice", event)

    def warn(self, text: str, event: Event = "warning") -> None:
        """Show a warning on the console, in notices.jsonl and in the report. event: for alerts."""
        self._say(text, "warning", event)

    def close(self, status: str, error: str | None = None) -> None:
        """End the session as "finished", "failed" or "stopped". Later calls do nothing.

        summary.json gets its final status even on a full disk: its space was reserved at the start. Raises OSError if
        another file could not be completed; the status of a finished run is then "failed".
        """
        if self._closed:
            return
        self._closed = True
        try:
            with self._parts:  # releases terminal, notices and lock in any case, and sends the last alerts
                self._warn_of_lost_console()
                self._reserve.release()
                problem: OSError | None = None
                for finish in (lambda: self._metrics.close(status), self.trace.close):
                    try:
                        finish()
                    except OSError as failure:
                        problem = problem or failure
                if problem is not None and status == "finished":
                    status, error = "failed", f"{type(problem).__name__}: {problem}"
                self._alert_of_end(status, error)
                self._sessions[-1].update(status=status, ended=time.time(), error=error, last_step=self.next_step - 1)
                self._write_summary(status, error)
                if lost := self._spans.close(status, error):
                    self._write_notice(lost, "warning", None, self._current_step)
                if problem is not None:
                    raise problem
                if self._recipe.observe.report:
                    write_report_or_warn(self.run_dir.path, self.warn)
        finally:
            self._console.end(status, error)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, KeyboardInterrupt):
            self.close("stopped", "interrupted from the keyboard")
        elif not isinstance(error, Exception):  # SIGTERM, as cluster managers send it
            self.close("stopped", "terminated from outside")
        else:
            self.close("failed", f"{type(error).__name__}: {error}")

    def _take_times(self) -> dict[str, float]:
        return {name: self._pending.pop(name) for name in list(self._pending) if name.startswith("timing_s/")}

    def _write_line(self, step: int, metrics: dict[str, Any]) -> None:
        now = time.perf_counter()
        metrics = {**metrics, "timing_s/step": now - self._clock}
        self._clock = now
        if "recovery/dropped_steps" in metrics:
            self._productive = productive_seconds([*read_metrics(self.run_dir.metrics), {**metrics, "step": step}])
        else:
            self._productive += step_seconds(metrics)
        wall = time.time() - self._sessions[0]["began"]
        metrics["run/ettr"] = min(1.0, self._productive / wall) if wall > 0 else 1.0
        self._metrics.write(step, metrics)
        self._warn_of_non_finite(step, metrics)
        self._spans.end_step(step, metrics)
        self._begin_span()
        self._console.step(step, metrics)
        self._warn_of_lost_console()
        for advice in self._adviser.after(step, self._sessions):
            self.notice(advice)

    def _begin_span(self) -> None:
        if self.next_step <= self._total_steps:
            self._spans.begin_step(self.next_step)

    def _warn_of_non_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warn of the first NaN or infinity of each metric: it is easily overlooked in a curve."""
        for name, value in metrics.items():
            if not math.isfinite(value) and name not in self._non_finite:
                self._non_finite.add(name)
                self._say(
                    f"{name} is {float(value)} at step {step} (reported once per metric).", "warning", "warning", step
                )

    def _say(self, text: str, level: str, event: Event | None = None, step: int | None = None) -> None:
        if self._repeats and event == "update":
            return  # it was said when the step was trained first
        step = self._current_step if step is None else step
        self._write_notice(text, level, event, step)
        if event is not None:
            self._alerts.send(event, text, step)

    def _write_notice(self, text: str, level: str, event: Event | None, step: int) -> None:
        kind = {} if event in (None, "warning") else {"event": event}  # the level names warnings
        line = json_line({"time": time.time(), "step": step, "level": level, **kind, "text": text})
        with self._guard:
            self._notices.write(line)
            self._console.notice(text, level == "warning")
            self._spans.notice(text, level)

    @property
    def _current_step(self) -> int:
        return min(self.next_step, self._total_steps)

    def _alert_of_end(self, status: str, error: str | None) -> None:
        if status != "failed":
            self._alerts.send("end", f"{status}: {error}" if error else status, self._current_step)
        elif not restarts_by_command():  # that command knows whether the failure ends the run
            self._alerts.send("failure", error or status, self._current_step)

    def _warn_of_alerts(self, text: str) -> None:
        self._write_notice(text, "warning", None, self._current_step)

    def _warn_of_lost_console(self) -> None:
        if failure := self._stream.take_failure():
            follow = f"Follow the run with: {command_name()} view {self.run_dir.path}"
            self._write_notice(f"{failure} {follow}", "warning", None, self._current_step)

    def _close_alerts(self) -> None:
        unsent = self._alerts.close()
        if unsent is not None:
            self._warn_of_alerts(unsent)

    def _write_summary(self, status: str, error: str | None) -> None:
        lines = read_metrics(self.run_dir.metrics)
        discarded, notices = (read_lines(path)[0] for path in (self.run_dir.discarded_metrics, self.run_dir.notices))
        start = {str(n): session["start"]["seconds"] for n, session in enumerate(self._sessions) if "start" in session}
        ettr = effective_time(self._sessions, lines, discarded, time.time())
        summary = {
            "name": self._recipe.name,
            "model": str(hub.name_of_folder(self._recipe.model.path) or self._recipe.model.path),
            "status": status,
            "error": error,
            "steps": int(lines[-1]["step"]) if lines else 0,
            "total_steps": self._total_steps,
            **summarize(lines, start),
            "evaluation": before_and_after(lines),
            "ettr": ettr,
            "faults": faults(self._sessions, notices),
            "advice": self._adviser.findings(lines, sessions=self._sessions, notices=notices, ettr=ettr),
            "sessions": self._sessions,
        }
        write_atomically(self.run_dir.summary, json.dumps(strict(summary), indent=1).encode())
