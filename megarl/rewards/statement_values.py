"""Plain values as JSON, for the pipe between the two processes of statement_runner.py.

Text, small numbers, true, false and null stand for themselves; any other value is [kind, content]. Runs in the sandbox.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
from collections.abc import Callable
from typing import Any

LARGEST = 1 << 25  # bytes of a message
DEEPEST = 128  # levels of a value


class Broken(BaseException):
    """The other process ended, or its message is not one of the protocol. No `except Exception` of a statement stops it."""


Each = Callable[[Any], Any]


def _items(value: Any, each: Each) -> list[Any]:
    return [each(item) for item in value]


def _pairs(value: Any, each: Each) -> list[Any]:
    return [[each(key), each(item)] for key, item in value.items()]


def _factory(value: collections.defaultdict[Any, Any], each: Each) -> list[Any]:
    return [builtin_name(value.default_factory), _pairs(value, each)]


def _array(value: Any, each: Each) -> list[Any]:
    return [str(value.dtype), list(value.shape), value.ravel().tolist()]


def _read_array(content: Any, each: Each) -> Any:
    import numpy

    if numpy.dtype(content[0]).kind not in "biufcUS":
        raise ValueError("an array of objects")
    return numpy.array(content[2], dtype=content[0]).reshape(content[1])


def _dictionary(content: Any, each: Each) -> dict[Any, Any]:
    return {each(key): each(item) for key, item in content}


def _default_dictionary(content: Any, each: Each) -> Any:
    factory = None if content[0] is None else builtin_of(content[0])
    return collections.defaultdict(factory, _dictionary(content[1], each))


# Values of exactly these types are copied.
_FIELDS = {
    datetime.date: ("year", "month", "day"),
    datetime.datetime: ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    datetime.time: ("hour", "minute", "second", "microsecond"),
    datetime.timedelta: ("days", "seconds", "microseconds"),
    range: ("start", "stop", "step"),
    slice: ("start", "stop", "step"),
    complex: ("real", "imag"),
    fractions.Fraction: ("numerator", "denominator"),
}
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_TEXTS = (bytes, bytearray)


def write(value: Any, each: Each) -> list[Any] | None:
    """Return [kind, content] of a value that is copied, None for another. `each` encodes what the value contains."""
    kind = type(value)
    if kind is int:
        return ["int", hex(value)]
    if kind in _SEQUENCES:
        return [kind.__name__, _items(value, each)]
    if kind in _MAPPINGS:
        return [kind.__name__, _pairs(value, each)]
    if kind in _FIELDS and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, [each(getattr(value, name)) for name in _FIELDS[kind]]]
    if kind in _TEXTS:
        return [kind.__name__, value.hex()]
    if kind is collections.defaultdict and (value.default_factory is None or builtin_name(value.default_factory)):
        return ["defaultdict", _factory(value, each)]
    if kind is decimal.Decimal:
        return ["Decimal", str(value)]
    if kind in (type({}.keys()), type({}.values()), type({}.items())):
        return [kind.__name__, _items(value, each)]
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return ["ndarray", _array(value, each)] if kind.__name__ == "ndarray" else _scalar(value, each)
    if (name := builtin_name(value)) is not None:
        return ["builtin", name]
    return None


def _scalar(value: Any, each: Each) -> Any:
    return ["scalar", each(value.item())]


def read(kind: str, content: Any, each: Each) -> Any:
    """Return the value of [kind, content]. Raises LookupError, ValueError, TypeError or ArithmeticError if it is none."""
    return _readers()[kind](content, each)


@functools.cache
def _readers() -> dict[str, Callable[[Any, Each], Any]]:
    def made(kind: Any) -> Callable[[Any, Each], Any]:
        return lambda content, each: kind(each(item) for item in content)

    def of_fields(kind: Any) -> Callable[[Any, Each], Any]:
        return lambda content, each: kind(*map(each, content))

    def of_pairs(kind: Any) -> Callable[[Any, Each], Any]:
        return lambda content, each: kind(_dictionary(content, each))

    def of_hex(kind: Any) -> Callable[[Any, Each], Any]:
        return lambda content, _: kind.fromhex(content)

    return {
        **{kind.__name__: made(kind) for kind in _SEQUENCES},
        **{kind.__name__: of_fields(kind) for kind in _FIELDS},
        **{kind.__name__: of_pairs(kind) for kind in _MAPPINGS},
        **{kind.__name__: of_hex(kind) for kind in _TEXTS},
        "int": lambda content, _: int(content, 16),
        "defaultdict": _default_dictionary,
        "Decimal": lambda content, _: decimal.Decimal(content),
        "dict_keys": lambda content, each: dict.fromkeys(map(each, content)).keys(),
        "dict_values": lambda content, each: dict(enumerate(map(each, content))).values(),
        "dict_items": lambda content, each: dict(map(each, content)).items(),
        "ndarray": _read_array,
        "scalar": lambda content, each: each(content),
        "builtin": lambda content, _: builtin_of(content),
    }


def builtin_name(value: Any) -> str | None:
    """Return the name of a class of Python, such as int or ValueError; None for another value."""
    is_builtin = isinstance(value, type) and getattr(builtins, value.__name__, None) is value
    return value.__name__ if is_builtin else None


def builtin_of(name: Any) -> type:
    kind = getattr(builtins, str(name))
    if not isinstance(kind, type):
        raise ValueError(f"{name} is not a class")
    return kind


def is_changeable(value: Any) -> bool:
    return isinstance(value, (list, dict, set, collections.deque))


def change(argument: Any, to: Any) -> None:
    """Give a list, dictionary or set that a function changed in place its new content."""
    if not is_changeable(argument) or type(argument) is not type(to):
        raise Broken("not an argument that can change")
    argument.clear()
    argument.update(to) if isinstance(argument, (dict, set)) else argument.extend(to)


def builtin_base(kind: type) -> str:
    """Return the name of the first class of Python among a class and its bases."""
    return next(base.__name__ for base in kind.__mro__ if builtin_name(base))


def error_of(kind: Any, arguments: list[Any]) -> Exception:
    """Return an error of the class `kind`; RuntimeError if it is none that a statement should meet, such as SystemExit."""
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # such as UnicodeDecodeError, which takes five arguments
            return kind(*arguments)
    return RuntimeError(f"{getattr(kind, '__name__', kind)}: {arguments}")
