"""pass@k, maj@k against numbers worked by hand."""

from __future__ import annotations

import pytest

from megarl.rollout.evaluate import accuracy_metrics, majority_is_correct, pass_at_k
from megarl.types import Group, InlineData, Sample


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(1, 4, 1) == pytest.approx(1 / 4)
    assert pass_at_k(1, 4, 2) == pytest.approx(1 / 2)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(3, 4, 2) == 1.0
    assert pass_at_k(0, 4, 4) == 0.0


def test_majority() -> None:
    assert majority_is_correct(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority_is_correct(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority_is_correct(["7", "8"], [True, False]) == 0.5  # a tie shares the vote
    assert majority_is_correct([None, None, "7"], [False, False, True]) == 1.0  # no answer, no vote
    assert majority_is_correct([None], [False]) == 0.0


def test_metrics_over_problems() -> None:
    def group(answers: str) -> Group:
        samples = [
            Sample(
                0,
                i,
                InlineData([]),
                1,
                2,
                2,
                reward=0.9 * (a == "7"),
                reward_parts={"accuracy": float(a == "7")},
                answer=a,
            )
            for i, a in enumerate(answers)
        ]
        return Group(0, "row", "source", 0, samples)

    metrics = accuracy_metrics([group("778"), group("888")], [1, 3])
    assert metrics["eval/pass@1"] == pytest.approx((2 / 3) / 2)
    assert metrics["eval/pass@3"] == pytest.approx(0.5)
    assert metrics["eval/maj@3"] == pytest.approx(0.5)
    assert metrics["eval/rewards/mean"] == pytest.approx(0.9 * 2 / 6)
