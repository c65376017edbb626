"""Two-step arithmetic word problems that a tiny model learns on a CPU in minutes.

A tenth of all problems, chosen by the CRC-32 of their numbers in the order of the text, is held out: no training row of
any template has these numbers in this order. The demonstrations have mixed quality on purpose, so that reinforcement
learning has something to improve: a quarter are rough estimates without a solution, and most do not end in the form that
the scorer reads.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.commands.data.source import problem_row
from megarl.data.rows import write_parquet

DATA_SOURCE = "megarl/word_problems"
NAMES = [
    "Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe", "Max", "Amy", "Dan", "Lily", "Jack", "Nora", "Paul", "Ruth",
]  # fmt: skip
ITEMS = [
    "apples", "books", "coins", "cards", "shells", "pens", "stamps", "eggs", "marbles", "cookies", "stickers", "balls",
]  # fmt: skip
CONTAINERS = ["bags", "boxes", "jars", "packs"]

ESTIMATES = 0.25  # share of demonstrations that only guess
ESTIMATE_ERROR = 5  # largest error of a guess
UNSCORABLE = 0.6  # share of demonstrations that end in a sentence that the scorer cannot read

Step = tuple[int, str, int]  # left operand, operator, right operand
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}


@dataclass(frozen=True)
class Template:
    """A text with placeholders for names and the numbers a, b, c, and the two steps of its solution."""

    text: str
    steps: Callable[[int, int, int], tuple[Step, Step]]
    a: tuple[int, int]  # smallest and largest
    b_and_c: tuple[int, int]


_PRODUCT = {"a": (2, 20), "b_and_c": (2, 9)}
_SUM = {"a": (10, 20), "b_and_c": (2, 20)}
TEMPLATES = (
    Template(
        "{n} has {a} {i}. {n} buys {b} {x} with {c} {i} each. How many {i} does {n} have now?",
        lambda a, b, c: ((b, "*", c), (a, "+", b * c)),
        **_PRODUCT,
    ),
    Template(
        "{n} buys {b} {x} of {i}. There are {c} {i} in each. {m} gives {n} {a} more. How many {i} does {n} have?",
        lambda a, b, c: ((b, "*", c), (a, "+", b * c)),
        **_PRODUCT,
    ),
    Template(
        "{n} has {a} {i} and puts {c} {i} into each of {b} {x}. How many {i} are left over?",
        lambda a, b, c: ((b, "*", c), (a, "-", b * c)),
        **_PRODUCT,
    ),
    Template(
        "{n} has {a} {i} and finds {b} more. Then {n} gives {c} {i} to {m}. How many {i} does {n} have left?",
        lambda a, b, c: ((a, "+", b), (a + b, "-", c)),
        **_SUM,
    ),
    Template(
        "{n} had {a} {i}. {m} took {b} of them, and later {n} found {c} more. How many {i} does {n} have?",
        lambda a, b, c: ((a, "-", b), (a - b, "+", c)),
        **_SUM,
    ),
    Template(
        "{n} has {a} {i}. {m} has {b} {i} more than {n}. How many {i} do they have together?",
        lambda a, b, c: ((a, "+", b), (a, "+", a + b)),
        **_SUM,
    ),
)


@dataclass(frozen=True)
class Problem:
    question: str
    steps: tuple[Step, Step]

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def results(self) -> tuple[int, int]:
        """The results of the two steps; the second is the answer."""
        first, second = (OPERATORS[operator](left, right) for left, operator, right in self.steps)
        return first, second

    @property
    def worked(self) -> str:
        """The solution in the scorer's form, e.g. ``" 8*8=64. 4+64=68.\\n#### 68"``."""
        lines = [f"{x}{sign}{y}={result}." for (x, sign, y), result in zip(self.steps, self.results, strict=True)]
        return f" {' '.join(lines)}\n#### {self.results[1]}"


def is_held_out(question: str) -> bool:
    """Return True if the numbers of a question, in the order of the text, belong to the held-out tenth."""
    return zlib.crc32(",".join(re.findall(r"\d+", question)).encode()) % 10 == 0


def draw(rng: random.Random, held_out: bool) -> Problem:
    """Draw a random problem from the held-out numbers, or from the others. No result is negative."""
    while True:
        template = rng.choice(TEMPLATES)
        a, b, c = rng.randint(*template.a), rng.randint(*template.b_and_c), rng.randint(*template.b_and_c)
        name, other = rng.sample(NAMES, 2)
        question = template.text.format(n=name, m=other, a=a, b=b, c=c, i=rng.choice(ITEMS), x=rng.choice(CONTAINERS))
        problem = Problem(question, template.steps(a, b, c))
        if min(problem.results) >= 0 and is_held_out(question) == held_out:
            return problem


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """Return a response of random quality: an estimate or the worked solution, scorable or not."""
    response = problem.worked
    if rng.random() < ESTIMATES:
        error = rng.randint(-ESTIMATE_ERROR, ESTIMATE_ERROR)
        response = f" #### {max(0, problem.results[1] + error)}"
    if rng.random() < UNSCORABLE:
        response = response.replace("#### ", "The answer is ") + "."
    return response


def prepare(
    out: Path, seed: int, train: int = 4096, test: int = 256, sft: int = 60_000, preferences: int = 4096
) -> dict[Path, int]:
    """Write train and test (prompts), sft and sft_test (demonstrations), preferences and preferences_test (pairs).

    The files are out/NAME.parquet; each test file has `test` rows. All questions of train and test are distinct. Return
    the number of rows of each file.
    """

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    rows = {
        "train": _prompts(rng("train"), "train", train),
        "test": _prompts(rng("test"), "test", test),
        "sft": _demonstrations(rng("sft"), "sft", sft),
        "sft_test": _demonstrations(rng("sft_test"), "sft_test", test, held_out=True),
        "preferences": _preferences(rng("preferences"), "preferences", preferences),
        "preferences_test": _preferences(rng("preferences_test"), "preferences_test", test, held_out=True),
    }
    for name, content in rows.items():
        write_parquet(Path(out) / f"{name}.parquet", content)
    return {Path(out) / f"{name}.parquet": len(content) for name, content in rows.items()}


def _prompts(rng: random.Random, split: str, count: int) -> list[dict[str, Any]]:
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw(rng, held_out=split == "test")
        problems[problem.question] = problem
    rows = []
    for index, problem in enumerate(problems.values()):
        info = {"answer": problem.worked, "question": problem.question}
        rows.append(problem_row(DATA_SOURCE, problem.prompt, str(problem.results[1]), split, index, **info))
    return rows


def _demonstrations(rng: random.Random, split: str, count: int, held_out: bool = False) -> list[dict[str, Any]]:
    rows = []
    for index in range(count):
        problem = draw(rng, held_out)
        rows.append({**_row(problem, split, index), "response": demonstrate(problem, rng)})
    return rows


def _preferences(rng: random.Random, split: str, count: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Return pairs: the worked, scorable solution is chosen, and a different demonstration is rejected."""
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        problem = draw(rng, held_out)
        rejected = demonstrate(problem, rng)
        if rejected != problem.worked:
            rows.append({**_row(problem, split, len(rows)), "chosen": problem.worked, "rejected": rejected})
    return rows


def _row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    info = {"split": split, "index": index}
    return {"data_source": DATA_SOURCE, "prompt": problem.prompt, "extra_info": info}
