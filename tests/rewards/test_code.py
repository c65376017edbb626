"""The score of a program depends only on the tests it passes, and not on changes it makes to the tests."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from megarl import rewards, sandbox
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards.base import ScoreRequest
from megarl.rewards.code import grade, same_output, same_value
from megarl.rewards.scoring import Scoring
from megarl.rewards.weighted import terms_of
from tests.support.sandbox_machine import needs_sandbox
from tests.support.verdict_forgeries import CALL_FORGERIES, FORGERIES

SUMS = {"inputs": ["1 2\n", "3 4\n", "-1 1\n", "10 20\n"], "outputs": ["3\n", "7\n", "0\n", "30\n"]}
CALLS = {"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["6", "0"], "fn_name": "total"}
ASSERTS = {"assert_case": ["assert f(1) == 2", "assert f(-1) == 0"]}


def request(program: str, truth: Any, source: str = "apps") -> ScoreRequest:
    return ScoreRequest(f"Some words.\n```python\n{program}\n```\nDone.", truth, source, uid="row 1")


def score(program: str, truth: Any, name: str = "code") -> rewards.Score:
    return rewards.score(rewards.resolve(name, ["apps"])["apps"], request(program, truth))


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("print(sum(map(int, input().split())))", 4),
        ("import sys\nprint(eval('+'.join(sys.stdin.read().split())))", 4),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", 4),
        ("a, b = map(int, input().split())\nprint(a + b if a > 0 else 'none')", 3),
        ("print(3)", 1),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0),  # right, and then it fails
        ("print(3 7 0 30", 0),
        ("", 0),
    ],
)
def test_standard_input_and_output(program: str, passed: int) -> None:
    got = score(program, json.dumps(SUMS))
    assert got.value == passed / 4
    assert got.parts == {"accuracy": float(passed == 4), "passed": passed, "tests": 4, "timeouts": 0}
    assert score(program, SUMS, "code_all").value == float(passed == 4)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def total(xs, y):\n    return sum(xs) + y", 2),
        ("class Solution:\n    def total(self, xs: List[int], y: int) -> int:\n        return sum(xs) + y", 2),
        ("def total(xs, y):\n    print('talk', 6)\n    return sum(xs) + y", 2),
        ("def total(xs, y):\n    return 6", 1),
        ("def total(xs):\n    return 6", 0),
        ("def other(xs, y):\n    return 6", 0),
        ("class Any:\n    def __eq__(self, other): return True\ndef total(xs, y):\n    return Any()", 0),
        ("import os\nos._exit(0)", 0),
        ("raise SystemExit(0)", 0),
    ],
)
def test_calls(program: str, passed: int) -> None:
    assert score(program, CALLS).parts["passed"] == passed


@needs_sandbox
def test_results_in_a_list_of_one_are_unwrapped() -> None:
    raw = {"inputs": [[[3, 1]]], "outputs": [[[1, 3]]], "fn_name": "order"}
    assert score("def order(xs):\n    return tuple(sorted(xs))", raw).value == 1
    first = {"inputs": [[[3, 1]]], "outputs": [[1, 3]], "fn_name": "order"}
    assert score("def order(xs):\n    return 1", first).value == 0  # the first of several is not the result


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def f(x):\n    return x + 1", 2),
        ("def f(x):\n    return 2", 1),
        ("import os\nos._exit(0)", 0),
        ("def f(x):\n    raise SystemExit(0)", 0),
        ("import sys\nprint('\"token\"')\nsys.exit()", 0),
    ],
)
def test_statements(program: str, passed: int) -> None:
    assert score(program, ASSERTS).parts["passed"] == passed


# Programs that are right, and statements that data sets have.
STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n    def __eq__(self, o): return self.items == o.items\n    def __repr__(self): return f'Stack({self.items})'"
RIGHT = {
    "literals": ("def f(x): return {'a': [(1, 2.5), None, True], 2: {3}, 'b': b'x', 'c': 1j}", "assert f(0) == {'a': [(1, 2.5), None, True], 2: {3}, 'b': b'x', 'c': 1j}"),
    "a tuple is not a list": ("def f(x): return (1, 2)", "assert f(0) == (1, 2) and f(0) != [1, 2]"),
    "comparison": ("def f(x): return x / 3", "assert abs(f(1) - 0.3333333) < 1e-6 and math.isclose(f(3), 1) and f(9) > 2"),
    "sorted and set": ("def f(x): return [3, 1, 1]", "assert sorted(f(0)) == [1, 1, 3] and set(f(0)) == {1, 3} and len(f(0)) == 3"),
    "nested calls": ("def f(x): return x + 1", "assert f(f(f(1))) == 4"),
    "keywords": ("def f(x, *, y=1): return x + y", "assert f(1, y=4) == 5 and f(x=2) == 3"),
    "changes its argument": ("def f(xs): xs.sort()", "xs = [3, 1]\nassert f(xs) is None\nassert xs == [1, 3]"),
    "changes a dictionary and a set": ("def f(d, s): d['a'] = 1; s.discard(2)", "d, s = {}, {1, 2}\nf(d, s)\nassert d == {'a': 1} and s == {1}"),
    "takes a function": ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x * 2, [1, 2]) == [2, 4]"),
    "returns a function": ("def f(x): return lambda y: x + y", "assert f(1)(2) == 3"),
    "returns a generator": ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    "an endless generator": ("def f():\n    x = 0\n    while True:\n        yield x\n        x += 1", "g = f()\nassert [next(g) for _ in range(3)] == [0, 1, 2]"),
    "a class": (STACK, "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and isinstance(s, Stack)\nassert s == Stack().push(1) and s != Stack()\nassert str(s) == 'Stack([1])' and s.items == [1]"),
    "attributes": ("class P:\n    x = 1", "p = P()\np.x = 5\nassert p.x == 5 and P.x == 1"),
    "operators between objects": ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n    def __lt__(self, o): return self.x < o.x", "assert (V(1) + V(2)).x == 3 and V(1) < V(2)"),
    "a built-in error": ("def f(x): raise ValueError('too small')", "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'too small'\nelse:\n    assert False"),
    "an error class of the program": ("class E(KeyError): pass\ndef f(x): raise E(1)", "try:\n    f(1)\n    assert False\nexcept LookupError:\n    pass"),
    "the name of a built-in": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
    "the name of a library function": ("def gcd(a, b): return 'mine'", "assert gcd(4, 6) == 'mine'"),
    "libraries of the statement": ("import collections\ndef f(x): return collections.Counter(x)", "from collections import Counter\nassert f('aab') == Counter('aab')"),
    "libraries of the program": ("import fractions as fr\nfrom decimal import Decimal\ndef f(x): return fr.Fraction(x, 3), Decimal('1.5')", "assert f(1) == (fr.Fraction(1, 3), Decimal('1.5'))"),
    "a constant": ("LIMIT = 10\ndef f(x): return x", "assert LIMIT == 10"),
    "a method of Solution": ("class Solution:\n    def f(self, xs: List[int]) -> int: return max(xs)", "assert Solution().f([1, 5]) == 5"),
    "check of a candidate": ("def f(x): return x + 1", "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0, 'message'\ncheck(f)"),
    "a huge number": ("def f(x): return 10 ** 5000", "assert f(1) == 10 ** 5000"),
    "text with all characters": ("def f(x): return x + '\\x00\\U0001f600é'", "assert f('ü') == 'ü\\x00\\U0001f600é'"),
    "large arguments": ("def f(xs): return len(xs)", "assert f(list(range(100000))) == 100000"),
    "nan": ("def f(x): return float('nan')", "assert math.isnan(f(1)) and f(1) != f(1)"),
    "a deque": ("from collections import deque\ndef f(x): return deque([x, 2])", "assert f(1) == deque([1, 2]) and list(f(1)) == [1, 2]"),
    "prints": ("def f(x): print('passed', x); return x", "assert f(1) == 1"),
    "a data class": ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 0", "assert P(1, 2) == P(1, 2) and P(1).x == 1"),
    "a statement that prints": ("def f(x): return x", "assert f(1) == 1\nprint('all tests passed')"),
    "names of other libraries": ("class ListNode:\n    def __init__(self, v): self.v = v\ndef merge(a, b): return a or b\ndef compress(x): return x\ndef decompress(x): return x", "assert merge(ListNode(1), None).v == 1 and decompress(compress('aab')) == 'aab'"),
    "a named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, 2)", "assert f(1) == (1, 2) and f(1).y == 2 and P(1, 2) == f(1) and isinstance(f(1), P)"),
    "an enumeration of integers": ("import enum\nclass E(enum.IntEnum):\n    A = 1", "assert E.A == 1 and E.A.name == 'A'"),
    "a subclass of OrderedDict": ("class LRU(OrderedDict):\n    def __init__(self, n): super().__init__(); self.n = n\n    def put(self, k, v):\n        self[k] = v\n        if len(self) > self.n: self.popitem(last=False)\n    def get(self, k): return self[k] if k in self else -1", "c = LRU(1)\nc.put(1, 1); c.put(2, 5)\nassert c.get(1) == -1 and c.get(2) == 5 and 2 in c and len(c) == 1"),
    "counters": ("def f(x): return Counter(x)\ndef g(d):\n    d['b'] += 2\n    return d", "assert f('aab')['z'] == 0 and f('aab').most_common(1) == [('a', 2)]\nd = defaultdict(int, a=1)\nassert g(d)['b'] == 2 and d['b'] == 2"),
    "an error that is caught by its class": ("class E(Exception): pass\ndef f(x): raise E('no', x)", "try:\n    f(1)\n    assert False\nexcept E as error:\n    assert error.args == ('no', 1)"),
    "a key error's text": ("def f(x): return {}[x]", "try:\n    f('k')\nexcept KeyError as error:\n    assert str(error) == \"'k'\""),
    "a decorator": ("import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(*a): return g(*a) * 2\n    return h", "assert twice(lambda x: x + 1)(2) == 6"),
    "operators with numbers": ("class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, k): return V(self.x * k)\n    __rmul__ = __mul__\n    def __neg__(self): return V(-self.x)\n    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return hash(self.x)", "assert (V(1) * 2).x == 2 and 3 * V(1) == V(3) and -V(1) == V(-1) and len({V(1), V(1)}) == 1"),
    "a context manager": ("class C:\n    def __enter__(self): return self\n    def __exit__(self, *a): self.left = True; return True\n    def __contains__(self, x): return x == 3", "c = C()\nwith c as d:\n    raise ValueError\nassert c.left and 3 in c and 4 not in c"),
    "classes as arguments": ("def f(xs, kind): return [x for x in xs if isinstance(x, kind)]\ndef g(x): return type(x)", "assert f([1, 'a'], int) == [1] and g(1) == int"),
    "dates": ("import datetime\ndef f(d): return d + datetime.timedelta(days=1)", "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)"),
    "views of dictionaries": ("def f(): return {1: 2}.keys(), bytearray(b'x'), {1: 2}.items()", "a, b, c = f()\nassert a == {1} and list(a) == [1] and b == bytearray(b'x') and list(c) == [(1, 2)]"),
    "a deque that changes": ("def f(q): q.append(3)", "q = deque([1])\nf(q)\nassert list(q) == [1, 3]"),
    "the module solution": ("def f(x): return x", "from solution import f\ndef test_f():\n    assert f(3) == 3"),
    "a test case": ("def f(x): return x", "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(f(3), 3)\n    def test_error(self):\n        with self.assertRaises(ZeroDivisionError): 1 / f(0)\nif __name__ == '__main__':\n    unittest.main()"),
    "a million numbers": ("def f(xs): return sorted(xs)", "xs = list(range(10**6))\nassert f(xs[::-1]) == xs"),
    "nested lists": ("def f(x):\n    for _ in range(100): x = [x]\n    return x", "x = f(1)\nwhile isinstance(x, list):\n    x = x[0]\nassert x == 1"),
    "no assertion": ("def f(x): return x", "import os"),
    "a helper named test": ("def add(a, b): return a + b", "def test(a, b, expected): assert add(a, b) == expected\ntest(1, 2, 3)"),
    "a test function with a default": ("def f(x): return x", "def test_f(value=3, *more): assert f(value) == 3"),
    "a base class of test cases": ("def f(x): return x", "import unittest\nclass Base(unittest.TestCase):\n    value = 1\nclass T(Base):\n    def test(self): self.assertEqual(f(self.value), 1)"),
    "a main block": ("def f(x): return x", "def check():\n    assert f(3) == 3\nif __name__ == '__main__':\n    check()"),
    "a main block and the name of a built-in": ("def sum(a, b): return a * b", "if __name__ == '__main__':\n    assert sum(10, 15) == 150"),
    "functions with names of modules": ("def queue(x): return x\ndef calendar(x): return -x\ndef bisect(f, a, b): return (a + b) / 2", "assert queue(1) == 1 and calendar(2) == -2 and bisect(None, 0, 4) == 2"),
    "a parameter with the function's name": ("def add(a, b): return a + b", "def check(add):\n    assert add(1, 2) == 3\ncheck(add)"),
    "a loop variable with the function's name": ("def f(x): return x", "assert f(1) == 1 and [f for f in [2]] == [2] and (lambda f: f)(3) == 3"),
    "a local variable with the function's name": ("def solve(x): return x", "def helper():\n    solve = 3\n    return solve\nassert solve(2) == 2 and helper() == 3"),
    "a method with the function's name": ("def solve(x): return x", "class Reference:\n    def solve(self, x): return x\nassert solve(2) == Reference().solve(2)"),
    "a function that only a nested scope uses": ("def f(x): return x\ndef g(x): return x", "class A:\n    run = staticmethod(f)\n    def test(self): return [(lambda: g(i))() for i in (1, 2)]\nassert A.run(3) == 3 and A().test() == [1, 2]"),
    "imports of solution by other names": ("def add(a, b): return a + b\ndef sub(a, b): return a - b", "from solution import add as plus, sub\ndef test_sub():\n    from solution import sub as minus\n    assert minus(3, 2) == sub(3, 2) == 1\nassert plus(1, 2) == 3"),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_a_statement(name: str) -> None:
    program, statement = RIGHT[name]
    assert score(program, {"assert_case": [statement]}).value == 1


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "statement"), [case[1:] for case in FORGERIES], ids=[case[0] for case in FORGERIES]
)
def test_no_statement_is_forged(program: str, statement: str) -> None:
    limits = sandbox.Limits(cpu_seconds=2, wall_seconds=4)
    assert grade(request(program, {"assert_case": [statement]}), False, limits)["passed"] == 0


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "expected"), [case[1:] for case in CALL_FORGERIES], ids=[case[0] for case in CALL_FORGERIES]
)
def test_no_result_of_a_call_is_forged(program: str, expected: Any) -> None:
    truth = {"inputs": [[3]], "outputs": [expected], "fn_name": "f"}
    assert grade(request(program, truth), False)["passed"] == 0


@needs_sandbox
def test_a_program_may_have_as_few_processes_as_a_recipe_allows() -> None:
    """The process of the statement does not count."""
    truth = {"assert_case": ["assert f(1) == 1"]}
    limits = sandbox.Limits(processes=1)
    assert grade(request("def f(x): return x", truth), False, limits)["passed"] == 1
    forks = "import os\ndef f(x): return os.fork() >= 0"
    assert grade(request(forks, truth), False, limits)["passed"] == 0


@needs_sandbox
def test_lone_surrogates_in_a_response_are_a_wrong_answer() -> None:
    assert score("print('\ud800')", {"inputs": [""], "outputs": ["x"]}).value == 0


@needs_sandbox
def test_tests_are_isolated_from_each_other() -> None:
    """A program finds no files of its previous test."""
    program = "import os\nprint(os.path.exists('/tmp/note'))\nopen('/tmp/note', 'w').write('x')"
    assert score(program, {"inputs": [""] * 6, "outputs": ["False"] * 6}).value == 1


@needs_sandbox
def test_after_three_timeouts_the_remaining_tests_are_skipped() -> None:
    """Otherwise a hundred tests of an endless loop hold a scorer for minutes. Four run at a time."""
    limits = sandbox.Limits(cpu_seconds=0.2, wall_seconds=20)
    got = grade(request("while True: pass", {"inputs": [""] * 40, "outputs": [""] * 40}), False, limits)
    assert (got["timeouts"], got["tests"], got["score"]) == (4, 40, 0)


@needs_sandbox
def test_the_tests_of_a_response_share_a_time() -> None:
    """An endless program is wrong within reward.timeout; many quick tests that take longer together are a failure."""
    start = time.monotonic()
    got = grade(request("while True: pass", {"inputs": [""] * 40, "outputs": [""] * 40}), False, seconds=1.0)
    assert (got["timeouts"], got["score"]) == (4, 0) and time.monotonic() - start < 5
    naps = "import time\nif input(): time.sleep(60)\nprint(1)"
    half = {"inputs": ["\n", "\n", "x\n", "\n"], "outputs": ["1"] * 4}
    got = grade(request(naps, half), False, seconds=1.0)
    assert (got["passed"], got["timeouts"]) == (3, 1)
    with pytest.raises(TimeoutError, match=r"400 tests take longer than 1 s: raise reward\.timeout"):
        grade(request("print(1)", {"inputs": [""] * 400, "outputs": ["1"] * 400}), False, seconds=1.0)


@needs_sandbox
def test_the_recipes_limits_and_packages_hold_in_a_run() -> None:
    """Limits and packages pass from the recipe's section through the scoring processes to the program."""
    settings = RewardConfig(function="code", processes=1, timeout=60)
    limited = SandboxConfig(cpu_seconds=0.2, output_kb=1, packages=["packaging"])
    scoring = Scoring(terms_of("code", {}, ["apps"]), settings, limited)
    scoring.start()
    truth = {"inputs": [""], "outputs": ["1.5"]}
    programs = (
        "import packaging.version as v\nprint(v.Version('1.5'))",
        "while True: pass",
        "print('1.5' + ' ' * 2000)",
    )
    try:
        outcomes = asyncio.run(scoring.score([request(program, truth) for program in programs]))
    finally:
        scoring.close()
    scores = [result for result, _ in outcomes if isinstance(result, rewards.Score)]
    assert [(score.value, score.parts["timeouts"]) for score in scores] == [(1, 0), (0, 1), (0, 0)]
    assert score(programs[0], truth).value == 0 and score(programs[2], truth).value == 1  # by the defaults


