r"""MATH: the last ``\boxed``, compared as mathematics by the math-verify library."""

from __future__ import annotations

import logging
from typing import Any

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.latex_boxed import last_boxed_or_bare

LONGEST = 1000  # characters of an answer; the longest answer in MATH has 159


def prepare() -> None:
    """Import math-verify and build its patterns, which takes almost a second."""
    _equal("1", "1")


@scorer(
    "math",
    sources=(
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "agentica-org/DeepScaleR-Preview-Dataset",
    ),
    prepare=prepare,
    slow_is_wrong=True,
)
def math(request: ScoreRequest) -> dict[str, float | str | None]:
    r"""Return 1 if the response's last ``\boxed{...}`` equals the ground truth, else 0. Without braces: ``\boxed 7``.

    Identical texts are equal; math-verify compares other texts with sympy: 1/2 equals 0.5, x + 1 equals 1 + x, [1, 2]
    does not equal (1, 2). math-verify's time limits are off: the subprocess pool kills the scoring process at reward.timeout,
    and the answer is wrong (`slow_is_wrong`). An answer of more than `LONGEST` characters is wrong.
    """
    correct, answer = check_answer(request.response, request.ground_truth)
    return {"score": correct, "accuracy": correct, "answer": answer}


def check_answer(response: str, truth: Any) -> tuple[float, str | None]:
    """Compare a response's answer with `truth` by the rule of `math`.

    Returns (1.0 if it is correct, else 0.0; the answer, None if it is missing, empty or too long).
    """
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        raise TypeError(f"ground_truth is {truth!r}, not text or a number")
    boxed = last_boxed_or_bare(str(truth))
    expected = (str(truth) if boxed is None else boxed).strip()
    if not expected:
        raise ValueError("the row's ground_truth is empty")
    answer = last_boxed_or_bare(response)
    answer = answer.strip() if answer is not None else None
    readable = answer is not None and 0 < len(answer) <= LONGEST
    correct = float(readable and (answer == expected or _equal(expected, str(answer))))
    return correct, answer if readable else None


def _equal(expected: str, answer: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning about the missing time limit
    # math-verify searches answers in boxes; it compares unreadable ones as text.
    truth, candidate = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (expected, answer))
    return bool(verify(truth, candidate, timeout_seconds=None))
