"""Parser of the training command in a shell script, with its variables expanded. The script is never run. Pure.

A statement inside if, for, case or a function, or after && or ||, may not run. A variable assigned there has an unknown
value afterwards. An unknown value is an error only if the training command uses it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.commands.convert_verl.lexer import Operator, Piece, Reader, Word
from megarl.errors import InputError

TRAINERS = re.compile(r"(?:^|[./])(main_ppo|main_dapo|fsdp_sft_trainer|sft_trainer)(?:\.py)?$")
"""verl's training modules."""

_OPENING = {"if", "for", "while", "until", "case", "select", "{"}
_CLOSING = {"fi", "done", "esac", "}"}
_WITHIN = {"then", "else", "elif", "do", "!", "time"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Argument:
    """A word of the training command, and its line."""

    line: int
    text: str


@dataclass(frozen=True)
class Command:
    """A training command. `launcher`: the words before the trainer's module; `arguments`: the words after it."""

    trainer: str
    line: int
    launcher: list[str]
    arguments: list[Argument]


@dataclass(frozen=True)
class _Unknown:
    """The value of a variable that cannot be determined, and the reason."""

    reason: str


_Value = str | list[str] | _Unknown


@dataclass(frozen=True)
class _Statement:
    words: list[Word]
    certain: bool


def read_command(text: str, variables: Mapping[str, str]) -> Command:
    """Return the training command of `text`, a script or a single command line.

    variables: values that take precedence over the script's assignments; "1" is the first positional parameter.
    Raises InputError, with line and construct, if a value cannot be determined.
    """
    values: dict[str, _Value] = dict(variables)
    commands: list[Command] = []
    for statement in _statements(Reader(text).tokens()):
        if any(TRAINERS.search(word.plain or "") for word in statement.words):
            if not statement.certain:
                line = statement.words[0].line
                raise InputError(
                    f"line {line}: the training command is inside an if, a loop or a function; move it out"
                )
            commands.append(_command(statement.words, values))
        else:
            _assign(statement, values, variables)
    if not commands:
        raise InputError("no training command: no line runs main_ppo, main_dapo, sft_trainer or fsdp_sft_trainer")
    if len(commands) > 1:
        lines = ", ".join(str(command.line) for command in commands)
        raise InputError(f"several training commands, in lines {lines}: keep only one")
    return commands[0]


def _statements(tokens: list[Word | Operator]) -> Iterator[_Statement]:
    words: list[Word] = []
    depth, brackets, alternative, redirected = 0, 0, False, False
    for token in [*tokens, Operator(0, "\n")]:
        if isinstance(token, Word):
            name = token.plain or ""
            if not words and name in _OPENING | _CLOSING | _WITHIN:
                depth += (name in _OPENING) - (name in _CLOSING)
            elif redirected:
                redirected = False
            else:
                words.append(token)
            continue
        if token.text.strip("&|") in (">", ">>", "<", "<<<"):
            redirected = True
            if words and (words[-1].plain or "").isdigit():
                words.pop()  # the 2 of 2>&1
            continue
        if words:
            yield _Statement(words, certain=depth + brackets == 0 and not alternative and token.text != "(")
        if token.text == "(":
            brackets += 1  # a subshell or a function definition
        elif token.text == ")":
            brackets = max(0, brackets - 1)  # a pattern of case has only a closing bracket
        words, redirected, alternative = [], False, token.text in ("&&", "||")


def _assign(statement: _Statement, values: dict[str, _Value], variables: Mapping[str, str]) -> None:
    words = statement.words
    declares = words[0].plain in _DECLARING
    for word in words[1:] if declares else words:
        match = _ASSIGNMENT.fullmatch(_raw(word))
        if not match:
            if not declares:
                return
            continue
        if not declares and any(not _ASSIGNMENT.fullmatch(_raw(other)) for other in words):
            return  # assignments before a command only apply to that command
        name, adds = match[1], bool(match[2])
        if name in variables:
            continue
        if not statement.certain:
            values[name] = _Unknown(f"line {word.line} assigns it inside an if, a loop, a function, or after && or ||")
        elif adds and word.array is None:
            values[name] = _Unknown(f"line {word.line} adds to it with +=")
        else:
            values[name] = _value(word, len(name) + 1 + adds, values, adds)


def _value(word: Word, name_length: int, values: dict[str, _Value], adds: bool) -> _Value:
    """Return the value that the word NAME=... assigns. `name_length` is the length of NAME= or NAME+=."""
    try:
        if word.array is not None:
            name = _ASSIGNMENT.fullmatch(_raw(word))[1]  # type: ignore[index]
            before = values.get(name, []) if adds else []
            if isinstance(before, _Unknown):
                return before
            old = [before] if isinstance(before, str) else before
            return [*old, *(field for item in word.array for field in _fields(item, values))]
        text = "".join(_text(piece, word.line, values) for piece in word.pieces)[name_length:]
        home = values.get("HOME")
        return f"{home}{text[1:]}" if text.startswith("~/") and isinstance(home, str) else text
    except InputError as error:
        return _Unknown(str(error))


def _raw(word: Word) -> str:
    return "".join(piece.text if piece.kind == "text" else "$" for piece in word.pieces)


def _command(words: list[Word], values: Mapping[str, _Value]) -> Command:
    at = next(i for i, word in enumerate(words) if TRAINERS.search(word.plain or ""))
    module = words[at].plain or ""
    launcher = [text for word in words[:at] for text in _launcher_fields(word, values)]
    arguments = [Argument(word.line, text) for word in words[at + 1 :] for text in _fields(word, values)]
    return Command(module, words[at].line, launcher, arguments)


def _launcher_fields(word: Word, values: Mapping[str, _Value]) -> list[str]:
    """Expand a word of the launcher only if it has a number of processes or nodes; the other words do not matter."""
    return _fields(word, values) if "nproc" in _raw(word) or "nnodes" in _raw(word) else [_raw(word)]


def _fields(word: Word, values: Mapping[str, _Value]) -> list[str]:
    """Expand a word into fields: an unquoted variable is split at blanks, and an array yields one field per item."""
    fields, open_ = [""], False
    for piece in word.pieces:
        if piece.kind == "array":
            items = _items(piece, word.line, values)
            if items:
                fields[-1] += items[0]
                fields += items[1:]
                open_ = True
            continue
        text = _text(piece, word.line, values)
        parts = [text] if piece.quoted or piece.kind == "text" else text.split()
        if parts:
            fields[-1] += parts[0]
            fields += parts[1:]
        open_ = open_ or bool(parts)
    if (plain := word.plain) and re.search(r"\{[^}]*(,|\.\.)[^}]*\}", plain):
        raise InputError(
            f"line {word.line}: the brace expansion {plain} is not supported; write its words out, or quote it"
        )
    empty_array = fields == [""] and any(piece.kind == "array" for piece in word.pieces)  # an empty "$@" is no word
    return fields if open_ and not empty_array else []


def _items(piece: Piece, line: int, values: Mapping[str, _Value]) -> list[str]:
    if piece.text in ("@", "*"):
        return []  # the script is read without arguments
    value = _lookup(piece.text, line, values)
    return [value] if isinstance(value, str) else value


def _text(piece: Piece, line: int, values: Mapping[str, _Value]) -> str:
    if piece.kind == "text":
        return piece.text
    if piece.kind == "unknown":
        raise InputError(f"line {line}: the value of {piece.text} is unknown until the script runs")
    if piece.kind == "arithmetic":
        return str(_arithmetic(piece.text, line, values))
    if piece.kind == "array":
        return " ".join(_items(piece, line, values))
    if piece.operator:
        present = piece.text in values and (values[piece.text] != "" or ":" not in piece.operator)
        if piece.operator.endswith("+"):
            return _inner(piece.argument, line, values) if present else ""
        if not present:
            return _inner(piece.argument, line, values)
    value = _lookup(piece.text, line, values)
    return value if isinstance(value, str) else " ".join(value[:1])


def _inner(text: str, line: int, values: Mapping[str, _Value]) -> str:
    """Expand the default in ${NAME:-default}."""
    reader = Reader(f'"{text}"' if '"' not in text else text, line)
    return "".join(
        _text(piece, line, values) for token in reader.tokens() if isinstance(token, Word) for piece in token.pieces
    )


def _lookup(name: str, line: int, values: Mapping[str, _Value]) -> str | list[str]:
    value = values.get(name)
    if value is None:
        raise InputError(f"line {line}: the script does not set ${name}: add {name}=VALUE after the file")
    if isinstance(value, _Unknown):
        advice = "" if "=VALUE after" in value.reason else f". Add {name}=VALUE after the file"
        raise InputError(f"line {line}: the value of ${name} is unknown: {value.reason}{advice}")
    return value


_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


def _arithmetic(text: str, line: int, values: Mapping[str, _Value]) -> int:
    """Evaluate $((text)): integers, + - * / % ** << >> and parentheses. Division rounds towards 0, as in C."""
    named = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: match[1] or match[2], text)
    try:
        tree = ast.parse(named.strip(), mode="eval").body
    except SyntaxError as error:
        raise InputError(f"line {line}: the arithmetic $(({text})) is not supported") from error

    def compute(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            value = _lookup(node.id, line, values)
            if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
                return int(value)
            raise InputError(f"line {line}: ${node.id} is {value!r}, not an integer, in $(({text}))")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -compute(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = compute(node.left), compute(node.right)
            if type(node.op) in _BINARY:
                return int(_BINARY[type(node.op)](left, right))
            if isinstance(node.op, (ast.Div, ast.Mod)) and right:
                quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
                return quotient if isinstance(node.op, ast.Div) else left - quotient * right
        raise InputError(f"line {line}: the arithmetic $(({text})) is not supported")

    return compute(tree)
