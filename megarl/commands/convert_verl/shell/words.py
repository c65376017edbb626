"""Expansion of words: quotes, variables, arrays, arithmetic and the output of commands, split as bash splits them."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from megarl.commands.convert_verl.shell.arithmetic import bounds, compute, integer
from megarl.commands.convert_verl.shell.syntax import Node, literal
from megarl.commands.convert_verl.shell.values import (
    CASES,
    Fact,
    Facts,
    ScriptContext,
    ShellVariable,
    State,
    Undetermined,
    absent,
    absent_names,
    missing,
    replaced,
    trimmed,
)

_LONGEST = 1 << 20  # characters of a value: a script that doubles a text in a loop stays small
_BRACES = re.compile(r"\{[^}]*(,|\.\.)[^}]*\}")
_DEFAULTS = ("-", "=", "?", "+")  # with or without a colon before them
_RUNNING = {"?", "$", "!", "-", "_", "RANDOM", "SECONDS", "LINENO", "HOSTNAME", "UID", "EUID", "PPID"}


class Segment(NamedTuple):
    """A part of an expanded word. kind "split": it is split at blanks; "literal": its *, ? and [] are patterns."""

    text: str
    kind: str


class Words:
    """Expands words with the variables of `state`.

    user_values: the values of variables that the user sets, which take precedence over the script's. context: the
    surroundings of the script. condition_facts: the facts that the conditions around the current statement depend on.
    facts: collects the facts that the expanded values depend on. testing: a positional parameter that is not set is
    empty, as in [ "$1" = x ]. lenient: a variable that is empty if it is not set, as in [ -z "$NAME" ].
    nounset: `set -u` holds. decides: a variable without a value raises; elsewhere `absent` stands for its value.
    absences: the errors about these variables, by name.
    """

    def __init__(self, user_values: Mapping[str, str], context: ScriptContext):
        self.user_values, self.context = user_values, context
        positional = {int(name): text for name, text in user_values.items() if name.isdigit() and int(name) < 1000}
        places = range(1, max(positional, default=0) + 1)
        arguments = tuple(ShellVariable(positional[i]) if i in positional else None for i in places)
        self.state = State(context.folder, positional=arguments)
        self.facts: set[Fact] = set()
        self.condition_facts: Facts = frozenset()
        self.testing, self.lenient, self.nounset, self.decides = False, "", False, False
        self.absences: dict[str, Undetermined] = {}

    def output_of(self, statements: list[Node]) -> str:
        """Return the standard output of statements."""
        raise NotImplementedError

    @contextmanager
    def tracing(self) -> Iterator[set[Fact]]:
        """Collect the facts of the values that are expanded within the block."""
        outer, self.facts = self.facts, set()
        try:
            yield self.facts
        finally:
            self.facts = outer

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Raise for variables without a value within the block."""
        outer, self.decides = self.decides, True
        try:
            yield
        finally:
            self.decides = outer

    def absence(self, *texts: str) -> Undetermined | None:
        """Return the error about the first variable without a value in `texts`, or None."""
        return next((self.absences[name] for text in texts for name in absent_names(text)), None)

    def _decided(self, text: str) -> str:
        """Return `text`. Raises Undetermined if the value decides something and lacks a variable."""
        if self.decides and (error := self.absence(text)):
            raise error
        return text

    def _absent(self, name: str, line: int, source: str = "", error: Undetermined | None = None) -> str:
        """Return the text for a variable that has no value. Raises Undetermined if the value decides something."""
        error = self.absences.setdefault(name, error or missing(name, line, source))
        if self.decides:
            raise error
        return absent(name)

    def fields(self, word: Node) -> list[str]:
        """Expand a word into fields. Raises Undetermined."""
        skeleton = "".join(part.get("Value", "") if part["Type"] == "Lit" else "x" for part in word.get("Parts", []))
        if _BRACES.search(skeleton):
            problem = f"the brace expansion {word['Source']} is not supported; write its words out, or quote it"
            raise Undetermined(f"line {word['Line']}: {problem}")
        fields: list[str] = []
        current: str | None = None
        for segment in self._segments(word.get("Parts", []), quoted=False, tilde=r"([A-Za-z_]\w*=)?~"):
            pieces = re.split(r"[ \t\n]+", segment.text) if segment and segment.kind == "split" else [None]
            for number, piece in enumerate(pieces):
                if segment is None or number:  # a boundary between fields
                    fields += [] if current is None else [current]
                    current = None
                text = segment.text if segment and piece is None else piece
                if text or (segment and segment.kind == "quoted"):
                    current = (current or "") + (text or "")
        fields += [] if current is None else [current]
        if sum(map(len, fields)) + len(fields) > _LONGEST:
            raise Undetermined(f"line {word['Line']}: the value of {word['Source']} is longer than a megabyte")
        return fields

    def text(self, word: Node | None) -> str:
        """Expand a word into one text, as the value of an assignment. Raises Undetermined."""
        return self._joined(word, tilde="~")

    def pattern(self, word: Node | None) -> str:
        """Expand a word into a pattern for `fnmatch`. Quoted characters match themselves."""
        with self.deciding():
            segments = list(self._segments((word or {}).get("Parts", []), quoted=False))
        return "".join(glob.escape(part.text) if part.kind == "quoted" else part.text for part in segments if part)

    def _joined(self, word: Node | None, *, tilde: str = "") -> str:
        parts = self._segments((word or {}).get("Parts", []), quoted=False, tilde=tilde)
        text = "".join(" " if part is None else part.text for part in parts)
        if len(text) > _LONGEST:
            raise Undetermined(f"line {word['Line'] if word else 1}: the value is longer than a megabyte")
        return text

    def _segments(self, parts: list[Node], *, quoted: bool, tilde: str = "") -> Iterator[Segment | None]:
        """Expand parts of a word. None is a boundary between the items of an array.

        tilde: pattern of the beginning that ends in a ~ for the home folder.
        """
        for number, part in enumerate(parts):
            kind = part["Type"]
            if kind == "Lit":
                yield from self._literal(part.get("Value", ""), quoted=quoted, tilde="" if number else tilde)
            elif kind == "SglQuoted":
                yield self._single_quoted(part, quoted=quoted)
            elif kind == "DblQuoted":
                inner = list(self._segments(part.get("Parts", []), quoted=True))
                if inner or not part.get("Parts"):
                    yield from inner or [Segment("", "quoted")]
            elif kind == "ParamExp":
                yield from self._parameter(part, quoted=quoted)
            elif kind == "ArithmExp":
                value = compute(part["X"], self, part["Line"], part["Source"])
                yield Segment(str(value), "quoted" if quoted else "split")
            elif kind == "CmdSubst":
                yield Segment(self._substitution(part), "quoted" if quoted else "split")
            elif kind == "ExtGlob":
                yield Segment(part["Source"], "literal")
            else:
                raise self._unknown(part)

    def _literal(self, text: str, *, quoted: bool, tilde: str) -> Iterator[Segment]:
        if quoted:
            yield Segment(re.sub(r"\\([$`\"\\])", r"\1", text), "quoted")
            return
        if tilde and (home := re.match(rf"{tilde}(?=/|$)", text)):
            yield Segment(home[0][:-1] + self.variable_text("HOME", 1, "~"), "quoted")
            text = text[home.end() :]
        for match in re.finditer(r"\\(.)|[^\\]+", text, re.DOTALL):
            yield Segment(match[1], "quoted") if match[1] else Segment(match[0], "literal")

    def _single_quoted(self, part: Node, *, quoted: bool) -> Segment:
        text = part.get("Value", "")
        if quoted:  # "${X:-'a'}": bash keeps these quotes
            return Segment(f"'{text}'", "quoted")
        if part.get("Dollar") and "\\" in text:
            raise self._unknown(part)
        return Segment(text, "quoted")

    def _substitution(self, part: Node) -> str:
        try:
            return self.output_of(part.get("Stmts", []))
        except Undetermined as error:
            if error.external:
                raise self._unknown(part) from error
            message = f"line {part['Line']}: the value of {part['Source']} is unknown: {error}"
            raise Undetermined(message, error.causes) from error

    @staticmethod
    def _unknown(part: Node) -> Undetermined:
        return Undetermined(f"line {part['Line']}: the value of {part['Source']} is unknown until the script runs")

    # Parameters.

    def _parameter(self, node: Node, *, quoted: bool) -> Iterator[Segment | None]:
        name, index = node["Param"]["Value"], node.get("Index")
        at = literal(index) if index and index["Type"] == "Word" else None
        if any(node.get(form) for form in ("Excl", "Names", "Width", "IsSet", "NestedParam", "Flags")):
            raise self._unknown(node)
        if name in "@*" or at in ("@", "*"):
            yield from self._array(node, quoted=quoted, star="*" in (name, at))
            return
        kind = "quoted" if quoted else "split"
        operation = node.get("Exp") or {}
        symbol = operation.get("Op", "")
        if symbol.removeprefix(":") in _DEFAULTS:
            value = self._item(node, unset_is_none=True)
            present = bool(value) or (value is not None and not symbol.startswith(":"))
            if symbol.endswith("+"):
                yield from self._default(operation, quoted=quoted) if present else ()
            elif present:
                yield Segment(value or "", kind)
            elif symbol.endswith("?"):
                yield Segment(self._absent(name, node["Line"], node["Source"]), kind)
            elif symbol.endswith("="):
                text = self._joined(operation.get("Word"))
                self.set_text(name, text, node["Line"])
                yield Segment(text, kind)
            else:
                yield from self._default(operation, quoted=quoted)
            return
        text = self._item(node, unset_is_none=False) or ""
        if (symbol or any(node.get(form) for form in ("Length", "Slice", "Repl"))) and (error := self.absence(text)):
            raise error
        yield Segment(self._changed(text, node, operation), kind)

    def _default(self, operation: Node, *, quoted: bool) -> Iterator[Segment | None]:
        """Expand the word behind :-. Unquoted text in it is split at blanks."""
        for segment in self._segments((operation.get("Word") or {}).get("Parts", []), quoted=quoted, tilde="~"):
            yield segment._replace(kind="split") if segment and segment.kind == "literal" else segment

    def _array(self, node: Node, *, quoted: bool, star: bool) -> Iterator[Segment | None]:
        name, line, operation = node["Param"]["Value"], node["Line"], node.get("Exp") or {}
        symbol = operation.get("Op", "")
        if node.get("Repl") or (symbol and symbol.removeprefix(":") not in ("-", "+")):
            raise self._unknown(node)
        unset = symbol and name not in ("@", "*", *self.state.variables, *self.user_values)
        items = [] if unset else self._items(name, line, node["Source"])
        if part := node.get("Slice"):
            start, length = bounds(part, self, node)
            first = int(name in ("@", "*"))
            if start < first or (length or 0) < 0:
                raise self._unknown(node)
            items = items[start - first :][:length]
        if node.get("Length"):
            yield Segment(str(len(items)), "quoted")
        elif symbol and (symbol.endswith("+") == bool(items)):
            yield from self._default(operation, quoted=quoted)
        elif symbol.endswith("+"):
            return
        elif star and quoted:
            yield Segment(" ".join(items), "quoted")
        else:
            for number, item in enumerate(items):
                if number:
                    yield None
                yield Segment(item, "quoted" if quoted else "split")

    def _items(self, name: str, line: int, source: str) -> list[str]:
        if name in ("@", "*"):
            items = [self._positional(number, line) for number in range(1, len(self._places()) + 1)]
            return [self._absent(str(at + 1), line) if item is None else item for at, item in enumerate(items)]
        value = self._value(name, line, source)
        return [value] if isinstance(value, str) else list(value)

    def _item(self, node: Node, *, unset_is_none: bool) -> str | None:
        """Return the text of $NAME, ${NAME[0]} or $1."""
        name, line = node["Param"]["Value"], node["Line"]
        is_changed = not node.get("Short") and any(node.get(form) for form in ("Exp", "Repl", "Slice"))
        source = node["Source"] if is_changed else ""
        if name.isdigit() and name != "0":
            text = self._positional(int(name), line)
            if text is None:
                self.facts.add(Fact(unset=name))
                if not (unset_is_none or self.testing):
                    return self._absent(name, line, source)
            return text
        index = node.get("Index")
        place = (integer(self.text(index)) if index["Type"] == "Word" else None) if index else 0
        if place is None or (index and place < 0):
            raise self._unknown(node)
        if not self.is_set(name):
            self.facts.add(Fact(unset=name))
            if unset_is_none or name == self.lenient:
                return None
            if self.testing and not self.nounset and name not in _RUNNING:
                self.facts.add(Fact(f"line {line}: ${name} is not set, so a test takes it as empty", unset=name))
                return None
            return self._absent(name, line, source)
        value = self._value(name, line, source)
        items = (value,) if isinstance(value, str) else value
        return items[place] if place < len(items) else None if unset_is_none else ""

    def _changed(self, text: str, node: Node, operation: Node) -> str:
        """Apply ${#NAME}, ${NAME#pattern}, ${NAME/pattern/text}, ${NAME,,} or ${NAME:1:2} to the value of NAME."""
        symbol = operation.get("Op", "")
        if node.get("Length"):
            return str(len(text))
        if part := node.get("Slice"):
            start, length = bounds(part, self, node)
            if start < 0 or (length or 0) < 0:
                raise self._unknown(node)
            return text[start:][:length]
        if change := node.get("Repl"):
            return self._replaced(text, node, change)
        if not symbol:
            return text
        if symbol in CASES and not operation.get("Word"):
            return CASES[symbol](text)
        if symbol not in ("#", "##", "%", "%%"):
            raise self._unknown(node)
        return trimmed(text, self.pattern(operation.get("Word")), symbol)

    def _replaced(self, text: str, node: Node, change: Node) -> str:
        pattern, by = self.pattern(change.get("Orig")), self._joined(change.get("With"))
        if pattern[:1] in ("#", "%") or len(text) > 4096:
            raise self._unknown(node)
        return replaced(text, pattern, by, everywhere=bool(change.get("All")))

    # Variables.

    def is_set(self, name: str) -> bool:
        return name in ("0", "#", "PWD", "BASH_SOURCE", *self.user_values, *self.state.variables) or name in _RUNNING

    def variable_text(self, name: str, line: int, source: str) -> str:
        value = self._value(name, line, source)
        return value if isinstance(value, str) else "".join(value[:1])

    def _value(self, name: str, line: int, source: str) -> str | tuple[str, ...]:
        if name in self.user_values:
            return self.user_values[name]
        if (variable := self.state.variables.get(name)) is not None:
            self.facts |= variable.facts
            if not isinstance(variable.value, Undetermined):
                self._decided(variable.value if isinstance(variable.value, str) else " ".join(variable.value))
                return variable.value
            if "\n" in (reason := str(variable.value)):  # a list of missing values
                raise variable.value
            advice = "" if "=VALUE after" in reason else f". Add {name}=VALUE after the file"
            message = f"line {line}: the value of ${name} is unknown: {reason}{advice}"
            error = Undetermined(message, variable.value.causes or {name: message})
            if not variable.value.of_file:
                raise error
            return self._absent(name, line, error=error)
        if name == "#":
            self.facts.add(Fact(unset=str(len(self._places()) + 1)))
            return str(len(self._places()))
        if name in ("0", "BASH_SOURCE") and self.context.script is not None:
            self.facts.add(Fact(f"line {line}: the script's path is {self.context.script}"))
            return self.context.script
        if name == "PWD":
            return self.current_folder(line)
        if name in _RUNNING or name in ("0", "BASH_SOURCE"):
            message = f"line {line}: the value of ${name} is unknown until the script runs"
            raise Undetermined(message, {name: f"{message}. Add {name}=VALUE after the file"})
        return self._absent(name, line, source)

    def current_folder(self, line: int) -> str:
        """Return the current folder, and record that it is this machine's."""
        if isinstance(folder := self.state.folder, Undetermined):
            raise Undetermined(f"line {line}: the current folder is unknown: {folder}", folder.causes)
        self.facts.add(Fact(f"line {line}: the current folder is {folder}, as in this conversion"))
        return folder

    def _places(self) -> tuple[ShellVariable | None, ...]:
        if self.state.positional_unknown:
            raise self.state.positional_unknown
        return self.state.positional

    def _positional(self, number: int, line: int) -> str | None:
        places = self._places()
        variable = places[number - 1] if number <= len(places) else None
        if variable is None:
            return None
        self.facts |= variable.facts
        if isinstance(variable.value, Undetermined):
            message = f"line {line}: the value of ${number} is unknown: {variable.value}"
            raise Undetermined(message, variable.value.causes)
        return self._decided(variable.value if isinstance(variable.value, str) else "".join(variable.value[:1]))

    def number_of(self, name: str, line: int, source: str) -> int:
        """Return the integer in a variable, for arithmetic. Raises Undetermined."""
        text = self.variable_text(name, line, source)
        if (value := integer(text)) is None:
            raise Undetermined(f"line {line}: ${name} is {text!r}, not an integer, in {source}")
        return value

    def set_text(self, name: str, text: str, line: int) -> None:
        """Set a variable from within an expansion: ${NAME:=text} or ((NAME = 1))."""
        if name not in self.user_values:
            self.state.variables[name] = ShellVariable(text, frozenset(self.facts) | self.condition_facts)
