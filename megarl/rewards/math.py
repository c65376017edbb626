r"""MATH: the last ``\boxed``, compared as mathematics by the math-verify library."""

from __future__ import annotations

import logging
from typing import Any

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.latex_boxed import last_boxed

LONGEST = 1000  # characters of an answer that is still read; those of MATH have 159 at most


def prepare() -> None:
    """Import math-verify and build its patterns, which takes most of a second."""
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
)
def math(request: ScoreRequest) -> dict[str, float | str | None]:
    r"""1 where the response's last ``\boxed{...}`` says what the ground truth says, else 0.

    Equal text is equal; otherwise sympy decides, as math-verify calls it: 1/2 is 0.5, x + 1 is 1 + x, [1, 2] is not
    (1, 2). math-verify's own time limits, which make a wrong answer of one that takes long, are off: the process that
    scores is ended instead, and the sample counts as not scored. An answer past `LONGEST` characters is wrong.
    """
    correct, answer = judge(request.response, request.ground_truth)
    return {"score": correct, "accuracy": correct, "answer": answer}


def judge(response: str, truth: Any) -> tuple[float, str | None]:
    """Whether the answer of a response is right, as `math` says, and the answer; None: there is none that is read."""
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        raise TypeError(f"ground_truth is {truth!r}, not text or a number")
    boxed = last_boxed(str(truth))
    expected = (str(truth) if boxed is None else boxed).strip()
    if not expected:
        raise ValueError("the row's ground_truth is empty")
    answer = last_boxed(response)
    answer = answer.strip() if answer is not None else None
    readable = answer is not None and 0 < len(answer) <= LONGEST
    correct = float(readable and (answer == expected or _equal(expected, str(answer))))
    return correct, answer if readable else None


def _equal(expected: str, answer: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set
    # In a box, as math-verify looks for answers; what it cannot read it compares as text.
    truth, given = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (expected, answer))
    return bool(verify(truth, given, timeout_seconds=None))
