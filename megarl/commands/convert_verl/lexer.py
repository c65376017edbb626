"""A shell script taken apart into words and operators, without running it. Pure.

Known: comments, continuation lines, quotes, $NAME, ${NAME}, ${NAME:-default} and its like, "${ARRAY[@]}", $((arithmetic)),
NAME=(array). Anything else becomes a `Piece` of kind "unknown", which is an error where its value is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from megarl.errors import InputError

_OPERATORS = (
    "&&",
    "||",
    ";;",
    "|&",
    "&>>",
    "&>",
    ">>",
    "<<<",
    "<<",
    ">&",
    "<&",
    ">|",
    "|",
    "&",
    ";",
    "<",
    ">",
    "(",
    ")",
)
_PARAMETER = re.compile(r"\$(?:([A-Za-z_]\w*)|([0-9@*#?$!-]))")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*#])(?:\[([@*])\])?(?:(:?[-=+])(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A part of a word. `text`: the characters, the parameter's name, the arithmetic, or what is not known.

    operator, argument: of ${NAME:-argument}. quoted: it is never split at its blanks.
    """

    kind: Literal["text", "parameter", "array", "arithmetic", "unknown"]
    text: str
    quoted: bool
    operator: str = ""
    argument: str = ""


@dataclass
class Word:
    """What stands between blanks. `array`: the words of NAME=(...), whose NAME= the pieces are."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def plain(self) -> str | None:
        """Its characters where it has nothing but unquoted ones."""
        return None if any(p.kind != "text" or p.quoted for p in self.pieces) else "".join(p.text for p in self.pieces)


@dataclass(frozen=True)
class Operator:
    line: int
    text: str


class Reader:
    """Reads tokens off `text`, from `line` on."""

    def __init__(self, text: str, line: int = 1):
        self.text, self.at, self.line = text, 0, line

    def tokens(self) -> list[Word | Operator]:
        """All of them; a line's end is the operator "\\n". Raises InputError for a quote that is not closed."""
        found: list[Word | Operator] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self._next() == "\n":
                self._skip(2)
            elif char in " \t\r":
                self._skip(1)
            elif char == "#":
                self._skip_comment()
            elif char == "\n":
                found.append(Operator(self.line, "\n"))
                self._skip(1)
            elif operator := next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None):
                if operator == "<<":
                    raise InputError(
                        f"line {self.line}: a here-document (<<) cannot be read; take the command out of it"
                    )
                found.append(Operator(self.line, operator))
                self._skip(len(operator))
            else:
                found.append(self._word())
        return found

    def _next(self) -> str:
        return self.text[self.at + 1 : self.at + 2]

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self._skip((len(self.text) if end < 0 else end) - self.at)

    def _word(self) -> Word:
        word = Word(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "(" and word.plain and word.plain.endswith("="):
                word.array = self._array()
            elif char == "\\":
                if self._next() != "\n":
                    word.pieces.append(Piece("text", self._next(), True))
                self._skip(2)
            elif char == "'":
                word.pieces.append(Piece("text", self._until("'"), True))
            elif char == '"':
                word.pieces += self._double_quoted()
            elif char == "$" or char == "`":
                word.pieces.append(self._expansion(quoted=False))
            elif char in " \t\r\n" or any(self.text.startswith(one, self.at) for one in _OPERATORS):
                break
            else:
                word.pieces.append(Piece("text", char, False))
                self._skip(1)
        return word

    def _array(self) -> list[Word]:
        start, depth, end = self.line, 0, self.at
        for token_end in range(self.at, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[token_end], 0)
            if depth == 0:
                end = token_end
                break
        else:
            raise InputError(f"line {start}: the array's ( is not closed")
        inner = Reader(self.text[self.at + 1 : end], self.line).tokens()
        self._skip(end + 1 - self.at)
        return [token for token in inner if isinstance(token, Word)]

    def _until(self, closing: str) -> str:
        """What stands up to `closing`, behind the character at hand; both are read."""
        end = self.text.find(closing, self.at + 1)
        if end < 0:
            raise InputError(f"line {self.line}: {closing} is opened and not closed")
        inner = self.text[self.at + 1 : end]
        self._skip(end + 1 - self.at)
        return inner

    def _double_quoted(self) -> list[Piece]:
        start, pieces = self.line, [Piece("text", "", True)]
        self._skip(1)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self._skip(1)
                return pieces
            if char == "\\" and self._next() in '$`"\\\n':
                pieces.append(Piece("text", self._next().strip("\n"), True))
                self._skip(2)
            elif char in "$`":
                pieces.append(self._expansion(quoted=True))
            else:
                pieces.append(Piece("text", char, True))
                self._skip(1)
        raise InputError(f'line {start}: " is opened and not closed')

    def _expansion(self, *, quoted: bool) -> Piece:
        rest = self.text[self.at :]
        if rest.startswith("$(("):
            return Piece("arithmetic", self._balanced("$((", "))"), quoted)
        if rest.startswith("$("):
            return Piece("unknown", f"$({self._balanced('$(', ')')})", quoted)
        if rest.startswith("`"):
            return Piece("unknown", f"`{self._until('`')}`", quoted)
        if rest.startswith("${"):
            return self._braced(self._balanced("${", "}"), quoted)
        if found := _PARAMETER.match(rest):
            self._skip(found.end())
            name = found[1] or found[2]
            return Piece("array" if name in "@*" else "parameter", name, quoted)
        self._skip(1)
        return Piece("text", "$", quoted)

    @staticmethod
    def _braced(inner: str, quoted: bool) -> Piece:
        found = _BRACED.fullmatch(inner)
        if not found:
            return Piece("unknown", f"${{{inner}}}", quoted)
        name, index, operator, argument = found.groups(default="")
        if index or name in "@*":
            known = not operator
            return Piece("array" if known else "unknown", name if known else f"${{{inner}}}", quoted)
        return Piece("parameter", name, quoted, operator, argument)

    def _balanced(self, opening: str, closing: str) -> str:
        """What stands between them, where the same brackets may stand within; both are read."""
        one, other, depth = opening[-1], closing[0], len(closing)
        for end in range(self.at + len(opening), len(self.text)):
            depth += {one: 1, other: -1}.get(self.text[end], 0)
            if depth == 0:
                inner = self.text[self.at + len(opening) : end + 1 - len(closing)]
                self._skip(end + 1 - self.at)
                return inner
        raise InputError(f"line {self.line}: {opening} is opened and not closed")
