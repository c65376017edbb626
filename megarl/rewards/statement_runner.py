"""Script for the sandbox: run a statement against a program that never enters the statement's process.

Input: the program's size in bytes, a line feed, the program, the statement. Output: "passed" if the statement uses the
program and raises nothing. The script forks before it reads the statement. The program runs in the child, which has
neither the script's output nor its input; the statement runs in the parent. Where the statement uses a name of the
program, calls and their results cross a pipe as plain values. An object of another type stays with the program, and the
statement has a `Remote` instead: its comparisons with plain values are false, and its operators refuse them, so that no
object equals everything. Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import decimal
import fractions
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

LARGEST = 1 << 24  # bytes of a message
DEEPEST = 64  # levels of a value
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *; from collections import *; from functools import *; from itertools import *
from bisect import *; from heapq import *; from math import *; from builtins import *
"""
# Names of Python that statements compare with. A program's definition replaces one only if it is the only candidate.
COMPARING = frozenset([
    "set", "frozenset", "sorted", "list", "tuple", "dict", "len", "abs", "round", "all", "any", "isinstance", "str", "int",
    "float", "bool", "type", "repr",
])  # fmt: skip
# An answer to these questions about a plain value is not taken from a program's object.
PREDICATES = frozenset(
    {"startswith", "endswith", "issubset", "issuperset", "isdisjoint"}
    | {name for kind in (str, bytes, float) for name in dir(kind) if name.startswith("is")}
)


# Attributes with two underscores that a statement may ask a program's object for.
SPECIAL = frozenset({"__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__annotations__", "__wrapped__"})


class Broken(BaseException):
    """The other process ended, or its message is not one of the protocol. No `except Exception` of a statement stops it."""


