"""Groups that could not be scored: count and report them, and stop the run if there are too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.types import Group, SampleFailure

LEAST_GROUPS = 8  # smaller windows give no reliable share
_NAMED = 3  # failures that a notice names


class FailedShare:
    """Enforce `reward.max_failed_share` over the last groups."""

    def __init__(self, most: float, groups_per_step: int) -> None:
        self.most = most
        self.window = max(groups_per_step, LEAST_GROUPS)
        self._failed: deque[bool] = deque(maxlen=self.window)

    def add(self, group: Group) -> None:
        """Count a group. Raise RuntimeError if more than the share `most` of a full window have failed; the window may
        not be full yet."""
        self._failed.append(bool(group.failures))
        if group.failures and sum(self._failed) > self.most * self.window:
            count = f"{sum(self._failed)} of the last {len(self._failed)} groups"
            raise RuntimeError(_too_many(count, self.most, group.failures[0]))


def check_evaluation(groups: Sequence[Group], most: float) -> None:
    """Raise RuntimeError if all problems, or more than the share `most` of them, could not be scored."""
    failed = [group for group in groups if group.failures]
    if failed and (len(failed) > most * len(groups) or len(failed) == len(groups)):
        count = f"{len(failed)} of {len(groups)} problems of the evaluation"
        raise RuntimeError(_too_many(count, most, failed[0].failures[0]))


def _too_many(count: str, most: float, failure: SampleFailure) -> str:
    scored = failure.source.startswith("scorer")
    remedy = (
        "Fix the scorer or the row; raise reward.timeout if the scorer is slow" if scored else "Fix the named cause"
    )
    limit = f"reward.max_failed_share = {most:g}"
    return f"{count} could not be finished or scored ({limit}). The last cause: {failure}. {remedy}."


@dataclass(frozen=True)
class ScoringCounts:
    """Numbers of samples that could not be scored, in all and by kind of the last failure, and of repeated attempts."""

    failed: float
    timeouts: float
    crashes: float
    errors: float
    retries: float

    @classmethod
    def of(cls, groups: Sequence[Group]) -> ScoringCounts:
        kinds = [failure.kind for group in groups for failure in group.failures]
        retries = sum(group.scoring_retries for group in groups)
        timeouts, crashes, errors = (float(kinds.count(kind)) for kind in ("timeout", "crash", "error"))
        return cls(float(len(kinds)), timeouts, crashes, errors, float(retries))


def scoring_notice(groups: Sequence[Group], noun: str, consequence: str) -> str | None:
    """Return a notice with the first distinct failures; None if nothing failed. `noun`: the notice's word for groups."""
    failed = [group for group in groups if group.failures]
    if not failed:
        return None
    causes = list(dict.fromkeys(str(failure) for group in failed for failure in group.failures))
    more = f"; and {len(causes) - _NAMED} more" if len(causes) > _NAMED else ""
    samples = sum(len(group.failures) for group in failed)
    first = "; ".join(causes[:_NAMED])
    return f"{samples} samples of {len(failed)} {noun} could not be scored: {first}{more}. {consequence}"
