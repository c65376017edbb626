"""Lexer of shell scripts: split a script into words and operators without running it. Pure.

Supported: comments, continuation lines, quotes, $NAME, ${NAME}, ${NAME:-default} (also - = :=, +), "${ARRAY[@]}",
$((arithmetic)), NAME=(array). Any other expansion becomes a `Piece` of kind "unknown"; the parser raises an error if it
needs the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from megarl.errors import InputError

_OPERATOR = re.compile(r"&&|\|\||;;|\|&|&>>|&>|>>|<<<|<<|>&|<&|>\||[|&;<>()]")
_PARAMETER = re.compile(r"\$(?:([A-Za-z_]\w*)|([0-9@*#?$!-]))")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*#])(?:\[([@*])\])?(?:(:?[-=+])(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A part of a word.

    text: the characters, the parameter's name, the arithmetic expression, or the unsupported expansion.
    quoted: the value is not split at blanks. operator, argument: the parts ":-" and "argument" of ${NAME:-argument}.
    """

    kind: Literal["text", "parameter", "array", "arithmetic", "unknown"]
    text: str
    quoted: bool
    operator: str = ""
    argument: str = ""


@dataclass
class Word:
    """A word of the script. For NAME=(...), the pieces are NAME= and `array` has the words in parentheses."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def plain(self) -> str | None:
        """The characters of a word that has no quotes and no expansions, else None."""
        return None if any(p.kind != "text" or p.quoted for p in self.pieces) else "".join(p.text for p in self.pieces)


@dataclass(frozen=True)
class Operator:
    line: int
    text: str


class Reader:
    """A reader of tokens. `line` is the number of the first line of `text`."""

    def __init__(self, text: str, line: int = 1):
        self.text, self.at, self.line = text, 0, line

    def tokens(self) -> list[Word | Operator]:
        """Return all tokens. The end of a line is the operator "\\n". Raises InputError for an unclosed quote."""
        tokens: list[Word | Operator] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self._next() == "\n":
                self._skip(2)
            elif char in " \t\r":
                self._skip(1)
            elif char == "#":
                self._skip_comment()
            elif char == "\n":
                tokens.append(Operator(self.line, "\n"))
                self._skip(1)
            elif operator := self._operator():
                if operator == "<<":
                    raise InputError(
                        f"line {self.line}: a here-document (<<) is not supported; move the command out of it"
                    )
                tokens.append(Operator(self.line, operator))
                self._skip(len(operator))
            else:
                tokens.append(self._word())
        return tokens

    def _operator(self) -> str | None:
        match = _OPERATOR.match(self.text, self.at)
        return match[0] if match else None

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
            elif char in " \t\r\n" or self._operator():
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
        """Return the text between the current character and `closing`, and move behind `closing`."""
        end = self.text.find(closing, self.at + 1)
        if end < 0:
            raise InputError(f"line {self.line}: {closing} is not closed")
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
        raise InputError(f'line {start}: " is not closed')

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
        if match := _PARAMETER.match(rest):
            self._skip(match.end())
            name = match[1] or match[2]
            return Piece("array" if name in "@*" else "parameter", name, quoted)
        self._skip(1)
        return Piece("text", "$", quoted)

    @staticmethod
    def _braced(inner: str, quoted: bool) -> Piece:
        match = _BRACED.fullmatch(inner)
        if not match:
            return Piece("unknown", f"${{{inner}}}", quoted)
        name, index, operator, argument = match.groups(default="")
        if index or name in "@*":
            return Piece("unknown", f"${{{inner}}}", quoted) if operator else Piece("array", name, quoted)
        return Piece("parameter", name, quoted, operator, argument)

    def _balanced(self, opening: str, closing: str) -> str:
        """Return the text between `opening` and `closing`, which may nest, and move behind `closing`."""
        opening_char, closing_char, depth = opening[-1], closing[0], len(closing)
        for end in range(self.at + len(opening), len(self.text)):
            depth += {opening_char: 1, closing_char: -1}.get(self.text[end], 0)
            if depth == 0:
                inner = self.text[self.at + len(opening) : end + 1 - len(closing)]
                self._skip(end + 1 - self.at)
                return inner
        raise InputError(f"line {self.line}: {opening} is not closed")
