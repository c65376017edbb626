"""Programs, by the tests that they pass: run in the sandbox (docs/sandbox.md), one process a test.

The row's ground truth is what verl's code data sets hold, as JSON or as the object itself::

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                    standard input and output
    {"inputs": ["[1, 2]\\n3", ...], "outputs": ["6", ...], "fn_name": "f"}   calls: an argument a line, each JSON
    {"assert_case": ["assert f(1) == 2", ...]}                              statements after the program
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megarl import sandbox
from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.settings import ScorerSettings

AT_ONCE = 4  # tests of one response that run at a time
MOST_TIMEOUTS = 3  # tests past the time limit until the rest count as not passed, without being run
CLOSE = 1e-6  # relative and absolute error of numbers that have a decimal point or an exponent
BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
TIME = ("cpu", "wall")

# Runs inside the sandbox. What it is to do is its input's only line, which it has read before the program begins, and
# its answer goes to a descriptor that print does not write to.
HARNESS = """
import json, os, sys
task = json.loads(sys.stdin.readline())
answers = os.dup(1)
os.dup2(2, 1)
names = {"__name__": "solution"}
exec("import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys", names)
exec("from typing import *; from collections import *; from functools import *; from itertools import *", names)
exec("from bisect import *; from heapq import *; from math import *; from builtins import *", names)
exec(compile(task["program"], "program.py", "exec"), names)
if "call" in task:
    holder = names["Solution"]() if "Solution" in names else None
    function = getattr(holder, task["call"], None) or names[task["call"]]
    answer = function(*task["arguments"])
else:
    exec(compile(task["statement"], "test.py", "exec"), names)
    answer = task["token"]
os.write(answers, json.dumps(answer, default=list).encode())
"""


@dataclass(frozen=True)
class Test:
    """One run: its source and input, and whether its output is right."""

    source: str
    stdin: str
    right: Callable[[str], bool]


def prepare(settings: ScorerSettings) -> None:
    """Raises SandboxUnavailable or ValueError where programs cannot be run here as the recipe says."""
    sandbox.check(settings.sandbox.packages)


@scorer("code", sources=("codecontests", "apps", "codeforces", "taco"), prepare=prepare, settings=True)
def code(request: ScoreRequest, settings: ScorerSettings) -> dict[str, float]:
    """The share of tests that the last ```python block passes."""
    return grade(request, False, settings.sandbox.limits(), tuple(settings.sandbox.packages))


@scorer("code_all", prepare=prepare, settings=True)
def code_all(request: ScoreRequest, settings: ScorerSettings) -> dict[str, float]:
    """1 where the last ```python block passes all tests, else 0; it stops at the first that fails."""
    return grade(request, True, settings.sandbox.limits(), tuple(settings.sandbox.packages))


def grade(
    request: ScoreRequest,
    all_or_nothing: bool,
    limits: sandbox.Limits | None = None,
    packages: tuple[str, ...] = (),
) -> dict[str, float]:
    """Run the tests of a row. `limits` and `packages` as of megarl.sandbox.run, for each test.

    `passed`, `timeouts` and `tests` count tests. A response without a program passes none.

    Raises:
        ValueError: the ground truth is not as this module says.
        SandboxUnavailable, SandboxError: nothing is known of the program.
    """
    blocks = BLOCK.findall(request.response)
    tests = tests_of(request.ground_truth, blocks[-1] if blocks else "")
    sandbox.require()
    passed = timeouts = 0

    def run(test: Test) -> sandbox.Result:
        return sandbox.run(test.source, test.stdin, limits, packages)

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="code-test") as threads:
        for start in range(0, len(tests) if blocks else 0, AT_ONCE):
            chosen = tests[start : start + AT_ONCE]
            for test, result in zip(chosen, threads.map(run, chosen), strict=True):
                passed += result.ok and test.right(result.stdout)
                timeouts += result.limit in TIME
            if timeouts >= MOST_TIMEOUTS or (all_or_nothing and passed < start + len(chosen)):
                break
    accuracy = float(passed == len(tests))
    return {
        "score": accuracy if all_or_nothing else passed / len(tests),
        "accuracy": accuracy,
        "passed": passed,
        "tests": len(tests),
        "timeouts": timeouts,
    }


def tests_of(ground_truth: Any, program: str) -> list[Test]:
    """The tests of a row for a program."""
    cases = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(cases, dict):
        raise ValueError(f"ground_truth is {_short(ground_truth)}, not an object with inputs and outputs")
    if cases.get("assert_case"):
        return [_statement(program, str(statement)) for statement in cases["assert_case"]]
    if not cases.get("inputs") or len(cases["inputs"]) != len(cases.get("outputs", ())):
        raise ValueError(
            f"ground_truth has {len(cases.get('inputs', ()))} inputs and {len(cases.get('outputs', ()))} outputs, "
            f"where it needs as many of each, and one at least, or statements in assert_case"
        )
    pairs = zip(cases["inputs"], cases["outputs"], strict=True)
    if cases.get("fn_name"):
        return [_call(program, str(cases["fn_name"]), given, wanted) for given, wanted in pairs]
    return [_whole_program(program, given, wanted) for given, wanted in pairs]


def _whole_program(program: str, given: Any, wanted: Any) -> Test:
    stdin, stdout = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (given, wanted))
    return Test(program, stdin, lambda output: same_output(output, stdout))


def _call(program: str, name: str, given: Any, wanted: Any) -> Test:
    arguments = [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)
    expected = json.loads(wanted) if isinstance(wanted, str) else wanted
    task = {"program": program, "call": name, "arguments": arguments}
    return Test(HARNESS, json.dumps(task) + "\n", lambda output: _answers(output, expected))


def _statement(program: str, statement: str) -> Test:
    token = secrets.token_hex()  # so that a program which ends before the statement has not passed it
    task = {"program": program, "statement": statement, "token": token}
    return Test(HARNESS, json.dumps(task) + "\n", lambda output: output == json.dumps(token))


def _answers(output: str, expected: Any) -> bool:
    """Whether a call returned what is expected, or the only element of it: some data sets put results into a list."""
    try:
        answer = json.loads(output)
    except ValueError:
        return False
    return same_value(answer, expected) or (
        isinstance(expected, list) and len(expected) == 1 and same_value(answer, expected[0])
    )


def same_value(answer: Any, expected: Any) -> bool:
    """Equal, floats within CLOSE, tuples as lists and keys as text, as JSON has them."""
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same_value, answer, expected))
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same_value(answer[key], expected[key]) for key in expected)
    if isinstance(answer, float) and isinstance(expected, (int, float)):
        return math.isclose(answer, expected, rel_tol=CLOSE, abs_tol=CLOSE)
    return bool(answer == expected)


def same_output(output: str, expected: str) -> bool:
    """Word by word, whatever white space is between; numbers with a decimal point or an exponent within CLOSE."""
    words, wanted = output.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=e))(e[-+]?\d+)?", wanted, re.IGNORECASE | re.ASCII):
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=CLOSE, abs_tol=CLOSE)
    except ValueError:
        return False


def _short(value: Any) -> str:
    return repr(value)[:200]
