"""The geometry3k scorer: 0.9 for the answer and 0.1 for the format, on typical model outputs."""

from __future__ import annotations

import re
import time

import pytest

from megarl.rewards import RewardError, Score, ScoreRequest, resolve, score
from megarl.rewards.geometry3k import has_form
from tests.rewards.test_math import MATH


def scored(response: str, truth: object) -> Score:
    return score(resolve(None, ["hiyouga/geometry3k"])["hiyouga/geometry3k"], ScoreRequest(response, truth, "x"))


GOOD = r"<think>Half of 10.</think>So it is \boxed{5}."
# (response, right?, in form?) to a ground truth of 5
CASES = [
    (GOOD, 1, 1),
    (r"<think></think>\boxed{5}", 1, 1),
    ("<think>a\nb\n</think>\n\n" + r"So $\boxed{5}$." + "\n", 1, 1),
    (r"<think>\boxed{4}</think> \boxed{5}", 1, 1),  # the last box counts
    (r"<think>\boxed{5}</think> \boxed{4}", 0, 1),
    (r"<think>x</think> \boxed{6}", 0, 1),
    (r"<think>x</think> \boxed{}", 0, 1),
    (r"<think>a<think>b</think> c</think> \boxed{5}", 1, 1),
    (r"\boxed{5}", 1, 0),
    (r" <think>x</think>\boxed{5}", 1, 0),  # the whole response: no text before the tag
    (r"x<think>x</think>\boxed{5}", 1, 0),
    (r"<THINK>x</THINK>\boxed{5}", 1, 0),
    (r"<think>x \boxed{5}", 1, 0),  # never closed
    (r"<think>x \boxed{5}</think>", 1, 0),  # the answer is among the thoughts
    (r"<think>x \boxed{5}</think> so it is 5}", 1, 0),
    (r"</think><think>\boxed{5}", 1, 0),
    (r"<think>x</think>\boxed {5}", 1, 0),
    (r"<think>x</think> 5", 0, 0),
    (r"<think>x</think>\boxed{5", 0, 0),  # cut off
    (r"<think>x</think>\boxed{5 and }", 0, 1),
    (r"<think>x</think>\boxed{٥}", 0, 1),  # digits of other alphabets
    ("", 0, 0),
    ("<think>", 0, 0),
]


@pytest.mark.parametrize(("response", "right", "form"), CASES)
def test_edge_cases(response: str, right: int, form: int) -> None:
    result = scored(response, "5")
    assert result.value == pytest.approx(0.9 * right + 0.1 * form)
    assert result.parts == {"accuracy": right, "format": form}
    pattern = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)  # verl's
    assert has_form(response) == (pattern.fullmatch(response) is not None) == bool(form)


@pytest.mark.parametrize(("truth", "box", "right"), MATH, ids=lambda value: str(value)[:30])
def test_answers_follow_the_rules_of_math(truth: object, box: str, right: int) -> None:
    """Units, percent, fractions, intervals: the table of `math` applies."""
    result = scored(rf"<think>x</think> so ${{}}\boxed{{{box}}}$.", truth)
    assert result.parts["accuracy"] == right and result.value == pytest.approx(0.9 * right + 0.1)


@pytest.mark.parametrize(
    "response",
    ["<think>" + "</think>" * 125_000, "<think>" + r"</think>\boxed{" * 70_000, "<think>" * 140_000, "x" * 1_000_000],
    ids=["closed", "boxed", "open", "text"],
)
def test_a_million_characters(response: str) -> None:
    """verl's pattern, tried on these, takes a time that grows with the square or the cube of the length."""
    start = time.perf_counter()
    result = scored(response, "5")
    assert time.perf_counter() - start < 1 and result.value == 0


@pytest.mark.parametrize("truth", ["", "  ", None, True, ["5"]])
def test_an_invalid_ground_truth_is_an_error_and_not_a_zero(truth: object) -> None:
    with pytest.raises(RewardError, match="ground_truth"):
        scored(GOOD, truth)
