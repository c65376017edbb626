"""Groups that could not be scored: count and report them, and stop the run if there are too many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from megarl.types import FailureKind, Group, Metrics, SampleFailure

MIN_GROUPS = 8  # a share of fewer groups is not reliable
_MAX_CAUSES = 3  # that a notice names


class FailedShare:
    """Enforces `reward.max_failed_share` over a sliding window: the groups of a step, or 8 if a step has fewer."""

    def __init__(self, max_share: float, groups_per_step: int) -> None:
        self.max_share = max_share
        self.window = max(groups_per_step, MIN_GROUPS)
        self._failed: deque[bool] = deque(maxlen=self.window)

    def add(self, group: Group) -> None:
        """Count a group. Raises RuntimeError as soon as more than `max_share` x `window` of the last groups have failed."""
        self._failed.append(bool(group.failures))
        if group.failures and sum(self._failed) > self.max_share * self.window:
            count = f"{sum(self._failed)} of the last {len(self._failed)} groups"
            raise RuntimeError(_too_many(count, self.max_share, group.failures[0]))


def check_evaluation(groups: Sequence[Group], max_share: float) -> None:
    """Raise RuntimeError if all problems, or more than the share `max_share` of them, could not be scored."""
    failed = [group for group in groups if group.failures]
    if failed and (len(failed) > max_share * len(groups) or len(failed) == len(groups)):
        count = f"{len(failed)} of {len(groups)} problems of the evaluation"
        raise RuntimeError(_too_many(count, max_share, failed[0].failures[0]))


def _too_many(count: str, max_share: float, failure: SampleFailure) -> str:
    scored = failure.source.startswith("scorer")
    remedy = (
        "Fix the scorer or the row; raise reward.timeout if the scorer is slow" if scored else "Fix the named cause"
    )
    limit = f"reward.max_failed_share = {max_share:g}"
    return f"{count} could not be finished or scored ({limit}). The last cause: {failure}. {remedy}."


def scoring_counts(groups: Sequence[Group], area: str) -> Metrics:
    """Return the numbers of samples that could not be scored, in all and by kind of the last failure, and of repeated
    attempts, as metrics of `area`."""
    kinds = [failure.kind for group in groups for failure in group.failures]
    return {
        f"{area}/scoring_failed": float(len(kinds)),
        f"{area}/scoring_timeouts": float(kinds.count("timeout")),
        f"{area}/scoring_crashes": float(kinds.count("crash")),
        f"{area}/scoring_errors": float(kinds.count("error")),
        f"{area}/scoring_unavailable": float(kinds.count("unavailable")),
        f"{area}/scoring_retries": float(sum(group.scoring_retries for group in groups)),
    }


def sampled_again_counts(groups: Sequence[Group]) -> Metrics:
    """Return the numbers of samples with tools that were sampled again from their start, in all and by cause."""
    causes: Counter[FailureKind] = Counter()
    for group in groups:
        causes.update(group.sampled_again)
    return {
        "rollout/sampled_again": float(causes.total()),
        "rollout/sampled_again_unavailable": float(causes["unavailable"]),
        "rollout/sampled_again_errors": float(causes["error"]),
        "rollout/sampled_again_timeouts": float(causes["timeout"]),
        "rollout/sampled_again_crashes": float(causes["crash"]),
    }


def scoring_notice(groups: Sequence[Group], noun: str, consequence: str) -> str | None:
    """Return a notice with the first distinct failures; None if nothing failed. `noun`: the notice's word for groups."""
    failed = [group for group in groups if group.failures]
    if not failed:
        return None
    causes = list(dict.fromkeys(str(failure) for group in failed for failure in group.failures))
    more = f"; and {len(causes) - _MAX_CAUSES} more" if len(causes) > _MAX_CAUSES else ""
    samples = sum(len(group.failures) for group in failed)
    first = "; ".join(causes[:_MAX_CAUSES])
    return f"{samples} samples of {len(failed)} {noun} could not be scored: {first}{more}. {consequence}"
