"""Script for the sandbox: run a statement against a program that never enters the statement's process.

Input: the program's size in bytes, a line feed, the program, the statement. Output: "passed" if the statement raises nothing
and, if it checks anything, its checks use the program. The script forks before it reads the statement. The program runs in
the child, which has neither the script's output nor its input; the statement runs in the parent. Where the statement uses a
name of the program, calls and their results cross a pipe as plain values (statement_values.py). An object of another type
stays with the program, and the statement has a `Remote` instead (statement_objects.py), which never equals a plain value.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import importlib
import inspect
import operator
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from megarl.rewards.statement_objects import COMPARISONS, OPERATORS, UNARY, Peer, Remote, read_exactly
from megarl.rewards.statement_values import ProtocolError, error_of

PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *; from collections import *; from functools import *; from itertools import *
from bisect import *; from heapq import *; from math import *; from builtins import *
"""
# Names that keep Python's meaning in a statement, whatever the program defines, because statements compare with them.
_KEPT_LIBRARIES = (  # noqa: SIM905
    "math cmath isclose fabs inf nan isnan Counter deque OrderedDict defaultdict np numpy pd pytest approx allclose array_equal "
    "array Decimal Fraction copy deepcopy date datetime timedelta unittest TestCase"
).split()
KEPT = frozenset([*dir(builtins), *_KEPT_LIBRARIES])
MODULES = sys.stdlib_module_names
RENAMED = {("numpy", "np"), ("pandas", "pd")}  # aliases that are imported, although `KEPT` has them
# A function may have the name of a class or function of Python, except these, if its statement needs nothing else.
COMPARING = frozenset(
    "set frozenset sorted list tuple dict len abs round all any isinstance str int float bool type repr map zip".split()  # noqa: SIM905
)

# The child: the program.


def call(function: Any, names: list[str], *values: Any) -> Any:
    count = len(values) - len(names)
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


def exit_context(context: Any, kind: Any, arguments: Any) -> Any:
    return context.__exit__(kind, None if kind is None else error_of(kind, arguments), None)


def serve(program: str, names: dict[str, Any], incoming: int, outgoing: int) -> None:
    """Run the program in `names` and answer for its objects until the statement ends."""
    before = dict(names)
    module = sys.modules["solution"] = types.ModuleType("solution")
    module.__dict__.update(names | {"__name__": "solution"})
    names = module.__dict__
    plain = ("eq", "getitem", "setitem", "delitem", "contains", *OPERATORS, *COMPARISONS, *UNARY)
    answers: dict[str, Callable[..., Any]] = {
        **{name: getattr(operator, f"__{name}__") for name in plain},
        **{f"r{name}": lambda a, b, name=name: getattr(operator, f"__{name}__")(b, a) for name in OPERATORS},
        **{function.__name__: function for function in (getattr, setattr, iter, next, reversed, isinstance, bool, len, str)},
        "repr": repr, "hash": hash, "call": call, "enter": lambda context: context.__enter__(), "exit": exit_context,
        "names": lambda: sorted(name for name in names if name not in before or names[name] is not before[name]),
        "named": lambda name: names[name],
    }  # fmt: skip
    peer = Peer(incoming, outgoing, answers)
    exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    while True:
        peer.answer(*peer.receive())


# The parent: the statement.


def prelude() -> dict[str, Any]:
    """Return the names that programs and statements have without an import."""
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names


