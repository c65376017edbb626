"""A run as the page shows it: reads the run's files when they have changed, and writes none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megarl.observe.advice.advise import Advice
from megarl.observe.advice.of_run import METRICS
from megarl.observe.page.charts import present
from megarl.observe.page.facts import (
    STATUS_TEXTS,
    WAIT_METRICS,
    advice_of,
    key_figures,
    nested_phases,
    parsed_settings,
    phase_times,
    read_summary,
    run_facts,
    run_status,
    time_facts,
    timeline,
    wait_times,
)
from megarl.observe.page.followed_file import FollowedFile
from megarl.observe.page.metrics_table import MAX_DAMAGED, MetricsTable
from megarl.observe.page.sample_pages import SampleFiles, SampleFilter, SamplePage, read_sample, sample_page
from megarl.observe.page.trace_tail import TraceTail
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sessions import faults, provenance_lines
from megarl.observe.sources import limit_sources, report_tables
from megarl.observe.token_values import read_token_values

PROBE_SECONDS = 5.0  # between two looks at the run's lock
MAX_NOTICES = 5000  # the newest; the page says how many there are
_FIGURES = ("eval/*", "rollout/rewards/mean", "critic/rewards/mean", "perf/throughput", "rollout/logprob_gap_mean")
_TIMES = ("timing_s/*", "fleet/restart_seconds", "recovery/dropped_steps")


class ViewedRun:
    """The files of one run. Methods may be called from several threads; each call reads what has been appended."""

    def __init__(self, number: int, path: Path, label: str) -> None:
        self.number, self.label = number, label
        self.run_dir = RunDirectory(path)
        self._guard = threading.RLock()
        self._metrics = MetricsTable(self.run_dir.metrics)
        self._notices_file = FollowedFile(self.run_dir.notices)
        self._notices: list[dict[str, Any]] = []
        self._notices_epoch = 0
        self._damaged_notices: list[str] = []
        self._notice_lines = 0
        self._samples = SampleFiles(self.run_dir)
        self._trace = TraceTail(self.run_dir.trace)
        self._summary: tuple[tuple[int, int] | None, dict[str, Any], list[str]] = (None, {}, [])
        self._status = ("", 0.0)  # status, and when the lock was looked at
        self._advice: tuple[tuple[Any, ...], list[Advice]] = (
            (),
            [],
        )  # state of the files that were read, and the advice

    def state(self) -> dict[str, Any]:
        """Return what tells the page that something is new: counts of lines, the newest samples, the status."""
        with self._guard:
            self._update()
            steps = self._samples.steps()
            return {
                "id": self.number,
                "status": self._current_status(),
                "metrics": [self._metrics.epoch, len(self._metrics.steps)],
                "notices": [self._notices_epoch, len(self._notices)],
                "samples": [len(steps), steps[-1] if steps else None],
                "trace": _size(self.run_dir.trace),
                "summary": _changed(self.run_dir.summary),
                "written": self._last_write(),
                "silent_minutes": self._silent_minutes(),
            }

    def overview(self) -> dict[str, Any]:
        """Return status, facts, key figures, faults, metric names, and sentences on missing and damaged data."""
        with self._guard:
            self._update()
            summary, gaps = self._read_summary()
            recipe = _text(self.run_dir.recipe)
            gaps = [*gaps, *([] if recipe is not None else ["recipe.resolved.yaml is missing."])]
            if not len(self._metrics.steps):
                gaps.append("metrics.jsonl has no finished step yet.")
            gaps += [*self._metrics.damaged, *self._damaged_notices]
            status = self._current_status()
            kind, text = STATUS_TEXTS[status]
            sessions = self._sessions()
            times = self._metrics.lines(*_TIMES)
            facts = run_facts(times, summary, parsed_settings(recipe), sessions)
            steps = self._samples.steps()
            return {
                "id": self.number,
                "label": self.label,
                "path": str(self.run_dir.path),
                "status": {"name": status, "kind": kind, "text": text},
                "error": summary.get("error"),
                "facts": facts + time_facts(self.run_dir, times, sessions, status),
                "figures": key_figures(self._metrics.lines(*_FIGURES, "timing_s/step")),
                "advice": self._findings(parsed_settings(recipe), sessions, status),
                "faults": faults(sessions, self._notices),
                "provenance": provenance_lines(sessions),
                "metrics": self._metrics.names,
                "sample_steps": [steps[0], steps[-1], len(steps)] if steps else None,
                "gaps": gaps,
                "written": self._last_write(),
            }

    def name(self) -> str:
        """Return the run's name in its summary or recipe; without these, of its folder."""
        with self._guard:
            summary, _ = self._read_summary()
            settings = parsed_settings(_text(self.run_dir.recipe))
            return str(summary.get("name") or settings.get("name") or self.run_dir.path.resolve().name)

    def metric_names(self) -> list[str]:
        with self._guard:
            self._update()
            return self._metrics.names

    def resumes(self) -> list[int]:
        """Return the first steps of later sessions."""
        with self._guard:
            return [int(session["first_step"]) for session in self._sessions()[1:] if "first_step" in session]

    def sources(self) -> dict[str, Any]:
        """Return the tables of data sources by step."""
        with self._guard:
            self._metrics.update()
            return report_tables(self._metrics.lines("source/*", "eval/*"))

    def report_curves(self) -> tuple[dict[str, Any], str]:
        """Return the curves of report.html (see `MetricsTable.report_curves`), and a note about curves left out."""
        with self._guard:
            self._metrics.update()
            weights = self._metrics.lines("source/*/samples", "eval/*/problems")
            names, note = limit_sources(weights, self._metrics.names)
            return self._metrics.report_curves(names), note

    def curves(self, names: list[str], *, smoothing: float, x: str, since: tuple[int, int] | None) -> dict[str, Any]:
        """Return curves of the metrics `names`. since: (epoch, lines) that the page has; None: nothing.

        ``whole``: the curves replace what the page has; otherwise they continue it.
        """
        with self._guard:
            self._metrics.update()
            epoch, lines = self._metrics.epoch, len(self._metrics.steps)
            whole = since is None or since[0] != epoch
            after = -1 if since is None or whole else since[1] - 1
            curves = {name: self._metrics.curve(name, smoothing=smoothing, x=x, after=after) for name in names}
            return {
                "since": [epoch, lines],
                "whole": whole,
                "curves": {name: curve for name, curve in curves.items() if curve is not None},
            }

    def phases(self) -> dict[str, Any]:
        """Return the seconds of each phase by step, who waits for whom, and the timeline of the last steps."""
        with self._guard:
            self._metrics.update()
            spans = self._trace.spans()
            return {
                "phases": phase_times(self._metrics.lines("timing_s/*"), nested_phases(spans)),
                "waits": wait_times(self._metrics.lines(*WAIT_METRICS)),
                "timeline": timeline(spans, self._sessions()),
                "has_trace": self.run_dir.trace.exists(),
            }

    def notices(self, first: int) -> dict[str, Any]:
        """Return the notices from number `first` on, at most the newest `MAX_NOTICES`."""
        with self._guard:
            self._update_notices()
            first = max(first, len(self._notices) - MAX_NOTICES, 0)
            return {
                "epoch": self._notices_epoch,
                "first": first,
                "count": len(self._notices),
                "notices": self._notices[first:],
                "damaged": self._damaged_notices,
            }

    def sample_steps(self) -> list[int]:
        with self._guard:
            return self._samples.steps()

    def samples(self, start: tuple[int, int] | None, conditions: SampleFilter) -> SamplePage:
        """Return a page of samples from `start` (step, offset) on, by default from the newest step on."""
        steps = self.sample_steps()
        if not steps:
            return SamplePage()
        return sample_page(self.run_dir, steps, start or (steps[-1], 0), conditions)

    def sample(self, step: int, offset: int) -> dict[str, Any]:
        """Return a sample's record, with ``token_values`` (None: not recorded, or damaged as ``token_damage`` says).

        Raises ValueError if there is no such sample.
        """
        record, damage = read_sample(self.run_dir, step, offset), None
        try:
            values = read_token_values(self.run_dir, step, record)
        except ValueError as error:
            values, damage = None, str(error)
        return {**record, "token_values": values, "token_damage": damage}

    def recipes(self) -> list[tuple[str, str]]:
        """Return (name, text) of the run's recipe, then of the recipes of earlier sessions, newest first."""
        paths = [self.run_dir.recipe]
        paths += sorted(self.run_dir.path.glob("recipe.resolved.*.yaml"), key=_session_number, reverse=True)
        recipes = []
        for path in paths:
            if (text := _text(path)) is not None:
                earlier = "" if path == self.run_dir.recipe else f" (earlier session {_session_number(path)})"
                recipes.append((f"{self.label}{earlier}", text))
        return recipes

    def _update(self) -> None:
        self._metrics.update()
        self._update_notices()

    def _update_notices(self) -> None:
        if not self._notices_file.has_changed():
            return
        appended = self._notices_file.read()
        if appended.replaced:
            self._notices, self._damaged_notices, self._notice_lines = [], [], 0
            self._notices_epoch += 1
        for line in appended.lines:
            self._notice_lines += 1
            try:
                notice = json.loads(line)
            except ValueError:
                notice = None
            if isinstance(notice, dict) and isinstance(notice.get("text"), str):
                self._notices.append({"time": None, "step": None, "level": "notice", **notice})
            elif line.strip() and len(self._damaged_notices) < MAX_DAMAGED:
                self._damaged_notices.append(f"notices.jsonl, line {self._notice_lines}: not a notice.")

    def _sessions(self) -> list[dict[str, Any]]:
        summary, _ = self._read_summary()
        sessions = [session for session in summary.get("sessions") or [] if {"began", "status"} <= set(session)]
        if sessions and self._current_status() == "killed":
            sessions[-1] = {**sessions[-1], "status": "killed"}
        return sessions

    def _read_summary(self) -> tuple[dict[str, Any], list[str]]:
        changed = _changed(self.run_dir.summary)
        if changed is None or changed != self._summary[0]:
            gaps: list[str] = []
            self._summary = (changed, read_summary(self.run_dir, gaps), gaps)
            self._status = ("", 0.0)
        return self._summary[1], self._summary[2]

    def _current_status(self) -> str:
        """Return the run's status. The lock is looked at seldom, and no more once the run has ended."""
        summary, _ = self._read_summary()
        status, looked = self._status
        if not status or (status in ("running", "unknown") and time.monotonic() - looked > PROBE_SECONDS):
            self._status = (run_status(self.run_dir, summary), time.monotonic())
        return self._status[0]

    def _last_write(self) -> float | None:
        """Return when the run last wrote metrics, a notice or a span, in seconds since the epoch."""
        times = [_changed(path) for path in (self.run_dir.metrics, self.run_dir.notices, self.run_dir.trace)]
        written = [changed[1] for changed in times if changed is not None]
        return max(written) / 1e9 if written else None

    def _silent_minutes(self) -> int:
        """Return for how many minutes a live run has written nothing: advice depends on it, and no file changes meanwhile."""
        written = self._last_write()
        return int((time.time() - written) // 60) if written and self._current_status() == "running" else 0

    def _findings(self, settings: dict[str, Any], sessions: list[dict[str, Any]], status: str) -> list[Advice]:
        """Return the advice, found again when a step, a notice or a minute of silence has been added."""
        basis = (self._metrics.epoch, len(self._metrics.steps), len(self._notices), self._silent_minutes(), status)
        if self._advice[0] != basis:
            lines, spans = self._metrics.lines(*METRICS), self._trace.spans() if status == "running" else []
            self._advice = (basis, advice_of(self.run_dir, lines, settings, sessions, self._notices, status, spans))
        return self._advice[1]


def chart_list(runs: Sequence[ViewedRun], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the charts of the metrics `names`, these names, and by run the steps at which it was resumed.

    names: by default all metrics of the runs.
    """
    if names is None:
        names = {name for run in runs for name in run.metric_names()}
    return {"charts": present(names), "names": sorted(names), "resumes": {run.number: run.resumes() for run in runs}}


def recipe_table(runs: Sequence[ViewedRun]) -> dict[str, Any]:
    """Return the settings of all recipes side by side: ``names``, ``texts``, and rows of key and a value per recipe (None: absent).

    ``absent`` has the labels of the runs without a recipe.
    """
    by_run = [(run.label, run.recipes()) for run in runs]
    recipes = [recipe for _, recipes in by_run for recipe in recipes]
    flat = [dict(_flat(parsed_settings(text))) for _, text in recipes]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [{"key": key, "values": [settings.get(key) for settings in flat]} for key in keys]
    return {
        "names": [name for name, _ in recipes],
        "texts": [text for _, text in recipes],
        "rows": rows,
        "absent": [label for label, recipes in by_run if not recipes],
    }


def labels(paths: list[Path]) -> list[str]:
    """Return the folder names of `paths`, with as many parent folders as make them different."""
    resolved = [path.resolve() for path in paths]
    longest = max(len(path.parts) for path in resolved)
    for depth in range(1, longest + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", json.dumps(value, ensure_ascii=False, default=str)))
    return rows


def _session_number(path: Path) -> int:
    number = path.name.removeprefix("recipe.resolved.").removesuffix(".yaml")
    return int(number) if number.isdigit() else 0


def _text(path: Path) -> str | None:
    return path.read_text(errors="replace") if path.exists() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _changed(path: Path) -> tuple[int, int] | None:
    """Return what changes with the file's content: inode and time; None if it is missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
