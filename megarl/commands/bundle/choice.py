"""The step that a bundle repeats, and the start of the run that contains it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.commands.bundle.contents import portable_error
from megarl.commands.replay import steps_of
from megarl.engines.tape import Record, update_event
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.replay import no_plan
from megarl.rollout.tape import ReplayPlan, TapeSegment, from_journal, history, other_format, segments_of


@dataclass(frozen=True)
class BundledStep:
    """A step, and the segment of the tape that leads to it. `failure`: the error with which the run failed in this step."""

    segment: TapeSegment
    step: int
    failure: str | None = None

    def controller_records(self) -> list[Record]:
        """Return the segment's records up to the step's end; of a failed step, all records and the failure."""
        records = list(self.segment.records)
        if self.failure is not None:
            return [*records, {"failed": self.step}]
        end = {"version": self.step}
        return records[: records.index(end) + 1] if end in records else records

    def engine_records(self, records: Sequence[Record]) -> list[Record]:
        """Return an engine's records up to the update after the next step, from its `records` of the segment; all of a judge."""
        later = update_event(self.step + 1)
        end = next((index for index, record in enumerate(records) if record.get("event") == later), len(records))
        return list(records if self.failure is not None else records[:end])


def choose(recorded: RunDirectory, step: int | None) -> BundledStep:
    """Return the choice of `step`; None: the step in which the run failed, else the last one with metrics.

    Raises ValueError if the tape does not contain the step.
    """
    segments = segments_of(recorded.tape)
    if not segments:
        raise ValueError(no_plan(recorded))
    failed = _failure(recorded, segments[-1])
    if failed is not None and step in (None, failed.step):
        choice, plan = failed, ReplayPlan(failed.segment, failed.step)
    else:
        step = _last_step(recorded) if step is None else step
        plan = _plan_of(recorded, history(segments), step)
        choice = BundledStep(plan.segment, step)
    if (problem := other_format([plan])) is not None:
        raise ValueError(f"{recorded.path}: {problem}. Pack it with that version of megarl")
    if (problem := from_journal([plan])) is not None:
        raise ValueError(f"{recorded.path}: {problem}. A bundle can contain steps of the other segments")
    return choice


def _plan_of(recorded: RunDirectory, plans: Sequence[ReplayPlan], step: int) -> ReplayPlan:
    """Return the plan that repeats `step` with its metrics. Raises ValueError if there is none."""
    for plan in plans:
        if step in steps_of(recorded, plan):
            return plan
    raise ValueError(f"step {step} of {recorded.path} is not on its tape: {_steps_text(recorded, plans)}")


def _failure(recorded: RunDirectory, last: TapeSegment) -> BundledStep | None:
    """Return the step in which the run failed, with the error; None if its last start was finished, stopped or killed."""
    if last.ended or not recorded.summary.is_file():
        return None
    summary: dict[str, Any] = json.loads(recorded.summary.read_text())
    if summary["status"] != "failed":
        return None
    return BundledStep(last, last.last_step + 1, portable_error(str(summary["error"]), str(recorded.path)))


def _last_step(recorded: RunDirectory) -> int:
    lines = read_metrics(recorded.metrics)
    if not lines or lines[-1]["step"] < 1:
        raise ValueError(f"{recorded.path} has finished no step")
    return int(lines[-1]["step"])


def _steps_text(recorded: RunDirectory, plans: Sequence[ReplayPlan]) -> str:
    spans = [f"{steps[0]} to {steps[-1]}" for plan in plans if (steps := steps_of(recorded, plan))]
    return f"it has the steps {', '.join(spans)}" if spans else "it has no whole step"
