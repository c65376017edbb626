"""Checks, and the results of stages: plain values that are written to disk as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from megarl.observe.json_lines import strict

Verdict = Literal["PASS", "FAIL", "NOT RUN", "REPORT"]
Relation = Literal["<=", ">=", "=="]
PASS: Final = "PASS"
FAIL: Final = "FAIL"
NOT_RUN: Final = "NOT RUN"
REPORT: Final = "REPORT"
Value = float | int | str | None


@dataclass(frozen=True)
class RecordedCheck:
    """One measured value with its limit.

    relation: the condition `value relation limit` ("<=", ">=", "=="), or "" for a figure without a limit. cause: the
    reason for a failure, or why the check was not run.
    """

    name: str
    verdict: Verdict
    value: Value = None
    limit: Value = None
    relation: Relation | Literal[""] = ""
    unit: str = ""
    cause: str = ""

    def line(self) -> str:
        """The check as one line of a log or table."""
        if self.verdict == NOT_RUN:
            return f"{self.name}: not run: {self.cause}"
        unit = f" {self.unit}" if self.unit else ""
        limit = f" ({self.relation} {shown(self.limit)}{unit})" if self.relation else ""
        cause = f": {self.cause}" if self.verdict == FAIL and self.cause else ""
        return f"{self.name}: {shown(self.value)}{unit}{limit}{cause}"


@dataclass(frozen=True)
class StageResult:
    """The verdict of one stage. `reason` explains a failure, or why the stage was not run."""

    number: int
    name: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    checks: tuple[RecordedCheck, ...] = ()

    def line(self) -> str:
        """Format the verdict: `1 kernels: PASS` or `3 collectives: FAIL (reason)`."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.number} {self.name}: {self.verdict}{reason}"


def shown(value: Value) -> str:
    """Format a value; floats with four significant digits."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}"


def limited(
    name: str, value: Value, relation: Relation, limit: Value, *, unit: str = "", cause: str = ""
) -> RecordedCheck:
    """Return a check that passes if `value relation limit` holds. With "<=" and ">=", a value that is not finite fails."""
    if relation == "==":
        good = value == limit
    else:
        assert isinstance(value, (int, float)) and isinstance(limit, (int, float))
        good = math.isfinite(value) and (value <= limit if relation == "<=" else value >= limit)
    return RecordedCheck(name, PASS if good else FAIL, value, limit, relation, unit, "" if good else cause)


def stage_verdict(
    number: int, name: str, checks: Sequence[RecordedCheck], seconds: float, *, error: str = ""
) -> StageResult:
    """Return the result of a finished stage. `error`: the exception or the end of its process; "" if `run` returned.

    The reason starts with the first failed check, which explains more than an error that follows from it.
    """
    failed = [check.line() for check in checks if check.verdict == FAIL]
    skipped = [check for check in checks if check.verdict == NOT_RUN]
    if failed or error:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        reason = "; ".join(filter(None, [failed[0] + more if failed else "", error]))
        return StageResult(number, name, FAIL, reason, seconds, tuple(checks))
    if not checks or (skipped and not any(check.verdict == PASS for check in checks)):
        reason = skipped[0].cause if skipped else "the stage made no check"  # figures are not checks
        return StageResult(number, name, NOT_RUN, reason, seconds, tuple(checks))
    return StageResult(number, name, PASS, "", seconds, tuple(checks))


def verdict_of(results: Sequence[StageResult]) -> tuple[Verdict, str]:
    """Return the verdict of all stages together, with its reason.

    FAIL with the first failed stage; NOT RUN if no stage passed; else PASS, with the stages that were not run as reason.
    """
    for result in results:
        if result.verdict == FAIL:
            return FAIL, f"stage {result.number}, {result.name}: {result.reason}"
    absent = "; ".join(
        f"stage {result.number}, {result.name}, was not run: {result.reason}"
        for result in results
        if result.verdict == NOT_RUN
    )
    if not any(result.verdict == PASS for result in results):
        return NOT_RUN, absent or "no stage was run"
    return PASS, absent


def to_json(results: Sequence[StageResult]) -> str:
    """Convert `results` to JSON. Values that are not finite, which JSON lacks, become text."""
    return json.dumps(strict([asdict(result) for result in results]), indent=1)


def from_json(text: str) -> list[StageResult]:
    """Parse the text of `to_json`."""
    results = []
    for entry in json.loads(text):
        checks = tuple(RecordedCheck(**check) for check in entry.pop("checks"))
        results.append(StageResult(**entry, checks=checks))
    return results
