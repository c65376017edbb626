r"""Geometry3k: the reward of `math`, plus a bonus for reasoning in tags before the answer (verl's rule)."""

from __future__ import annotations

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.math import check_answer, prepare

FORMAT = 0.1  # weight of the form; the answer has the rest
_ORDER = ("<think>", "</think>", r"\boxed{", "}")


@scorer("geometry3k", sources=("hiyouga/geometry3k",), prepare=prepare, slow_is_wrong=True)
def geometry3k(request: ScoreRequest) -> dict[str, float | str | None]:
    r"""Return 0.9 for an answer that `math` scores as correct, plus 0.1 for the form: the whole response matches
    ``<think>.*</think>.*\boxed{.*}.*``."""
    correct, answer = check_answer(request.response, request.ground_truth)
    form = float(has_form(request.response))
    score = (1.0 - FORMAT) * correct + FORMAT * form
    return {"score": score, "accuracy": correct, "format": form, "answer": answer}


def has_form(response: str) -> bool:
    """Return True if the form's pattern matches the whole response.

    Takes linear time, unlike the regular expression: each piece is searched once, after the first match of the
    previous piece.
    """
    if not response.startswith(_ORDER[0]):
        return False
    position = 0
    for piece in _ORDER:
        position = response.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True
