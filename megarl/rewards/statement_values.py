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
import sys
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 1 << 25
MAX_DEPTH = 128  # levels of a value


class ProtocolError(BaseException):
    """The other process ended, or its message is not one of the protocol. No `except Exception` of a statement stops it."""


Codec = Callable[[Any], Any]
"""Encodes, or decodes, a value that another value contains."""


def _items(value: Any, each: Codec) -> list[Any]:
    return [each(item) for item in value]


def _pairs(value: Any, each: Codec) -> list[Any]:
    return [[each(key), each(item)] for key, item in value.items()]


def _dictionary(content: Any, each: Codec) -> dict[Any, Any]:
    return {each(key): each(item) for key, item in content}


def _default_dictionary(content: Any, each: Codec) -> Any:
    return collections.defaultdict(each(content[0]), _dictionary(content[1], each))


def _array(value: Any, each: Codec) -> list[Any] | None:
    """Return the content of an array; None for elements that are not copied, such as objects."""
    if value.dtype.kind not in _ARRAY_KINDS or value.dtype.char in "gG":  # Python has no long doubles
        return None
    items = value.ravel().tolist()
    return [str(value.dtype), list(value.shape), items if value.dtype.kind in _PLAIN_KINDS else _items(items, each)]


def _decoded_array(content: Any, each: Codec) -> Any:
    import numpy

    kind = numpy.dtype(content[0]).kind
    if kind not in _ARRAY_KINDS:
        raise ValueError("an array of objects")
    items = content[2] if kind in _PLAIN_KINDS else [each(item) for item in content[2]]
    return numpy.array(items, dtype=content[0]).reshape(content[1])


_PLAIN_KINDS = "biufU"  # of numpy's dtypes: their elements stand for themselves in JSON
_ARRAY_KINDS = f"{_PLAIN_KINDS}cS"

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
_SEQUENCES = (list, tuple, set, frozenset)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_TEXTS = (bytes, bytearray)


def encode(value: Any, each: Codec) -> Any:
    """Return [kind, content] of a value that is copied, None for another. `each` encodes what the value contains.

    A scalar of numpy is encoded as its value in Python.
    """
    kind = type(value)
    if kind is int:
        # Only integers of 62 bits and more come here; hex has no limit of digits (sys.set_int_max_str_digits).
        return ["int", hex(value)]
    if kind in _SEQUENCES:
        return [kind.__name__, _items(value, each)]
    if kind is collections.deque:
        return ["deque", [value.maxlen, _items(value, each)]]
    if kind in _MAPPINGS:
        return [kind.__name__, _pairs(value, each)]
    if kind in _FIELDS and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, [each(getattr(value, name)) for name in _FIELDS[kind]]]
    if kind in _TEXTS:
        return [kind.__name__, value.hex()]
    if kind is collections.defaultdict:
        return ["defaultdict", [each(value.default_factory), _pairs(value, each)]]
    if kind is decimal.Decimal:
        return ["Decimal", str(value)]
    if kind in (type({}.keys()), type({}.values()), type({}.items())):
        return [kind.__name__, _items(value, each)]
    if _is_array(value):
        return None if (content := _array(value, each)) is None else ["ndarray", content]
    if isinstance(value, _numpy_class("generic")):
        item = value.item()
        return None if type(item) is kind else each(item)  # a long double's item is itself
    if (name := builtin_name(value)) is not None:
        return ["builtin", name]
    return None


def _numpy_class(name: str) -> Any:
    """Return a class of numpy for `isinstance`; an empty tuple, of which nothing is an instance, if numpy is not imported."""
    return getattr(sys.modules.get("numpy"), name, ())


def _is_array(value: Any) -> bool:
    return type(value) is _numpy_class("ndarray")


def decode(kind: str, content: Any, each: Codec) -> Any:
    """Return the value of [kind, content]. Raises LookupError, ValueError, TypeError or ArithmeticError if it is none."""
    return _decoders()[kind](content, each)


@functools.cache
def _decoders() -> dict[str, Callable[[Any, Codec], Any]]:
    def from_items(kind: Any) -> Callable[[Any, Codec], Any]:
        return lambda content, each: kind(each(item) for item in content)

    def of_fields(kind: Any) -> Callable[[Any, Codec], Any]:
        return lambda content, each: kind(*map(each, content))

    def of_pairs(kind: Any) -> Callable[[Any, Codec], Any]:
        return lambda content, each: kind(_dictionary(content, each))

    def of_hex(kind: Any) -> Callable[[Any, Codec], Any]:
        return lambda content, _: kind.fromhex(content)

    return {
        **{kind.__name__: from_items(kind) for kind in _SEQUENCES},
        **{kind.__name__: of_fields(kind) for kind in _FIELDS},
        **{kind.__name__: of_pairs(kind) for kind in _MAPPINGS},
        **{kind.__name__: of_hex(kind) for kind in _TEXTS},
        "int": lambda content, _: int(content, 16),
        "deque": lambda content, each: collections.deque(map(each, content[1]), content[0]),
        "defaultdict": _default_dictionary,
        "Decimal": lambda content, _: decimal.Decimal(content),
        "dict_keys": lambda content, each: dict.fromkeys(map(each, content)).keys(),
        "dict_values": lambda content, each: dict(enumerate(map(each, content))).values(),
        "dict_items": lambda content, each: dict(map(each, content)).items(),
        "ndarray": _decoded_array,
        "builtin": lambda content, _: builtin_of(content),
    }


def builtin_name(value: Any) -> str | None:
    """Return the name of a built-in class, such as int or ValueError; None for another value."""
    is_builtin = isinstance(value, type) and getattr(builtins, value.__name__, None) is value
    return value.__name__ if is_builtin else None


def builtin_of(name: Any) -> type:
    """Return the built-in class of this name. Raises ValueError if there is none."""
    kind = getattr(builtins, str(name), None)
    if not isinstance(kind, type):
        raise ValueError(f"{name} is not a class")
    return kind


def is_changeable(value: Any) -> bool:
    """Return whether a function can change the value in place, and the value is copied."""
    return isinstance(value, (list, dict, set, collections.deque, bytearray)) or _is_array(value)


def change(argument: Any, to: Any) -> None:
    """Give an argument that a function changed in place its new content: see `is_changeable`.

    Raises ProtocolError for another argument, content of another type, and an array of another shape or dtype.
    """
    if not is_changeable(argument) or type(argument) is not type(to):
        raise ProtocolError("not an argument that can change")
    if _is_array(argument):
        if (argument.shape, argument.dtype) != (to.shape, to.dtype):
            raise ProtocolError("an array of another shape or dtype")
        argument[...] = to
        return
    argument.clear()
    argument.update(to) if isinstance(argument, (dict, set)) else argument.extend(to)


def builtin_base(kind: type) -> str:
    """Return the name of the first built-in class among a class and its bases."""
    return next(base.__name__ for base in kind.__mro__ if builtin_name(base))


def error_of(kind: Any, arguments: list[Any]) -> Exception:
    """Return an error of the class `kind`; RuntimeError if it is none that a statement should meet, such as SystemExit,
    or cannot be made of copied arguments, such as ExceptionGroup."""
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError, ValueError):  # such as UnicodeDecodeError, which takes five arguments
            return kind(*arguments)
    return RuntimeError(f"{getattr(kind, '__name__', kind)}: {arguments}")
