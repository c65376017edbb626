r"""ReTool's reward (Feng et al. 2025, arXiv 2504.11536, as in verl's recipe): strict ``\boxed`` plus a tool bonus."""

from __future__ import annotations

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.latex_boxed import last_boxed

TAIL = 100  # characters at the end of the response in which a box counts
BONUS = 0.1  # for each tool turn of a wrong response
BEST_WRONG = -0.6


@scorer("retool", in_process=True)
def retool(request: ScoreRequest) -> dict[str, float | str | None]:
    r"""Return 1 if the tail's last ``\boxed`` equals the ground truth as text; else -1 plus a bonus per tool turn."""
    truth = request.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, (str, int)) or not str(truth).strip():
        raise TypeError(f"ground_truth is {truth!r}, not text or a whole number")
    answer = last_boxed(request.response[-TAIL:])
    answer = None if answer is None else answer.strip()
    right = answer == str(truth).strip()
    tool_turns = max(sum(turn.role == "assistant" for turn in request.turns) - 1, 0)
    score = 1.0 if right else min(BEST_WRONG, -1 + BONUS * tool_turns)
    return {"score": score, "acc": float(right), "accuracy": float(right), "answer": answer}
