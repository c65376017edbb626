"""Integer arithmetic of bash: $((...)), ((...)) and the numbers in tests."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.commands.convert_verl.shell.syntax import Node, literal
from megarl.commands.convert_verl.shell.values import Undetermined

if TYPE_CHECKING:
    from megarl.commands.convert_verl.shell.words import Words

_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


def _divide(left: int, right: int) -> int:
    """Divide as C does: round towards 0."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor, "/": _divide,
    "%": lambda left, right: left - _divide(left, right) * right, ",": lambda left, right: right,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def integer(text: str) -> int | None:
    """Read an integer as bash does: 0x is hexadecimal, a leading 0 is octal. None: no integer."""
    if not _NUMBER.fullmatch(text):
        return None
    sign, digits = (-1 if text.startswith("-") else 1), text.lstrip("+-")
    if digits[:2] in ("0x", "0X"):
        return sign * int(digits, 16)
    if digits.startswith("0") and len(digits) > 1:
        return sign * int(digits, 8) if re.fullmatch("[0-7]+", digits) else None
    return sign * int(digits)


def compute(expression: Node, shell: Words, line: int, source: str) -> int:
    """Return the value of an arithmetic expression. `source`: its text with brackets, for errors.

    Raises Undetermined for a variable without an integer and for operators that are not supported.
    """
    with shell.deciding():
        return _Expression(shell, line, source).value(expression)


def bounds(part: Node, shell: Words, node: Node) -> tuple[int, int | None]:
    """Return start and length of ${NAME:start:length}, of which `part` has the expressions; None: without a length."""
    start, length = (
        compute(part[key], shell, node["Line"], node["Source"]) if part.get(key) else None
        for key in ("Offset", "Length")
    )
    return start or 0, length


class _Expression:
    def __init__(self, shell: Words, line: int, source: str):
        self.shell, self.line, self.source = shell, line, source

    def value(self, node: Node) -> int:
        kind = node["Type"]
        if kind == "Word":
            text = self.shell.text(node).strip()
            if (number := integer(text)) is not None:
                return number
            if _NAME.fullmatch(text):
                return self.shell.number_of(text, self.line, self.source)
        elif kind == "ParenArithm":
            return self.value(node["X"])
        elif kind == "BinaryArithm":
            return self._binary(node)
        elif kind == "UnaryArithm":
            return self._unary(node)
        raise self._unsupported()

    def _binary(self, node: Node) -> int:
        symbol, left, right = node["Op"], node["X"], node["Y"]
        if symbol == "=":
            return self._assign(left, self.value(right))
        if symbol in ("&&", "||"):
            decided = bool(self.value(left)) == (symbol == "||")
            return int(symbol == "||") if decided else int(bool(self.value(right)))
        if symbol not in _BINARY and symbol.endswith("=") and symbol[:-1] in _BINARY:
            return self._assign(left, self._apply(symbol[:-1], self.value(left), self.value(right)))
        if symbol not in _BINARY:
            raise self._unsupported()
        return self._apply(symbol, self.value(left), self.value(right))

    def _unary(self, node: Node) -> int:
        symbol, operand = node["Op"], node["X"]
        value = self.value(operand)
        if symbol in ("++", "--"):
            after = self._assign(operand, value + (1 if symbol == "++" else -1))
            return value if node.get("Post") else after
        results = {"-": -value, "+": value, "!": int(not value), "~": ~value}
        if symbol not in results:
            raise self._unsupported()
        return results[symbol]

    def _apply(self, symbol: str, left: int, right: int) -> int:
        if (symbol in "/%" and not right) or (symbol in ("**", "<<", ">>") and not 0 <= right < 64):
            raise self._unsupported()
        result = int(_BINARY[symbol](left, right))
        if abs(result) >= 1 << 63:
            raise self._unsupported()
        return result

    def _assign(self, node: Node, value: int) -> int:
        name = literal(node) if node["Type"] == "Word" else None
        if not name or not _NAME.fullmatch(name):
            raise self._unsupported()
        self.shell.set_text(name, str(value), self.line)
        return value

    def _unsupported(self) -> Undetermined:
        return Undetermined(f"line {self.line}: the arithmetic {self.source} is not supported")
