r"""DAPO-Math and AIME: the line after the last ``Answer:``, normalized as Minerva did, compared as text."""

from __future__ import annotations

import re

from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.latex_boxed import last_boxed

ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
TAIL = 300  # characters at the end of the response in which an answer counts

# Minerva's normalization (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1): replaced in this order,
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
# then removed in this order.
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_IN_DOLLARS = re.compile(r"^.*?\$(.*?)\$.*$")
_WRAPPED = [re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline")]
_BOXED = re.compile(r"\\boxed\{(.*)\}")


@scorer("math_dapo", sources=("math_dapo", "math", "math_dapo_reasoning", "aime*"), in_process=True)
def math_dapo(request: ScoreRequest) -> dict[str, float | str | None]:
    r"""Return 1 if the answer equals the ground truth, both normalized, else -1; `acc` and `accuracy` are 1 or 0.

    The answer is the text after the last ``Answer:`` in the response's tail; without one, the tail's last ``\boxed``.
    """
    truth = request.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, (str, int)):
        raise TypeError(f"ground_truth is {truth!r}, not text or a whole number")
    expected = normalize(str(truth))
    if not expected:
        raise ValueError(f"the row's ground_truth {truth!r} is empty")
    tail = request.response[-TAIL:]
    answers = ANSWER.findall(tail)
    answer = answers[-1] if answers else last_boxed(tail)
    answer = normalize(answer) if answer is not None else None
    correct = float(answer == expected)
    return {"score": 2 * correct - 1, "acc": correct, "accuracy": correct, "answer": answer}


def normalize(answer: str) -> str:
    r"""Remove units, spaces and LaTeX formatting from an answer: ``x = \$1,234 \text{ dollars}`` becomes ``1234``."""
    answer = answer.split("=")[-1]
    for before, after in (*_REPLACED, *((text, "") for text in _REMOVED)):
        answer = answer.replace(before, after)
    answer = _IN_DOLLARS.sub(r"\1", answer)
    for pattern in (*_WRAPPED, _BOXED):
        answer = pattern.sub(r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "").strip()
    plain = answer.replace(",", "")
    return plain if plain.isdigit() else answer
