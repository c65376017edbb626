"""The answer that a scorer extracts reaches majority votes."""

import pytest

from megarl.rewards import RewardError, ScoreRequest, resolve, score
from megarl.rewards.base import Scorer


def test_gsm8k_returns_the_compared_answer():
    scorer = resolve("gsm8k", ["x"])["x"]
    right = score(scorer, ScoreRequest("so\n#### 1,234", "1234", "x"))
    assert (right.value, right.parts, right.answer) == (1.0, {"accuracy": 1.0}, "1234")
    none = score(scorer, ScoreRequest("no idea", "1234", "x"))
    assert (none.value, none.answer) == (0.0, None)


def test_a_non_text_answer_is_refused():
    with pytest.raises(RewardError, match="answer is 7"):
        score(Scorer("mine", lambda request: {"score": 1, "answer": 7}), ScoreRequest("", "", "x"))
