"""Conditions of bash: [ ... ], test and [[ ... ]]. A test of a file is unknown: only the machine of the run has it."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable

from megarl.commands.convert_verl.shell.arithmetic import compute, integer
from megarl.commands.convert_verl.shell.syntax import Node
from megarl.commands.convert_verl.shell.values import Status, Undetermined
from megarl.commands.convert_verl.shell.words import Words

_INTEGERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_TEXTS: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


def bracket(words: list[Node], shell: Words, line: int, source: str) -> Status:
    """Return the result of `[ words ]` or `test words`."""
    return _status(lambda: _bracket(words, shell, line, source), shell)


def double_bracket(expression: Node, shell: Words, line: int) -> Status:
    """Return the result of `[[ expression ]]`."""
    return _status(lambda: _expression(expression, shell, line), shell)


def _status(test: Callable[[], bool], shell: Words) -> Status:
    shell.testing = True
    try:
        with shell.deciding():
            return test()
    except Undetermined as error:
        return error
    finally:
        shell.testing = False


def _bracket(words: list[Node], shell: Words, line: int, source: str) -> bool:
    plain = [word["Source"] for word in words]
    for symbol, combine in (("-o", any), ("-a", all)):
        if symbol in plain[1:-1]:
            at = plain.index(symbol)
            return combine(_bracket(part, shell, line, source) for part in (words[:at], words[at + 1 :]))
    if plain[:1] == ["!"] and len(words) > 1:
        return not _bracket(words[1:], shell, line, source)
    if len(words) == 2 and plain[0].startswith("-"):
        return _unary(plain[0], words[1], shell, line, source)
    fields = [field for word in words for field in shell.fields(word)]
    if len(fields) == 3:
        return _binary(fields[1], fields[0], fields[2], line, source)
    if len(fields) <= 1:
        return fields not in ([], [""])
    raise _unsupported(line, source)


def _unary(symbol: str, word: Node, shell: Words, line: int, source: str) -> bool:
    if symbol in ("-z", "-n"):
        return (_emptiable(word, shell) == "") == (symbol == "-z")
    if symbol == "-v":
        return shell.is_set(shell.text(word))
    raise Undetermined(f"line {line}: {source} depends on the machine of the run", of_file=True)


def _emptiable(word: Node, shell: Words) -> str:
    """Expand a word. A variable that is the whole word and is not set is empty."""
    parts = word.get("Parts", [])
    inner = parts[0].get("Parts", []) if len(parts) == 1 and parts[0]["Type"] == "DblQuoted" else parts
    if len(inner) == 1 and inner[0]["Type"] == "ParamExp":
        shell.lenient = inner[0]["Param"]["Value"]
    try:
        return shell.text(word)
    finally:
        shell.lenient = ""


def _binary(symbol: str, left: str, right: str, line: int, source: str) -> bool:
    if symbol in _TEXTS:
        return _TEXTS[symbol](left, right)
    numbers = integer(left.strip()), integer(right.strip())
    if symbol in _INTEGERS and numbers[0] is not None and numbers[1] is not None:
        return _INTEGERS[symbol](numbers[0], numbers[1])
    raise _unsupported(line, source)


def _expression(node: Node, shell: Words, line: int) -> bool:
    kind = node["Type"]
    if kind == "Word":
        return _emptiable(node, shell) != ""
    if kind == "ParenTest":
        return _expression(node["X"], shell, line)
    symbol = node["Op"]
    if kind == "UnaryTest":
        if symbol == "!":
            return not _expression(node["X"], shell, line)
        return _unary(symbol, node["X"], shell, line, node["Source"])
    left, right = node["X"], node["Y"]
    if symbol in ("&&", "||"):
        return _joined(left, right, shell, line, decisive=symbol == "||")
    if symbol in ("=", "==", "!="):
        return fnmatch.fnmatchcase(shell.text(left), shell.pattern(right)) == (symbol != "!=")
    if symbol == "=~":
        return _matches(node, shell, line)
    if symbol in _INTEGERS:
        return _INTEGERS[symbol](*(compute(side, shell, line, node["Source"]) for side in (left, right)))
    return _binary(symbol, shell.text(left), shell.text(right), line, node["Source"])


def _joined(left: Node, right: Node, shell: Words, line: int, *, decisive: bool) -> bool:
    """Return the result of two tests. One with the result `decisive` decides, even if the other is unknown.

    decisive: False for && and True for ||.
    """
    try:
        if _expression(left, shell, line) == decisive:
            return decisive
    except Undetermined:
        if _expression(right, shell, line) != decisive:
            raise
        return decisive
    return _expression(right, shell, line)


def _matches(node: Node, shell: Words, line: int) -> bool:
    text, pattern = shell.text(node["X"]), node["Y"]["Source"]
    if not re.fullmatch(r"[\w^$.+*?/|()\[\]-]+", pattern) or "$" in pattern[:-1]:
        raise _unsupported(line, node["Source"])
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise _unsupported(line, node["Source"]) from error


def _unsupported(line: int, source: str) -> Undetermined:
    return Undetermined(f"line {line}: the test {source} is not supported")
