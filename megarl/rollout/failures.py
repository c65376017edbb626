"""Groups with samples that could not be scored: left out, counted, named, and too many of them end the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.types import Group, SampleFailure

LEAST_GROUPS = 8  # fewer say nothing about a share
_NAMED = 3  # failures that a notice names


class FailedShare:
    """Holds the last groups to `reward.max_failed_share`."""

    def __init__(self, most: float, groups_per_step: int) -> None:
        self.most = most
        self.window = max(groups_per_step, LEAST_GROUPS)
        self._failed: deque[bool] = deque(maxlen=self.window)

    def note(self, group: Group) -> None:
        """Raise RuntimeError where too many have failed, counted over a whole window although it may not be full yet."""
        self._failed.append(bool(group.failures))
        if group.failures and sum(self._failed) > self.most * self.window:
            what = f"{sum(self._failed)} of the last {len(self._failed)} groups"
            raise RuntimeError(_too_many(what, self.most, group.failures[0]))


def check_evaluation(groups: Sequence[Group], most: float) -> None:
    """Raise RuntimeError where more than the share `most` of the problems could not be scored, or all of them."""
    failed = [group for group in groups if group.failures]
    if failed and (len(failed) > most * len(groups) or len(failed) == len(groups)):
        what = f"{len(failed)} of {len(groups)} problems of the evaluation"
        raise RuntimeError(_too_many(what, most, failed[0].failures[0]))


def _too_many(what: str, most: float, failure: SampleFailure) -> str:
    scored = failure.source.startswith("scorer")
    remedy = (
        "Mend the scorer or the row; raise reward.timeout where it is only slow" if scored else "Mend what it names"
    )
    return f"{what} could not be finished or scored (reward.max_failed_share = {most:g}). The last cause: {failure}. {remedy}."


@dataclass(frozen=True)
class ScoringCounts:
    """Samples that could not be scored, all and by what their last attempt failed of, and attempts made again."""

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


def scoring_notice(groups: Sequence[Group], what: str, consequence: str) -> str | None:
    """Names the first failures, one a row, scorer and cause; None: there are none. `what`, as in "groups"."""
    failed = [group for group in groups if group.failures]
    if not failed:
        return None
    causes = list(dict.fromkeys(str(failure) for group in failed for failure in group.failures))
    more = f"; and {len(causes) - _NAMED} more" if len(causes) > _NAMED else ""
    samples = sum(len(group.failures) for group in failed)
    return f"{samples} samples of {len(failed)} {what} could not be scored: {'; '.join(causes[:_NAMED])}{more}. {consequence}"
