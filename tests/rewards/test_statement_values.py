"""Values of every kind that are copied between a program and the statement that tests it."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from megarl.rewards.code import STATEMENT_SCRIPT
from megarl.rewards.statement_objects import Peer
from megarl.rewards.statement_values import ProtocolError, change, decode, error_of, is_changeable


def sent(value: Any) -> Any:
    """Return the message of a value: what one process writes to the pipe."""
    return json.loads(json.dumps(Peer(-1, -1, {}).encoded(value)))


def copied(value: Any) -> Any:
    return Peer(-1, -1, {}).decoded(sent(value))


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1, -2], [3, 2**62]]),
        np.array([1.5, np.inf]),
        np.array([True, False]),
        np.array([1 + 2j, -1j]),
        np.array([b"a", b"\xff\x00b"]),
        np.array(["a", "ä\x00b"]),
        np.array(2.5),
        np.zeros((0, 3), np.float32),
    ],
    ids=lambda array: f"{array.dtype}-{array.ndim}",
)
def test_arrays_are_copied(array: np.ndarray) -> None:
    copy = copied(array)
    assert type(copy) is np.ndarray and (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert (copy == array).all()


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((1, 2)).view(np.matrix),
        np.rec.array([(1, 2)], dtype=[("a", int), ("b", int)]),
        np.array([{}, 1], object),
        np.array(["2024-01-01"], "M8[D]"),
        np.longdouble("1.5"),
        np.array(["1.5"], np.longdouble),
        np.ma.array([1, 2], mask=[True, False]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_of_numpy_stay_in_their_process(value: Any) -> None:
    assert sent(value)[0] == "mine"


def test_scalars_of_numpy_become_values_of_python() -> None:
    scalars = [np.int64(2**62), np.float32(1.5), np.bool_(True), np.complex64(1j), np.str_("a"), np.bytes_(b"a")]
    for scalar in scalars:
        copy = copied(scalar)
        assert copy == scalar and type(copy) is type(scalar.item())


def test_a_deque_keeps_its_limit() -> None:
    for value in (collections.deque([1, 2], 3), collections.deque([1])):
        copy = copied(value)
        assert copy == value and copy.maxlen == value.maxlen


def test_a_default_dictionary_is_copied_with_any_factory() -> None:
    for factory in (int, None):
        copy = copied(collections.defaultdict(factory, a=1))
        assert copy == {"a": 1} and type(copy) is collections.defaultdict and copy.default_factory is factory
    kind, content = sent(collections.defaultdict(lambda: 0, a=1))
    assert kind == "defaultdict" and content == [["mine", 0], [["a", 1]]]


@pytest.mark.parametrize(
    ("argument", "to"),
    [
        ([1, 2], [3]),
        ({"a": 1}, {"b": 2}),
        ({1}, {2}),
        (collections.deque([1]), collections.deque([2, 3])),
        (bytearray(b"ab"), bytearray(b"c")),
        (np.zeros(2), np.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changes_in_place_are_copied_back(argument: Any, to: Any) -> None:
    assert is_changeable(argument)
    change(argument, to)
    assert np.array_equal(argument, to) if isinstance(to, np.ndarray) else argument == to


@pytest.mark.parametrize(
    ("argument", "to"),
    [((1,), (2,)), ([1], {1}), (np.zeros(2), np.zeros(1)), (np.zeros(2), np.zeros(2, int)), (np.zeros(2), [1.0, 1.0])],
)
def test_changes_that_no_function_makes_end_the_statement(argument: Any, to: Any) -> None:
    with pytest.raises(ProtocolError):
        change(argument, to)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("builtin", "nosuch"),
        ("builtin", "print"),
        ("nosuch", []),
        ("ndarray", ["O", [1], [None]]),
        ("ndarray", ["f8", [2], [1.0]]),
        ("deque", ["many", [1]]),
        ("defaultdict", [3, []]),
        ("bytearray", "x"),
    ],
)
def test_content_of_another_form_is_refused(kind: str, content: Any) -> None:
    with pytest.raises((LookupError, ValueError, TypeError, ArithmeticError)):
        decode(kind, content, lambda item: item)


def test_errors_that_cannot_be_rebuilt_are_runtime_errors() -> None:
    assert repr(error_of(KeyError, ["a"])) == "KeyError('a')"

    class Numbered(Exception):
        def __init__(self, number: str) -> None:
            super().__init__(int(number))

    for kind, arguments in ((UnicodeDecodeError, ["x"]), (Numbered, ["x"]), (SystemExit, [0])):
        assert type(error_of(kind, arguments)) is RuntimeError


ARRAY = "import numpy as np\n"
RIGHT = {
    "a bytearray that changes": ("def f(b): b[0] = 65", "b = bytearray(b'x')\nf(b)\nassert b == b'A'"),
    "a longer bytearray": ("def f(b): b += b'yz'", "b = bytearray(b'x')\nf(b)\nassert b == b'xyz'"),
    "an array that changes": (f"{ARRAY}def f(a): a += 1", f"{ARRAY}a = np.zeros(3)\nf(a[1:])\nassert a.tolist() == [0, 1, 1]"),
    "a dictionary with a function": ("def f(): return defaultdict(lambda: 7, {'a': 1})", "d = f()\nassert d == {'a': 1} and d['b'] == 7"),
    "a dictionary with the statement's function": ("def f(d): d['c'] = d['b'] + 1", "d = defaultdict(lambda: 7, {'a': 1})\nf(d)\nassert d == {'a': 1, 'b': 7, 'c': 8}"),
    "a deque with a limit": ("def f(q): q.append(3); return q", "q = deque([1, 2], 2)\nassert f(q).maxlen == 2 and list(q) == [2, 3]"),
    "complex numbers": (f"{ARRAY}def f(a): return np.sqrt(a)", f"{ARRAY}assert f(np.array([-4 + 0j])).tolist() == [2j]"),
}  # fmt: skip
if sys.version_info >= (3, 11):
    GROUP = "def f(): raise ExceptionGroup('m', [ValueError(1)])"
    RIGHT["a group of errors"] = (GROUP, "try:\n    f()\nexcept RuntimeError:\n    pass\nelse:\n    assert False")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_a_statement(name: str) -> None:
    program, statement = RIGHT[name]
    text = f"{len(program)}\n{program}{statement}".encode()
    done = subprocess.run([sys.executable, "-c", STATEMENT_SCRIPT], input=text, capture_output=True, timeout=300)
    assert done.stdout == b"passed", done.stderr.decode()
