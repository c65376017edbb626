"""The math scorers on typical model outputs."""

from __future__ import annotations

import time

import pytest

from megarl.recipe.schema import RewardConfig
from megarl.rewards import RewardError, Score, ScoreRequest, resolve, score
from megarl.rewards.latex_boxed import last_boxed, last_boxed_or_bare
from megarl.rewards.math_dapo import normalize
from megarl.rewards.scoring import scorer_pool
from megarl.subprocess_pool.job import Answered, Failed

SOURCES = {
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime2024": "math_dapo",
    "aime": "math_dapo",
}


def test_each_data_source_has_its_scorer() -> None:
    assert {source: scorer.name for source, scorer in resolve(None, SOURCES).items()} == SOURCES


def scored(name: str, response: str, truth: object) -> Score:
    return score(resolve(name, ["x"])["x"], ScoreRequest(response, truth, "x", uid="row"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{5} and \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a = \boxed{2}}", "2"),
        (r"\boxed{5} and \boxed{6", None),  # the last one that opens counts: this response was cut off
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed {5}", "5"),
        (r"\boxed5", None),
        ("", None),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"}}}\boxed{5}}}}", "5"),
    ],
)
def test_last_boxed_returns_the_last_box(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so $\boxed 7$.", "7"),
        (r"so $\boxed 17$, as $x > 0$", "17"),
        (r"\(\boxed 7\) it is", "7"),
        (r"\[ \boxed \frac{1}{2} \] it is", r"\frac{1}{2}"),
        ("\\boxed 7.\nDone.", "7"),
        ("\\boxed\t7", "7"),
        (r"$\boxed 5$ or $\boxed 6$", "6"),
        (r"$\boxed{5}$, which \boxed marks", "5"),  # braces come first
        (r"$\boxed 5$ and \boxed{6", None),
        (r"\boxed {5}", "5"),
        (r"\boxed", None),
        (r"\boxed ", None),
        (r"\boxed5", None),
        (r"\boxed $7$", ""),
        ("\\boxed" + " " * 100_000, None),
    ],
)
def test_a_box_without_braces(text: str, expected: str | None) -> None:
    assert last_boxed_or_bare(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("math", 1.0), ("geometry3k", 0.9), ("math_dapo", -1.0), ("retool", -1.0)]
)
def test_math_and_geometry3k_read_a_box_without_braces(name: str, expected: float) -> None:
    """The other two are strict, as verl's."""
    assert scored(name, r"The answer is $\boxed 7$.", "7").value == expected


# (ground truth, content of the box, right?)
MATH = [
    ("1,000", "1000", 1),
    ("1000", "1{,}000", 1),
    ("1000", r"1\,000", 0),  # math-verify reads a thin space as a product
    (r"\frac{1}{2}", "0.5", 1),
    (r"\frac12", "1/2", 1),
    (r"\frac{1}{2}", r"\dfrac{2}{4}", 1),
    (r"\frac{1}{2}", "0.51", 0),
    (r"2\frac{1}{2}", "2.5", 1),
    ("5", r"5\text{ cm}", 1),
    ("5", r"5 \mathrm{~m}", 1),
    ("5", r"\$5", 1),
    ("90", r"90^\circ", 1),
    ("50", r"50\%", 1),  # math-verify takes a percentage for either number
    (r"50\%", "0.5", 1),
    ("50", "0.5", 0),
    ("(1,2)", "(1, 2)", 1),
    ("[1,2)", r"\left[1, 2\right)", 1),
    ("(1,2)", "[1,2]", 0),
    (r"(-\infty, 3]", r"\left(-\infty, 3\right]", 1),
    (r"\{1,2\}", r"\{2, 1\}", 1),
    ("1,2", "2,1", 1),
    ("x+1", "1+x", 1),
    ("(x+1)^2", "x^2+2x+1", 1),
    ("x+1", "y+1", 0),
    (r"\sqrt{2}", "2^{1/2}", 1),
    (r"3\sqrt{2}", r"\sqrt{18}", 1),
    (r"\pi", "3.14159", 0),
    ("5", "x = 5", 1),
    (r"\text{East}", "East", 1),
    (r"\text{East}", r"\text{West}", 0),
    (r"\text{(A)}", "A", 1),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0),
    ("-3", "3", 0),
    (5, "5", 1),
    (r"so \boxed{7}", "7", 1),
    ("72", "٧٢", 0),  # digits of other alphabets
    ("72", "７２", 0),
    ("1", "", 0),
    ("1", " ", 0),
    ("1", r"\frac{1}{0}", 0),
    ("1", "((((" * 10, 0),
    ("1", "{" * 10 + "1" + "}" * 10, 1),
    ("7", "7" * 5000, 0),  # more digits than Python turns into a number, and longer than the scorer reads
    ("2", "1+" * 499 + "1", 0),
    ("1", "__import__('os').abort()", 0),
]


@pytest.mark.parametrize(("truth", "box", "expected"), MATH, ids=lambda value: str(value)[:30])
def test_math(truth: object, box: str, expected: int) -> None:
    result = scored("math", rf"So we get \boxed{{1234}}, no: $\boxed{{{box}}}$.", truth)
    assert (result.value, result.parts) == (expected, {"accuracy": expected})