@needs_sandbox
def test_a_missing_package_is_refused_before_a_run_starts() -> None:
    scorer = rewards.find("code_all", rewards.ScorerSettings(sandbox=SandboxConfig(packages=["no-such-package"])))
    assert scorer.prepare is not None
    with pytest.raises(ValueError, match="'no-such-package', which is not installed"):
        scorer.prepare()


def test_the_recipes_limits_equal_the_sandboxs() -> None:
    """Each setting reaches its limit, and an empty section means the sandbox's defaults."""
    assert SandboxConfig().limits() == sandbox.Limits()
    limits = SandboxConfig(cpu_seconds=1, wall_seconds=2, memory_mb=3, output_kb=4, processes=5)
    assert limits.limits() == sandbox.Limits(1, 2, 3, output_kb=4, processes=5)


@needs_sandbox
def test_all_or_nothing_scoring_stops_after_the_first_failure() -> None:
    got = grade(request("print(input())", {"inputs": ["1"] * 40, "outputs": ["2"] + ["1"] * 39}), True)
    assert got["score"] == 0 and got["passed"] == 3


@needs_sandbox
def test_the_last_code_block_counts_and_prose_scores_zero() -> None:
    truth = {"inputs": [""], "outputs": ["2"]}
    two = "```python\nprint(1)\n```\nNo:\n```python\nprint(2)\n```"
    assert grade(ScoreRequest(two, truth, "apps"), False)["score"] == 1
    assert grade(ScoreRequest("```py\nprint(2)", truth, "apps"), False)["score"] == 1  # cut off by the length limit
    for none in ("print(2)", "```\nprint(2)\n```", "```json\n2\n```", ""):
        assert grade(ScoreRequest(none, truth, "apps"), False) == {
            "score": 0, "accuracy": 0, "passed": 0, "tests": 1, "timeouts": 0,
        }  # fmt: skip


