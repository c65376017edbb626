"""Score programs by the tests that they pass. Each test runs in one sandbox process (docs/sandbox.md).

The row's ground truth has the format of verl's code data sets, as JSON or as the object itself::

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                    standard input and output
    {"inputs": ["[1, 2]\\n3", ...], "outputs": ["6", ...], "fn_name": "f"}   calls: one argument per line, as JSON
    {"assert_case": ["assert f(1) == 2", ...]}                              statements that use the program

No verdict is formed where the program runs: expected values never enter its process, and statements run in another one
(statement_runner.py).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl import sandbox
from megarl.rewards.base import ScoreRequest, scorer
from megarl.rewards.settings import ScorerSettings

AT_ONCE = 4  # tests of a response that run at the same time
SHARE_OF_TIMEOUT = 0.8  # of reward.timeout: the tests end before the pool ends the process
LEAST_SECONDS = 0.2  # a test that would have less is not started
MOST_TIMEOUTS = 3  # after this many time-outs the remaining tests are not run and count as failed
CLOSE = 1e-6  # relative and absolute error of numbers that have a decimal point or an exponent
BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
TIME = ("cpu", "wall")

# Runs inside the sandbox. It reads its task, one line of JSON, from stdin before the program starts, and writes its
# answer to a file descriptor that print does not use. The expected result is not in the sandbox.
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
holder = names["Solution"]() if "Solution" in names else None
function = getattr(holder, task["call"], None) or names[task["call"]]
answer = function(*task["arguments"])
os.write(answers, json.dumps(answer, default=list).encode())
"""


def _statement_script() -> str:
    """Return the modules of statement_runner.py as a script: the sandbox does not have megarl."""
    names = ("statement_values", "statement_objects", "statement_runner")
    modules = {f"megarl.rewards.{name}": Path(__file__).with_name(f"{name}.py").read_text() for name in names}
    return f"""
import sys, types
for name in ("megarl", "megarl.rewards"):
    sys.modules[name] = types.ModuleType(name)
for name, text in {modules!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""


STATEMENT_SCRIPT = _statement_script()


@dataclass(frozen=True)
class Test:
    """One run: its source and input, and whether its output is right. `processes`: those besides the program's."""

    source: str
    stdin: str
    right: Callable[[str], bool]
    processes: int = 0


def prepare(settings: ScorerSettings) -> None:
    """Raise SandboxUnavailable or ValueError if this machine cannot run programs with the recipe's sandbox settings."""
    sandbox.check(settings.sandbox.packages)


@scorer("code", sources=("codecontests", "apps", "codeforces", "taco"), prepare=prepare, settings=True)
def code(request: ScoreRequest, settings: ScorerSettings) -> dict[str, float]:
    """Return the share of tests that the last ```python block passes."""
    return _graded(request, settings, all_or_nothing=False)


@scorer("code_all", prepare=prepare, settings=True)
def code_all(request: ScoreRequest, settings: ScorerSettings) -> dict[str, float]:
    """Return 1 if the last ```python block passes all tests, else 0; stop at the first failure."""
    return _graded(request, settings, all_or_nothing=True)


def _graded(request: ScoreRequest, settings: ScorerSettings, *, all_or_nothing: bool) -> dict[str, float]:
    limits, packages = settings.sandbox.limits(), tuple(settings.sandbox.packages)
    return grade(request, all_or_nothing, limits, packages, SHARE_OF_TIMEOUT * settings.timeout)