class Peer:
    """One end of the pipe between the two processes, which call each other's objects.

    objects: what this process has shown to the other, by number. answers: the operations that the other may ask for.
    """

    def __init__(self, incoming: int, outgoing: int, answers: dict[str, Callable[..., Any]]):
        self.incoming, self.outgoing, self.answers = incoming, outgoing, answers
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}

    # Messages: a length in 8 bytes, then JSON.

    def send(self, *message: Any) -> None:
        data = json.dumps(message).encode()
        if len(data) > LARGEST:
            raise ValueError(f"a value of {len(data)} bytes is too large")
        data = len(data).to_bytes(8, "big") + data
        while data:
            data = data[os.write(self.outgoing, data) :]

    def receive(self) -> tuple[str, list[Any]]:
        size = int.from_bytes(read_exactly(self.incoming, 8), "big")
        if size > LARGEST:
            raise Broken(f"a message of {size} bytes")
        try:
            kind, *values = json.loads(read_exactly(self.incoming, size))
        except (ValueError, TypeError, RecursionError) as error:
            raise Broken("not a message") from error
        return str(kind), values

    def request(self, operation: str, *values: Any) -> Any:
        """Return the result of an operation of the other process, and raise its error."""
        self.send(operation, *map(self.encoded, values))
        while True:
            kind, content = self.receive()
            if kind == "result":
                return self.decoded(content[0])
            if kind == "changed":
                change(values[content[0]], self.decoded(content[1]))
            elif kind == "error":
                raise error_of(*content)
            else:
                self.answer(kind, content)

    def answer(self, operation: str, values: list[Any]) -> None:
        try:
            arguments = [self.decoded(value) for value in values]
            result = self.encoded(self.answers[operation](*arguments))
            for number, (argument, before) in enumerate(zip(arguments, values, strict=True)):
                if is_changeable(argument) and (after := self.encoded(argument)) != before:
                    self.send("changed", number, after)
            self.send("result", result)
        except Broken:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the program's function ends, not its process
            kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
            self.send("error", kinds[0], str(error)[:1000])

    # Values.

    def encoded(self, value: Any, level: int = 0) -> Any:
        """Return `value` for JSON. Objects of other types are kept and get a number."""
        if level > DEEPEST:
            raise ValueError("a value is nested too deeply")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Remote):
            return ["yours", value._number]
        for kind, write in WRITERS.items():
            if isinstance(value, kind):
                return [kind.__name__, write(value, lambda item: self.encoded(item, level + 1))]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encoded(value.tolist(), level)
        return ["mine", self.number_of(value)]

    def number_of(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # keeps it alive, so that its id stays its own
        return self.numbers[id(value)]

    def decoded(self, data: Any, level: int = 0) -> Any:
        """Return the value of `data`. Raises Broken if it is none."""
        if data is None or isinstance(data, bool):
            return data
        try:
            kind, content = data
            if level > DEEPEST:
                raise ValueError("nested too deeply")
            if kind == "mine":
                return self.remotes.setdefault(int(content), Remote(self, int(content)))
            if kind == "yours":
                return self.objects[int(content)]
            return READERS[kind](content, lambda item: self.decoded(item, level + 1))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise Broken("not a value") from error


def _pairs(value: Any, each: Callable[[Any], Any]) -> list[Any]:
    return [[each(key), each(item)] for key, item in value.items()]


def _items(value: Any, each: Callable[[Any], Any]) -> list[Any]:
    return [each(item) for item in value]


# By type, subclasses included: how a value is written. Booleans are written before integers.
WRITERS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    int: lambda value, _: hex(int(value)),
    float: lambda value, _: float(value),
    str: lambda value, _: str.__str__(value),
    bytes: lambda value, _: value.hex(),
    complex: lambda value, _: [value.real, value.imag],
    list: _items, tuple: _items, set: _items, frozenset: _items, collections.deque: _items,
    range: lambda value, _: [value.start, value.stop, value.step],
    dict: _pairs,
    decimal.Decimal: lambda value, _: str(value),
    fractions.Fraction: lambda value, _: [hex(value.numerator), hex(value.denominator)],
}  # fmt: skip
READERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda content, _: int(content, 16),
    "float": lambda content, _: float(content),
    "str": lambda content, _: str(content),
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, _: complex(*content),
    "list": lambda content, each: [each(item) for item in content],
    "tuple": lambda content, each: tuple(each(item) for item in content),
    "set": lambda content, each: {each(item) for item in content},
    "frozenset": lambda content, each: frozenset(each(item) for item in content),
    "deque": lambda content, each: collections.deque(each(item) for item in content),
    "range": lambda content, _: range(*content),
    "dict": lambda content, each: {each(key): each(item) for key, item in content},
    "Decimal": lambda content, _: decimal.Decimal(content),
    "Fraction": lambda content, _: fractions.Fraction(int(content[0], 16), int(content[1], 16)),
}


def is_changeable(value: Any) -> bool:
    return isinstance(value, (list, dict, set))


def change(argument: Any, to: Any) -> None:
    """Give a list, dictionary or set that a function changed in place its new content."""
    if not is_changeable(argument) or type(argument) is not type(to):
        raise Broken("not an argument that can change")
    argument.clear()
    argument.extend(to) if isinstance(argument, list) else argument.update(to)


def error_of(name: str, message: str) -> Exception:
    """Return the error of the program, as the built-in error that it is or derives from."""
    kind = getattr(builtins, str(name), None)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    try:
        return kind(message) if is_error else RuntimeError(f"{name}: {message}")  # type: ignore[misc]
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        return RuntimeError(f"{name}: {message}")


