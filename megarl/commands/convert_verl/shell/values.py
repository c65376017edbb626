"""Values of a script's variables, and the state that its statements change."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from megarl.commands.convert_verl.shell.syntax import Node
from megarl.errors import InputError


class Undetermined(InputError):
    """A value or an exit status that only a running shell can compute.

    causes: the variables that would determine it, with a message about each. external: the exit status of an
    ordinary command. of_file: a test of a file, or one of several paths that such a test chooses.
    """

    def __init__(
        self, message: str, causes: Mapping[str, str] | None = None, *, external: bool = False, of_file: bool = False
    ):
        super().__init__(message)
        self.causes, self.external, self.of_file = dict(causes or {}), external, of_file


@dataclass(frozen=True)
class Fact:
    """A fact from outside the script that a value depends on.

    note: the text for the user, "" if no note is due. unset: a variable that was taken as unset, or "".
    """

    note: str = ""
    unset: str = ""


Facts = frozenset[Fact]
Status = bool | Undetermined
"""The success of a statement."""
_ABSENT = re.compile("\ue000(\\w+)\ue001")  # two characters of Unicode's private use around the name


def absent(name: str) -> str:
    """Return the text that stands for the value of a variable that the script does not set."""
    return f"\ue000{name}\ue001"


def absent_names(text: str) -> list[str]:
    """Return the variables that `text` contains by `absent`."""
    return _ABSENT.findall(text)


def without_absent(text: str, form: str = r"$\1") -> str:
    """Replace each absent value in `text` by `form`, in which ``\\1`` is the name of its variable."""
    return _ABSENT.sub(form, text)


@dataclass(frozen=True)
class ShellVariable:
    """A variable. A tuple is an array."""

    value: str | tuple[str, ...] | Undetermined
    facts: Facts = frozenset()


@dataclass(frozen=True)
class ScriptContext:
    """The surroundings in which a script is read.

    script: the script's path as the user gave it, None for standard input. folder: the current folder. home: `$HOME`.
    """

    script: str | None = None
    folder: str = field(default_factory=os.getcwd)
    home: str = field(default_factory=lambda: os.path.expanduser("~"))
    now: datetime = field(default_factory=lambda: datetime.now().astimezone())


@dataclass
class State:
    """The state of a shell.

    positional: $1 and so on; an absent one is None. positional_unknown: set if they are unknown.
    functions: bodies by name; None if two paths through the script define different functions.
    folder: the current folder. output: the standard output that $(...) collects; None: it is not collected.
    errexit: `set -e` holds.
    """

    folder: str | Undetermined
    variables: dict[str, ShellVariable] = field(default_factory=dict)
    positional: tuple[ShellVariable | None, ...] = ()
    positional_unknown: Undetermined | None = None
    functions: dict[str, Node | None] = field(default_factory=dict)
    output: str | Undetermined | None = None
    errexit: bool = False

    def copy(self) -> State:
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))


JumpKind = Literal["exit", "return", "break", "continue", "unknown"]


class Jump(Exception):
    """The end of a path: exit, return, break or continue; "unknown" if only some of several paths end.

    facts: the facts that the path depends on. status: the status that `return` gives.
    """

    def __init__(self, kind: JumpKind, line: int, facts: Facts = frozenset(), status: Status = True):
        super().__init__(kind)
        self.kind, self.line, self.facts, self.status = kind, line, facts, status


@dataclass(frozen=True)
class Expanded:
    """A word of a command: its fields, or why they are unknown, and the facts that they depend on."""

    word: Node
    fields: list[str] | Undetermined
    facts: Facts


@dataclass(frozen=True)
class Call:
    """A command with its expanded words. `doubt`: the condition that it depends on, if that is unknown."""

    line: int
    words: list[Expanded]
    doubt: Undetermined | None


def merge(states: list[State], cause: Undetermined, line: int) -> State:
    """Return the state after one of several paths, when it is unknown which: what differs between them is unknown.

    cause: the condition that is unknown. line: the line of the statement with the paths.
    """
    first, *rest = states
    if not rest:
        return first
    message = f"line {line} sets it under a condition that is unknown: {cause}"
    unknown = Undetermined(message, cause.causes)
    merged = first.copy()
    for name in {name for state in states for name in state.variables}:
        variables = [state.variables.get(name) for state in states]
        present = [variable for variable in variables if variable is not None]
        facts = frozenset(fact for variable in present for fact in variable.facts)
        same = len(present) == len(states) and len({variable.value for variable in present}) == 1
        if same:
            merged.variables[name] = ShellVariable(present[0].value, facts)
            continue
        paths = [each.value for each in present if isinstance(each.value, str) and "/" in each.value]
        is_path = cause.of_file and len(paths) == len(states)
        merged.variables[name] = ShellVariable(Undetermined(message, cause.causes, of_file=is_path), facts)
    for name in {name for state in states for name in state.functions}:
        if any(state.functions.get(name) is not first.functions.get(name) for state in rest):
            merged.functions[name] = None
    positions = first.positional, first.positional_unknown
    if any((state.positional, state.positional_unknown) != positions for state in rest):
        merged.positional_unknown = unknown
    if any(state.folder != first.folder for state in rest):
        merged.folder = unknown
    if any(state.output != first.output for state in rest):
        merged.output = unknown
    merged.errexit = all(state.errexit for state in states)
    return merged


def missing(name: str, line: int, source: str = "") -> Undetermined:
    """Return the error for a variable that the script does not set. `source`: the expansion that needs it."""
    within = f" in {source}" if source else ""
    message = f"line {line}: the script does not set ${name}{within}: add {name}=VALUE after the file"
    return Undetermined(message, {name: message})


def combined(errors: list[Undetermined]) -> Undetermined:
    """Return one error for all values that are missing, each named once."""
    causes: dict[str, str] = {}
    for error in errors:
        for name, text in error.causes.items():
            causes.setdefault(name, text)
    if len(errors) == 1 and len(causes) <= 1:
        return errors[0]
    listed = {text: None for error in errors for text in ([causes[name] for name in error.causes] or [str(error)])}
    if len(listed) == 1:
        return errors[0]
    head = f"{len(listed)} values are missing, which the script alone does not determine:"
    return Undetermined("\n".join([head, *(f"  {text}" for text in listed)]), causes)


def doubt_of(jump: Jump) -> Undetermined:
    """Return the unknown status of a function, loop or subshell that `jump` may have ended."""
    return Undetermined(f"line {jump.line}: whether the script goes on here is unknown")


CASES: dict[str, Callable[[str], str]] = {
    ",,": str.lower, "^^": str.upper, "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}  # fmt: skip
"""Changes of upper and lower case by symbol, as in ${NAME,,}."""


def trimmed(text: str, pattern: str, symbol: str) -> str:
    """Remove a match of `pattern` from the start (#, ##) or the end (%, %%): the shortest, or with two symbols the longest."""
    front = symbol[0] == "#"
    cuts = range(len(text) + 1) if front == (len(symbol) == 1) else range(len(text), -1, -1)
    for cut in cuts:
        removed, kept = (text[:cut], text[cut:]) if front else (text[cut:], text[:cut])
        if fnmatch.fnmatchcase(removed, pattern):
            return kept
    return text


def replaced(text: str, pattern: str, by: str, *, everywhere: bool) -> str:
    """Replace the longest match of `pattern` at the first place, or at each, as ${NAME/pattern/by} does."""
    result, at, done = "", 0, False
    while at < len(text):
        ends = (end for end in range(len(text), at, -1) if fnmatch.fnmatchcase(text[at:end], pattern))
        end = None if done else next(ends, None)
        result, at, done = (result + text[at], at + 1, done) if end is None else (result + by, end, not everywhere)
    return result
