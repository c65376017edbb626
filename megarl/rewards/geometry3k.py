r"""Geometry3k: the answer as in `math`, and a little for reasoning in tags before it (verl's rule)."""

from __future__ import annotations

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.math import judge, prepare

FORMAT = 0.1  # what the form is worth; the answer has the rest
_ORDER = ("<think>", "</think>", r"\boxed{", "}")


@scorer("geometry3k", sources=("hiyouga/geometry3k",), prepare=prepare)
def geometry3k(request: ScoreRequest) -> dict[str, float | str | None]:
    r"""0.9 for an answer that `math` takes for right, 0.1 for the form: the whole response is
    ``<think>.*</think>.*\boxed{.*}.*``, which begins with the tag."""
    correct, answer = judge(request.response, request.ground_truth)
    form = float(has_form(request.response))
    score = (1.0 - FORMAT) * correct + FORMAT * form
    return {"score": score, "accuracy": correct, "format": form, "answer": answer}


def has_form(response: str) -> bool:
    """Whether that pattern matches the whole response. It takes linear time, which the pattern itself does not: each
    piece is looked for once, behind the first place of the one before it."""
    if not response.startswith(_ORDER[0]):
        return False
    place = 0
    for piece in _ORDER:
        place = response.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True
