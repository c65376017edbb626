"""GSM8K: the number after the last ``####``, compared as text (the rule of the data set's authors)."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.base import ScoreRequest, scorer

ANSWER = re.compile(r"#### (-?[0-9.,]+)")
TAIL = 300  # characters at the end of the response in which an answer counts


@scorer("gsm8k", sources=("openai/gsm8k", "megarl/word_problems"), in_process=True)
def gsm8k(request: ScoreRequest) -> dict[str, float | str | None]:
    """Return 1 if the last answer in the response's tail equals the ground truth, else 0.

    Thousands separators are ignored; any other difference counts: ``72.0`` is not ``72``. The ground truth may be the whole
    worked solution, as in the column ``answer`` of the data set.
    """
    expected = final_answer(_text(request.ground_truth))
    if not expected:
        raise ValueError("the row's ground_truth is empty, or has nothing after its last ####")
    answers = ANSWER.findall(request.response[-TAIL:])
    answer = _plain(answers[-1]) if answers else None
    correct = float(answer == expected)
    return {"score": correct, "accuracy": correct, "answer": answer}


def final_answer(solution: str) -> str:
    """Return the text after the last ``####``, or all of it without one, without thousands separators and currency."""
    return _plain(solution.rpartition("####")[2])


def _text(ground_truth: Any) -> str:
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, (str, int)):
        raise TypeError(f"ground_truth is {ground_truth!r}, not text or a whole number")
    return str(ground_truth)


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").strip()