def grade(
    request: ScoreRequest,
    all_or_nothing: bool,
    limits: sandbox.Limits | None = None,
    packages: tuple[str, ...] = (),
    seconds: float = math.inf,
) -> dict[str, float]:
    """Run the tests of a row. `limits` and `packages`: see megarl.sandbox.run; they apply to each test.

    seconds: time for all tests together. A test that still runs then is a time-out, and the rest is not run.
    `passed`, `timeouts` and `tests` count tests. A response without a program passes none.

    Raises:
        ValueError: the ground truth does not have the format of this module's docstring.
        SandboxUnavailable, SandboxError: the tests could not run.
        TimeoutError: no test was slow, but all together are.
    """
    blocks = BLOCK.findall(request.response)
    program = (blocks[-1] if blocks else "").encode(errors="replace").decode()  # replaces lone surrogates
    tests = tests_of(request.ground_truth, program)
    sandbox.require()
    passed = timeouts = 0
    each, end = limits or sandbox.Limits(), time.monotonic() + seconds

    def run(test: Test) -> sandbox.Result:
        wall = min(each.wall_seconds, max(LEAST_SECONDS, end - time.monotonic()))
        test_limits = replace(each, processes=each.processes + test.processes, wall_seconds=wall)
        return sandbox.run(test.source, test.stdin, test_limits, packages)

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="code-test") as threads:
        for start in range(0, len(tests) if blocks else 0, AT_ONCE):
            chosen = tests[start : start + AT_ONCE]
            for test, result in zip(chosen, threads.map(run, chosen), strict=True):
                passed += result.ok and test.right(result.stdout)
                timeouts += result.limit in TIME
            late = time.monotonic() > end - LEAST_SECONDS
            if late and not timeouts and start + len(chosen) < len(tests):
                raise TimeoutError(f"{len(tests)} tests take longer than {seconds:g} s: raise reward.timeout")
            if late or timeouts >= MOST_TIMEOUTS or (all_or_nothing and passed < start + len(chosen)):
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
    """Return the tests of a row for `program`."""
    cases = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(cases, dict):
        raise ValueError(f"ground_truth is {repr(ground_truth)[:200]}, not an object with inputs and outputs")
    if cases.get("assert_case"):
        return [_statement(program, str(statement)) for statement in cases["assert_case"]]
    if not cases.get("inputs") or len(cases["inputs"]) != len(cases.get("outputs", ())):
        raise ValueError(
            f"ground_truth has {len(cases.get('inputs', ()))} inputs and {len(cases.get('outputs', ()))} outputs, "
            f"it needs equal numbers of both, at least 1, or statements in assert_case"
        )
    pairs = zip(cases["inputs"], cases["outputs"], strict=True)
    if cases.get("fn_name"):
        return [_call(program, str(cases["fn_name"]), inputs, output) for inputs, output in pairs]
    return [_whole_program(program, inputs, output) for inputs, output in pairs]


def _whole_program(program: str, inputs: Any, expected: Any) -> Test:
    stdin, stdout = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (inputs, expected))
    return Test(program, stdin, lambda output: same_output(output, stdout))


def _call(program: str, name: str, inputs: Any, result: Any) -> Test:
    arguments = [json.loads(line) for line in inputs.split("\n")] if isinstance(inputs, str) else list(inputs)
    expected = json.loads(result) if isinstance(result, str) else result
    task = {"program": program, "call": name, "arguments": arguments}
    return Test(HARNESS, json.dumps(task) + "\n", lambda output: _matches(output, expected))


def _statement(program: str, statement: str) -> Test:
    stdin = f"{len(program.encode())}\n{program}{statement}"
    return Test(STATEMENT_SCRIPT, stdin, lambda output: output == "passed", processes=1)


def _matches(output: str, expected: Any) -> bool:
    """Compare a call's result with `expected`, or with its only element: some data sets put results into a list."""
    try:
        answer = json.loads(output)
        return same_value(answer, expected) or (
            isinstance(expected, list) and len(expected) == 1 and same_value(answer, expected[0])
        )
    except (ValueError, ArithmeticError, RecursionError):  # no JSON, or a number or nesting beyond any expected result
        return False


def same_value(answer: Any, expected: Any) -> bool:
    """Compare two JSON values (tuples are lists, keys are text).

    A float may differ by CLOSE: relative to an expected float, absolute from an expected integer. 1 is not true.
    """
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same_value, answer, expected))
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same_value(answer[key], expected[key]) for key in expected)
    if isinstance(answer, bool) or isinstance(expected, bool):
        return answer is expected
    if isinstance(answer, float) and isinstance(expected, int):
        return abs(answer - expected) <= CLOSE if abs(expected) < 2**53 else answer == expected
    if isinstance(answer, (int, float)) and isinstance(expected, float):
        return math.isclose(answer, expected, rel_tol=CLOSE, abs_tol=CLOSE)
    return bool(answer == expected)


def same_output(output: str, expected: str) -> bool:
    """Compare two texts word by word; numbers with a decimal point or an exponent may differ by CLOSE."""
    words, expected_words = output.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if (
        not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=e))(e[-+]?\d+)?", expected, re.IGNORECASE | re.ASCII)
        or "_" in word
    ):
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=CLOSE, abs_tol=CLOSE)
    except ValueError:
        return False
