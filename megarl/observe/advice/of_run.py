"""Advice about a run directory: what the run's log, the report and the page of `megarl view` share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.observe.advice.advise import Advice, advice_text, advise
from megarl.observe.advice.facts import FEWEST, Facts, Silence
from megarl.observe.json_lines import read_lines
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import sample_path, sample_steps
from megarl.recipe.schema import Recipe

METRICS = (
    "actor/*", "critic/*", "rollout/*", "response_length/*", "eval/pass@1", "eval/loss", "timing_s/*", "perf/*", "agent/*",
    "data/epochs/*", "recovery/*", "fleet/restart_seconds",
)  # fmt: skip
"""Patterns of the metrics that rules read."""
_STEPS_OF_SAMPLES = 3
_BYTES = 300_000
_PAUSE = 1.25  # between two looks at a running run: its steps so far times this


def newest_samples(run_dir: RunDirectory) -> list[dict[str, Any]]:
    """Return samples of the newest steps that have any; groups of different steps have different numbers.

    Of each step, lines that begin in the first `_BYTES` of its file are read, since the page has to open at once.
    """
    steps = sample_steps(run_dir)[-_STEPS_OF_SAMPLES:]
    return [record for step in steps for record in read_lines(sample_path(run_dir, step), most=_BYTES)[0]]


def silence_of(run_dir: RunDirectory, spans: Sequence[Mapping[str, Any]], last_step: int) -> Silence:
    """Return how long a live run has written nothing. spans: the newest of its trace. last_step: of metrics.jsonl."""
    now = time.time()
    written = run_dir.last_write() or now
    phases = [
        span["name"]
        for span in spans
        if span["process"] == "controller"
        and span["args"].get("step") == last_step + 1
        and "inside" not in span["args"]
    ]
    return Silence(max(0.0, now - written), phases[-1] if phases else None)


class Adviser:
    """Advice about a run while it runs. Looks at it seldom: after 10 steps, then each time it is a quarter longer."""

    def __init__(self, run_dir: RunDirectory, recipe: Recipe, done: int) -> None:
        """done: finished steps of earlier sessions."""
        self._run_dir, self._settings = run_dir, dataclasses.asdict(recipe)
        self._next = max(FEWEST, int(done * _PAUSE))
        self._known: set[str] = set()

    def after(self, step: int, sessions: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """Return the texts of new findings after `step`: of each rule once in this session. sessions: as in summary.json."""
        if step < self._next:
            return []
        self._next = max(step + FEWEST, int(step * _PAUSE))
        notices = read_lines(self._run_dir.notices)[0]
        findings = self.findings(read_metrics(self._run_dir.metrics), sessions=sessions, notices=notices)
        new = [advice for advice in findings if advice["rule"] not in self._known]
        self._known |= {advice["rule"] for advice in new}
        return [f"advice: {advice_text(advice)}" for advice in new]

    def findings(self, lines: Sequence[Mapping[str, Any]], **more: Any) -> list[Advice]:
        """Return the findings. lines: of metrics.jsonl. more: further parts of `Facts`.

        An error in a rule becomes a finding: advice must not end a run.
        """
        try:
            samples = newest_samples(self._run_dir)
            return advise(Facts(lines=lines, settings=self._settings, samples=samples, **more))
        except Exception as error:  # noqa: BLE001 - see above
            failure = f"{type(error).__name__}: {error}"
            what = "no advice, because of an error in megarl"
            return [{"rule": "error", "kind": "liveness", "what": what, "evidence": failure, "changes": (), "note": ""}]