@pytest.mark.parametrize("truth", ["[]", "3", {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, "{"])
def test_an_invalid_row_is_an_error_and_not_a_zero(truth: Any) -> None:
    with pytest.raises(rewards.RewardError, match="row 1"):
        score("print(1)", truth)


def test_a_machine_without_a_sandbox_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise sandbox.SandboxUnavailable("bwrap is not installed")

    monkeypatch.setattr(sandbox, "require", lacking)
    with pytest.raises(rewards.RewardError, match="bwrap is not installed"):
        score("print(1)", SUMS)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("YES\r\n", "YES", True),
        ("0.3333333", "0.33333333333", True),
        ("0.3334", "0.33333333333", False),
        ("3", "3.0", True),
        ("3.0", "3", False),  # the reference is an integer
        ("1000000001", "1000000000", False),
        ("nan", "1.0", False),
        ("yes", "YES", False),
        ("", "", True),
        ("", "0", False),
        ("1 2", "2 1", False),
        ("1e-7", "0.0", True),
        ("٣.٥", "3.5x", False),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ([1, [2]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ({"1": 2.0000000001}, {"1": 2}, True),
        ({"1": 2}, {"1": 2, "2": 3}, False),
        ("1", 1, False),
        (None, 0, False),
        (0.1 + 0.2, 0.3, True),
    ],
)
def test_values(answer: Any, expected: Any, same: bool) -> None:
    assert same_value(answer, expected) is same


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_data_sources_of_verl(source: str) -> None:
    assert rewards.resolve(None, [source])[source].name == "code"
