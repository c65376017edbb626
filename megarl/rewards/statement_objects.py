"""Objects shared by the two processes of statement_runner.py: each process calls the other's objects over a pipe.

Runs in the sandbox.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from megarl.rewards.statement_values import (
    MAX_DEPTH,
    MAX_MESSAGE_BYTES,
    ProtocolError,
    builtin_base,
    builtin_of,
    change,
    decode,
    encode,
    error_of,
    is_changeable,
)

# Methods of plain values: an object that a function returned in place of a plain value is not asked for them.
PLAIN = frozenset(
    name for kind in (str, bytes, list, tuple, set, dict, int, float) for name in dir(kind) if name[0] != "_"
) | {"equals", "all", "any"}
SPECIAL = frozenset({"__name__", "__qualname__", "__doc__", "__dict__", "__module__", "__annotations__", "__wrapped__"})
OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "and", "or", "xor", "pow", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "invert", "abs")


class Peer:
    """One end of the pipe between the two processes, which call each other's objects.

    objects: what this process has shown to the other, by number. answers: the operations that the other may ask for.
    requests: their number.
    """

    def __init__(self, incoming: int, outgoing: int, answers: dict[str, Callable[..., Any]]):
        self.incoming, self.outgoing, self.answers = incoming, outgoing, answers
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Any] = {}
        self.requests = 0

    # Messages: a length in 8 bytes, then JSON.

    def send(self, *message: Any) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large")
        data = len(data).to_bytes(8, "big") + data
        while data:
            data = data[os.write(self.outgoing, data) :]

    def receive(self) -> tuple[str, list[Any]]:
        size = int.from_bytes(read_exactly(self.incoming, 8), "big")
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes")
        try:
            kind, *values = json.loads(read_exactly(self.incoming, size))
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError("not a message") from error
        return str(kind), values

    def request(self, operation: str, *values: Any) -> Any:
        """Return the result of an operation of the other process, and raise its error."""
        self.requests += 1
        self.send(operation, *map(self.encoded, values))
        while True:
            kind, content = self.receive()
            if kind == "result":
                return self.decoded(content[0])
            if kind == "changed":
                change(values[content[0]], self.decoded(content[1]))
            elif kind == "error":
                error = error_of(*map(self.decoded, content))
                if isinstance(error, StopIteration) and operation != "next":  # it would end a loop of the statement
                    raise RuntimeError("StopIteration")
                raise error
            else:
                self.answer(kind, content)

    def answer(self, operation: str, values: list[Any]) -> None:
        try:
            arguments = [self.decoded(value) for value in values]
            if operation not in self.answers:
                raise AttributeError(f"an object of the statement has no {operation}")
            result = self.encoded(self.answers[operation](*arguments))
            for number, (argument, before) in enumerate(zip(arguments, values, strict=True)):
                is_copy = is_changeable(argument) and before[0] != "yours"
                if is_copy and (after := self.encoded(argument)) != before:
                    self.send("changed", number, after)
            self.send("result", result)
        except ProtocolError:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the program's function ends, not its process
            try:
                content = [self.encoded(type(error)), self.encoded(list(error.args))]
            except (ValueError, RecursionError):
                content = [self.encoded(builtin_of(builtin_base(type(error)))), self.encoded([str(error)[:1000]])]
            self.send("error", *content)

    # Values.

    def encoded(self, value: Any, level: int = 0) -> Any:
        """Return `value` for JSON. An object that is not copied is kept and gets a number."""
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and abs(value) < 1 << 62):
            return value
        if level > MAX_DEPTH:
            raise ValueError("a value is nested too deeply")
        if (remote := remote_behind(value)) is not None:
            return ["yours", remote._number]
        if (content := encode(value, lambda item: self.encoded(item, level + 1))) is not None:
            return content
        base: Any
        for base in (int, float, str, bytes, tuple, frozenset):
            if isinstance(value, base):  # a subclass, such as a named tuple: its plain value, and where to ask for more
                return ["shadow", [self.encoded(base.__new__(base, value), level + 1), self.number_of(value)]]
        if isinstance(value, type) and issubclass(value, Exception):
            return ["error class", [builtin_base(value), value.__name__, self.number_of(value)]]
        return ["mine", self.number_of(value)]

    def number_of(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # keeps it alive, so that its id stays its own
        return self.numbers[id(value)]

    def decoded(self, data: Any, level: int = 0) -> Any:
        """Return the value of `data`. Raises ProtocolError if it is none."""
        if not isinstance(data, list):
            return data
        try:
            kind, content = data
            if level > MAX_DEPTH + 2:
                raise ValueError("nested too deeply")
            if kind == "mine":
                return self.remote(int(content))
            if kind == "yours":
                return self.objects[int(content)]
            if kind == "shadow":
                return shadow(self.decoded(content[0], level + 1), self.remote(int(content[1])))
            if kind == "error class":
                base, name, number = content
                stand_in = type(str(name), (builtin_of(base),), {"_remote": self.remote(int(number))})
                return self.remotes.setdefault(-1 - int(number), stand_in)
            return decode(kind, content, lambda item: self.decoded(item, level + 1))
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ProtocolError("not a value") from error

    def remote(self, number: int) -> Remote:
        return self.remotes.setdefault(number, Remote(self, number))


def remote_behind(value: Any) -> Remote | None:
    """Return the object of the other process that `value` is or stands for; None if it stands for none."""
    if isinstance(value, Remote):
        return value
    stand_in = value if isinstance(value, type) else type(value)
    return stand_in.__dict__.get("_remote")


def shadow(plain: Any, remote: Remote) -> Any:
    """Return `plain` as an object of a subclass; `remote` provides its further attributes."""
    members = {"_remote": remote, "__getattr__": lambda self, name: getattr(remote, name)}
    return type(type(plain).__name__, (type(plain),), members)(plain)


class Remote:
    """An object of the other process.

    _free: the statement made it with a class of the program, so that methods and operators may take plain values.
    """

    __slots__ = ("_free", "_number", "_peer")

    def __init__(self, peer: Peer, number: int):
        for name, value in (("_peer", peer), ("_number", number), ("_free", False)):
            object.__setattr__(self, name, value)

    def _ask(self, operation: str, *values: Any) -> Any:
        result = self._peer.request(operation, self, *values)
        if self._free and isinstance(result, Remote):
            object.__setattr__(result, "_free", True)
        return result

    def __getattr__(self, name: str) -> Any:
        if (name in PLAIN and not self._free) or (name.startswith("__") and name not in SPECIAL):
            raise AttributeError(f"{name} of a program's object is not asked for")
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", list(named), *arguments, *named.values())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Remote) and bool(self._ask("eq", other)))

    def __hash__(self) -> int:
        return int(self._ask("hash")) if self._free else id(self)

    def __contains__(self, value: Any) -> bool:
        return bool(self._ask("contains", value)) if self._free else any(item == value for item in self)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __reversed__(self) -> Any:
        return self._ask("reversed")

    def __next__(self) -> Any:
        return self._ask("next")

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delitem", key)

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return bool(self._ask("exit", kind, None if error is None else list(error.args)))

    def __instancecheck__(self, value: Any) -> bool:
        remote = None if isinstance(value, type) else remote_behind(value)
        return remote is not None and bool(self._peer.request("isinstance", remote, self))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))


def _operator(name: str, *, compares: bool = False, reflected: bool = False) -> Callable[[Remote, Any], Any]:
    """Return an operator. Against a plain value it exists for `_free` objects, and its result must be an object again."""

    def apply(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._ask(name, other)
        if compares or not self._free:
            return NotImplemented
        result = self._ask(f"r{name}" if reflected else name, other)
        return result if isinstance(result, Remote) else NotImplemented

    return apply


for _name in OPERATORS:
    setattr(Remote, f"__{_name}__", _operator(_name))
    setattr(Remote, f"__r{_name}__", _operator(_name, reflected=True))
for _name in COMPARISONS:
    setattr(Remote, f"__{_name}__", _operator(_name, compares=True))
for _name in UNARY:
    setattr(Remote, f"__{_name}__", lambda self, _name=_name: self._ask(_name))


def read_exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            raise ProtocolError("the other process has ended")
        data += part
    return bytes(data)