class Remote:
    """An object of the other process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES or (name.startswith("__") and name not in SPECIAL):
            raise AttributeError(f"{name} of a program's object is not asked for")
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.request("call", self, list(named), *arguments, *named.values())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Remote) and bool(self._peer.request("eq", self, other)))

    __hash__ = object.__hash__

    def __contains__(self, value: Any) -> bool:
        return any(item == value for item in self)

    def __iter__(self) -> Any:
        return self._peer.request("iter", self)

    def __next__(self) -> Any:
        return self._peer.request("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.request("setitem", self, key, value)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._peer.request("isinstance", value, self))

    def __bool__(self) -> bool:
        return bool(self._peer.request("bool", self))

    def __len__(self) -> int:
        return int(self._peer.request("len", self))

    def __str__(self) -> str:
        return str(self._peer.request("str", self))

    def __repr__(self) -> str:
        return str(self._peer.request("repr", self))


def _between_objects(name: str) -> Callable[[Remote, Any], Any]:
    def apply(self: Remote, other: Any) -> Any:
        return self._peer.request(name, self, other) if isinstance(other, Remote) else NotImplemented

    return apply


BINARY = ("lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "and", "or", "xor")
for _name in BINARY:
    setattr(Remote, f"__{_name}__", _between_objects(_name))


# The child: the program.


def call(function: Any, names: list[str], *values: Any) -> Any:
    count = len(values) - len(names)
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


def serve(program: str, names: dict[str, Any], incoming: int, outgoing: int) -> None:
    """Run the program in `names` and answer for its objects until the statement ends."""
    known = dict(names)
    names["__name__"] = "solution"
    operations = {name: getattr(operator, f"__{name}__") for name in ("eq", "getitem", "setitem", *BINARY)}
    answers = {
        **operations,
        "getattr": getattr, "setattr": setattr, "call": call, "iter": iter, "next": next, "isinstance": isinstance,
        "bool": bool, "len": len, "str": str, "repr": repr,
        "names": lambda: sorted(name for name in names if name not in known or names[name] is not known[name]),
        "named": lambda name: names[name],
    }  # fmt: skip
    peer = Peer(incoming, outgoing, answers)
    exec(compile(program, "program.py", "exec"), names)
    while True:
        peer.answer(*peer.receive())


# The parent: the statement.


def prelude() -> dict[str, Any]:
    """Return the names that programs and statements have without an import."""
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names


def used_names(tree: ast.AST, defined: set[str], python: set[str]) -> set[str]:
    """Return the names of `tree` that mean the program's objects.

    defined: names that the program defines. python: names that Python or the prelude defines, which have their own
    meaning in a statement unless it uses nothing else of the program.
    """
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    } & defined
    plain = used - python
    candidates = plain or used - COMPARING
    return candidates or (used if len(used) == 1 else set())


def imported(program: str) -> dict[str, Any]:
    """Return what the program imports under its own name, imported again: the program cannot have changed it."""
    names: dict[str, Any] = {}
    for node in ast.parse(program).body:
        with contextlib.suppress(ImportError, AttributeError):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = importlib.import_module(alias.name)
                    top = importlib.import_module(alias.name.partition(".")[0])
                    names[alias.asname or top.__name__] = module if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                module = importlib.import_module(node.module)
                names |= {alias.name: getattr(module, alias.name) for alias in node.names if alias.asname is None}
    return names


def test(statement: str, program: str, names: dict[str, Any], peer: Peer) -> bool:
    """Run the statement in `names`. Returns False if it asserts something without using the program."""
    tree = ast.parse(statement, "test.py")
    defined = {str(name) for name in peer.request("names")}
    python = {*names, *dir(builtins)}
    libraries = imported(program)
    chosen = used_names(tree, defined - libraries.keys(), python)
    names |= libraries | {name: peer.request("named", name) for name in sorted(chosen)}
    exec(compile(tree, "test.py", "exec"), names)
    peer.request("names")  # the program has not ended
    return bool(chosen) or not any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            raise Broken("the other process has ended")
        data += part
    return data


def main() -> None:
    digits = b""
    while not digits.endswith(b"\n"):
        digits += read_exactly(0, 1)
    program = read_exactly(0, int(digits)).decode()
    names = prelude()
    questions, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(2 if descriptor else null, descriptor)
        for descriptor in (null, questions[1], answers[0]):
            os.close(descriptor)
        with contextlib.suppress(Broken):
            serve(program, names, questions[0], answers[1])
        os._exit(0)
    os.close(questions[0])
    os.close(answers[1])
    statement = b""
    while part := os.read(0, 1 << 16):
        statement += part
    if test(statement.decode(), program, names, Peer(answers[0], questions[1], {"call": call})):
        sys.stdout.write("passed")


if __name__ == "__main__":
    main()