def imported(program: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return what the program imports under its usual name, imported before the program could change anything.

    `names`: the prelude's names, which keep their meaning.
    """
    # not the working directory: the program can write libraries into it
    sys.path[:] = [folder for folder in sys.path if folder not in ("", "/")]
    result: dict[str, Any] = {}

    def module_of(name: str) -> Any:
        if "__main__" in name or name.partition(".")[0] in ("test", "this", "antigravity", "idlelib", "turtledemo"):
            raise ImportError(f"{name} runs code when it is imported")
        return importlib.import_module(name)

    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(program)):
            with contextlib.suppress(Exception):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        module, top = module_of(alias.name), module_of(alias.name.partition(".")[0])
                        if alias.asname not in KEPT | MODULES or (alias.name, alias.asname) in RENAMED:
                            result[alias.asname or top.__name__] = module if alias.asname else top
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    module = module_of(node.module)
                    result |= {a.name: getattr(module, a.name) for a in node.names if a.asname in (None, a.name)}
    return {name: value for name, value in result.items() if name not in {*names, *dir(builtins)}}


class StatementRewriter(ast.NodeTransformer):
    """Make a statement count its assertions, and take names of the module `solution` as names of the program."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        counting = ast.parse("__checked__()").body[0]
        return [node, ast.copy_location(counting, node)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        if node.module != "solution":
            return node
        renames = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname not in (None, alias.name)]
        return [ast.copy_location(statement, node) for statement in ast.parse("\n".join(renames or ["pass"])).body]


def global_names(module: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the global names that the module's code reads, and the ones that it sets. Local variables are in neither."""
    read, written, codes = set(), set(), [module]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
                read.add(instruction.argval)
            elif instruction.opname == "STORE_GLOBAL" or (instruction.opname == "STORE_NAME" and code is module):
                written.add(instruction.argval)
    return read, written


def used_names(tree: ast.AST, code: types.CodeType, defined: set[str]) -> set[str]:
    """Return the names of the statement that mean the program's objects. `defined`: names that the program defines."""
    read, written = global_names(code)
    owners = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    modules = MODULES & {node.id for node in owners if isinstance(node, ast.Name)}  # such as json in json.loads
    used = {name for name in (read - written - modules) & defined if not name.startswith("__")}
    if used - KEPT:
        return used - KEPT
    python = used & set(dir(builtins))
    return python - COMPARING or (python if len(python) == 1 else set())


def run_statement(statement: str, names: dict[str, Any], libraries: dict[str, Any], peer: Peer) -> bool:
    """Run the statement in `names`. Returns False if it has checks, but does not use the program."""
    tree = ast.fix_missing_locations(StatementRewriter().visit(ast.parse(statement, "test.py")))
    code = compile(tree, "test.py", "exec", dont_inherit=True)
    chosen = used_names(tree, code, {str(name) for name in peer.request("names")} - libraries.keys())
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    checks: list[int] = []
    module.__dict__.update(names | libraries | {"__checked__": lambda: checks.append(1)})
    for name in sorted(chosen):
        value = module.__dict__[name] = peer.request("named", name)
        if isinstance(value, Remote) and name[:1].isupper():
            object.__setattr__(value, "_free", True)
    unittest.main = lambda *a, **k: None  # type: ignore[assignment]  # the cases are run below
    before = peer.requests
    exec(code, module.__dict__)
    members = [value for value in module.__dict__.values() if getattr(value, "__module__", None) == "__main__"]
    for function in members:
        if isinstance(function, types.FunctionType) and is_test(function):
            function()
    cases = [case for case in members if isinstance(case, type) and issubclass(case, unittest.TestCase)]
    if cases:
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
        result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
        if not result.wasSuccessful() or not result.testsRun:
            return False
        checks.append(1)
    runs = bool(checks) or peer.requests > before
    peer.request("names")  # the program has not ended
    has_checks = bool(cases) or any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    return (bool(chosen) and runs) or not has_checks


def is_test(function: types.FunctionType) -> bool:
    """Return whether a function of the statement is a test: `test...` without required parameters. Others are helpers."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    required = any(item.default is item.empty and item.kind not in optional for item in parameters)
    return function.__name__.startswith("test") and not required


def main() -> None:
    digits = b""
    while not digits.endswith(b"\n"):
        digits += read_exactly(0, 1)
    program = read_exactly(0, int(digits)).decode()
    names = prelude()
    libraries = imported(program, names)
    questions, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(2 if descriptor else null, descriptor)
        for descriptor in (null, questions[1], answers[0]):
            os.close(descriptor)
        with contextlib.suppress(ProtocolError):
            serve(program, names, questions[0], answers[1])
        os._exit(0)
    os.close(questions[0])
    os.close(answers[1])
    verdict = os.dup(1)
    os.dup2(2, 1)  # what the statement prints is not the verdict
    statement = b""
    while part := os.read(0, 1 << 16):
        statement += part
    if run_statement(statement.decode(), names, libraries, Peer(answers[0], questions[1], {"call": call})):
        os.write(verdict, b"passed")