@pytest.mark.parametrize("name", ["math", "math_dapo"])
@pytest.mark.parametrize(
    "response",
    [
        *("", "5", "The answer is 5.", r"\boxed{"),
        *("\\boxed{" * 200_000, "{" * 1_000_000, "\\" * 999_999, "$" * 1_000_000, "Answer:" * 150_000),
        *("Answer:" + " " * 1_000_000, "\\boxed" + " " * 1_000_000, "\\boxed{" + "(" * 1_000_000 + "}"),
    ],
    ids=lambda response: f"{response[:8]!r} {len(response)}",
)
def test_a_response_without_an_answer_scores_zero_in_linear_time(name: str, response: str) -> None:
    scored(name, r"\boxed{1}", "5")  # imports
    began = time.process_time()
    result = scored(name, response, "5")
    assert result.parts["accuracy"] == 0 and time.process_time() - began < 2.0


@pytest.mark.parametrize("name", ["math", "math_dapo"])
@pytest.mark.parametrize("truth", [None, "", " ", True, ["5"]])
def test_a_row_without_a_usable_answer_is_an_error_not_a_zero(name: str, truth: object) -> None:
    with pytest.raises(RewardError, match="ground_truth"):
        scored(name, r"\boxed{5}", truth)


def test_an_endless_computation_ends_at_the_timeout() -> None:
    """sympy would compute 9^9^9^9 in C, where no signal arrives, and freeze a job. The sample fails without a score,
    and not as a wrong answer."""
    pool = scorer_pool(["math"], RewardConfig(processes=1, timeout=1.0, retries=0))
    pool.start()
    try:
        rows = [ScoreRequest(rf"\boxed{{{box}}}", "2", "x", uid="row") for box in ("9^{9^{9^{9}}}", "2")]
        endless, right = [future.result(20) for future in [pool.submit("math", row) for row in rows]]
    finally:
        pool.close()
    assert isinstance(endless, Failed) and endless.kind == "timeout"
    assert isinstance(right, Answered) and right.value == Score(1.0, {"accuracy": 1.0}, "2")


# (ground truth, end of the response, right?, the answer that was compared)
DAPO = [
    ("34", "Answer: 34", 1, "34"),
    ("34", "answer :34", 1, "34"),
    ("34", "Answer: 33\nAnswer: 34", 1, "34"),
    ("34", "Answer: 34\nAnswer: 33", 0, "33"),
    ("34", "Answer: $34$", 1, "34"),
    ("34", r"**Answer: $\boxed{34}$", 1, "34"),
    ("34", "Answer: **34**", 0, "**34**"),
    ("34", "Answer: 34.", 0, "34."),
    ("34", "Answer: $34.$", 1, "34"),
    ("1234", "Answer: 1,234", 1, "1234"),
    ("1,234", r"Answer: \$1234", 1, "1234"),
    ("34", "Answer: x = 34", 1, "34"),
    ("34", "Answer: 34 dollars", 1, "34"),
    ("34", r"Answer: 34\text{ cm}", 1, "34"),
    ("34", r"Answer: 34^\circ", 1, "34"),
    ("34", "Answer: 34%", 0, "34%"),
    (r"\frac{1}{2}", r"Answer: \frac12", 1, r"\frac{1}{2}"),
    (r"\frac{1}{2}", "Answer: 1/2", 0, "1/2"),
    (r"\sqrt{2}", r"Answer: \sqrt2", 1, r"\sqrt{2}"),
    ("(1,2)", "Answer: (1, 2)", 1, "(1,2)"),
    ("[1,2)", "Answer: (1, 2)", 0, "(1,2)"),
    ("34", "Answer:\n34", 1, "34"),  # white space and line breaks between them are allowed
    ("34", r"so it is \boxed{34}", 1, "34"),
    ("34", r"so it is \boxed{33}, or \boxed{34}", 1, "34"),
    ("34", r"\boxed{34} Answer: 33", 0, "33"),  # a box counts only where no answer is named
    ("34", "34", 0, None),
    ("34", "", 0, None),
    ("34", "Answer: ٣٤", 0, "٣٤"),
    ("34", "Answer: ３４", 0, "３４"),
    ("034", "Answer: 34", 0, "34"),
    (34, "Answer: 34", 1, "34"),
    ("-5", "Answer: -5", 1, "-5"),
    ("34", "Answer: 34" + " " * 290, 1, "34"),  # exactly the last 300 characters
    ("34", "Answer: 34" + " " * 291, 0, None),  # one past them
    ("34", "x" * 1_000_000 + "\nAnswer: 34", 1, "34"),
]


@pytest.mark.parametrize(("truth", "response", "right", "answer"), DAPO, ids=lambda value: str(value)[-30:])
def test_math_dapo(truth: object, response: str, right: int, answer: str | None) -> None:
    expected = Score(2.0 * right - 1.0, {"acc": float(right), "accuracy": float(right)}, answer)
    assert scored("math_dapo", response, truth) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"an $1,234$ dollars", "1234"),
        (r"\text{the} \textbf{sum}", "thesum"),
        (r"x \in \{1, 2\}", r"x\in\{1,2\}"),
        (r"\fracab", r"\frac{a}{b}"),
        (r"12{,}000 \text{ students}", "12000"),
        (r"5\ \text{m}^2", "5"),
        ("1,2", "12"),  # Minerva's rule, for better or worse
        ("", ""),
    ],
)
def test_minervas_normal_form(text: str, expected: str) -> None:
    assert normalize(text) == expected
