"""Evaluation of a script up to its training command. Variables and conditions are computed; no command is run.

An unknown value is an error only if the training command uses it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder

from megarl.commands.convert_verl.shell.commands import OUTPUTS, change_folder
from megarl.commands.convert_verl.shell.statements import SETTING_COMMANDS, Statements
from megarl.commands.convert_verl.shell.syntax import Node, literal, parse
from megarl.commands.convert_verl.shell.tests import bracket
from megarl.commands.convert_verl.shell.values import (
    Call,
    Expanded,
    Fact,
    Jump,
    JumpKind,
    ScriptContext,
    ShellVariable,
    Status,
    Undetermined,
    combined,
    doubt_of,
)
from megarl.errors import InputError

_DEPTH = 40  # nested calls of functions and shells
_JUMPS: dict[str, JumpKind] = {"exit": "exit", "return": "return", "break": "break", "continue": "continue"}
_KEEPING = ("echo", "printf", "set", "unset")  # commands that pass a text on as it is, or that know only names
_CONDA = r"""eval "?\$\((\S*conda|micromamba|mamba) .*hook.*\)"?"""  # defines commands, and no variable of a script
_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash")


class Interpreter(Statements):
    """Evaluates a script. `is_training` recognizes a training command by its fields."""

    def __init__(
        self, user_values: Mapping[str, str], context: ScriptContext, is_training: Callable[[list[str]], bool]
    ):
        super().__init__(user_values, context)
        self.is_training = is_training
        self.locals: list[dict[str, ShellVariable | None]] = []
        self.depth = 0

    def _assignments(self, assigns: list[Node]) -> Status:
        status: Status = True
        self.substituted = True
        for node in assigns:
            name = node["Name"]["Value"]
            with self.tracing():
                value = self._assigned(node, name)
                self.assign(name, value)
            if isinstance(value, Undetermined):
                status = Undetermined(str(value), value.causes, external=True)
        return self.substituted if status is True else status

    def _assigned(self, node: Node, name: str) -> str | tuple[str, ...] | Undetermined:
        line = node["Line"]
        elements = (node.get("Array") or {}).get("Elems", [])
        if node.get("Index") or any(element.get("Index") for element in elements):
            return Undetermined(f"line {line}: {node['Source'].splitlines()[0]} is not supported")
        try:
            before = self._value(name, line, "") if node.get("Append") and (self.is_set(name) or not elements) else ()
            if "Array" in node:
                old = (before,) if isinstance(before, str) else before
                return (*old, *self._elements(elements))
            text = self.text(node.get("Value"))
            if isinstance(before, str):
                return before + text
            return (before[0] + text, *before[1:]) if before else text
        except Undetermined as error:
            return error

    def _elements(self, elements: list[Node]) -> list[str]:
        words = [self._expanded(element["Value"]) for element in elements]
        if errors := [word.fields for word in words if isinstance(word.fields, Undetermined)]:
            raise combined(errors)
        self.facts |= {fact for word in words for fact in word.facts}
        return [field for word in words if isinstance(word.fields, list) for field in word.fields]

    def declare(self, node: Node) -> Status:
        local, flags = node["Variant"]["Value"] == "local", ""
        assigns = []
        for argument in node.get("Args", []):
            if "Name" not in argument:
                flags += literal(argument.get("Value") or {}) or ""
                continue
            name = argument["Name"]["Value"]
            if local and self.locals:
                self.locals[-1].setdefault(name, self.state.variables.pop(name, None))
            if not argument.get("Naked"):
                assigns.append(argument)
        failed = self._assignments(assigns)
        status = failed if isinstance(failed, Undetermined) else True  # the status of `declare`, not of $(...)
        if re.search("[Ain]", flags):
            for argument in assigns:
                self.assign(
                    argument["Name"]["Value"], Undetermined(f"line {node['Line']}: declare {flags} is not supported")
                )
        return status

    # Commands.

    def call(self, node: Node, statement: Node) -> Status:
        words = node.get("Args", [])
        if not words:
            return self._assignments(node.get("Assigns", []))
        if words[0]["Source"] in ("[", "test"):
            return bracket(words[1 : -1 if words[0]["Source"] == "[" else None], self, node["Line"], node["Source"])
        expanded = [self._expanded(word) for word in words]
        fields = [field for word in expanded if isinstance(word.fields, list) for field in word.fields]
        if self.is_training(fields):
            self.calls.append(Call(node["Line"], expanded, self.doubts[-1] if self.doubts else None))
            return self.unknown_status(node)
        for word in expanded:
            self.facts |= word.facts
        cause = next((word.fields for word in expanded if isinstance(word.fields, Undetermined)), None)
        if not fields or isinstance(expanded[0].fields, Undetermined):
            self.lose_output(node, cause)
            return cause or True
        name, arguments = fields[0], fields[1:]
        if name in self.state.functions:
            return self._function(name, expanded[1:], node["Line"])
        if name in _JUMPS:
            status = cause or (arguments[:1] in ([], ["0"]))
            raise Jump(_JUMPS[name], node["Line"], frozenset(self.facts) | self.condition_facts, status)
        if name not in _KEEPING:
            cause = cause or self.absence(*arguments)
        if cause is None and name in _SHELLS:
            return self._shell(arguments, statement, node)
        if name in ("shift", "set", "cd", "pushd", "popd", *SETTING_COMMANDS) or name == "eval":
            return self._setting(name, arguments, cause, node)
        return self._printing(name, arguments, cause, node)

    def _expanded(self, word: Node) -> Expanded:
        with self.tracing() as facts:
            try:
                fields: list[str] | Undetermined = self.fields(word)
            except Undetermined as error:
                fields = error
        return Expanded(word, fields, frozenset(facts))

    def _printing(self, name: str, arguments: list[str], cause: Undetermined | None, node: Node) -> Status:
        """Evaluate a command that sets nothing."""
        if cause is not None:
            self.lose_output(node, cause)
            return Undetermined(str(cause), cause.causes, external=True)
        if name == "false":
            return False
        if re.fullmatch(r"python3?", name) and (module := re.fullmatch(r"-c\0import (\w+)", "\0".join(arguments))):
            return self._is_installed(module[1], node["Line"])
        output = OUTPUTS[name](arguments, self, node["Line"]) if name in OUTPUTS else None
        if output is None:
            self.lose_output(node)
            return self.unknown_status(node)
        if isinstance(self.state.output, str):
            self.facts |= self.condition_facts
            self.state.output += output
        return True

    def _is_installed(self, module: str, line: int) -> bool:
        """Answer `python -c "import module"` from the packages of this machine, without the import."""
        installed = module in sys.stdlib_module_names or PathFinder.find_spec(module) is not None
        state = "is" if installed else "is not"
        self.facts.add(Fact(f"line {line}: {module} {state} installed on the machine of this conversion"))
        return installed

    def _setting(self, name: str, arguments: list[str], cause: Undetermined | None, node: Node) -> Status:
        line = node["Line"]
        if name == "eval":
            if cause is not None and re.fullmatch(_CONDA, node["Source"]):
                return True
            if cause is not None:
                raise InputError(f"line {line}: eval of a text that is unknown: {cause}")
            return self._nested(" ".join(arguments), line)
        if name in ("cd", "pushd", "popd"):
            if cause is None and name != "popd":
                change_folder(arguments, self, line)
            else:
                self.state.folder = cause or Undetermined(f"line {line}: popd is not supported")
            return True
        if name in ("shift", "set"):
            return self._positions(name, arguments, cause, line)
        if name == "printf" and "-v" not in arguments:
            return self._printing(name, arguments, cause, node)
        unknown = Undetermined(f"line {line}: {node['Source'].splitlines()[0]} sets it")
        for variable in arguments:
            if name == "unset":
                self.state.variables.pop(variable, None)
                self.state.functions.pop(variable, None)
            elif re.fullmatch(r"[A-Za-z_]\w*", variable):
                self.assign(variable, unknown)
        return True if name == "unset" else self.unknown_status(node)

    def _positions(self, name: str, arguments: list[str], cause: Undetermined | None, line: int) -> Status:
        """Evaluate `shift` or `set`."""
        if name == "set":
            self._options(arguments)
            if "--" in arguments:
                rest = arguments[arguments.index("--") + 1 :]
                self.state.positional = tuple(ShellVariable(text, self.condition_facts) for text in rest)
                self.state.positional_unknown = cause
            return True
        count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
        if cause is not None or self.state.positional_unknown:
            self.state.positional_unknown = cause or self.state.positional_unknown
            return True
        absent = range(len(self.state.positional) + 1, count + 1)
        self.facts |= {Fact(unset=str(number)) for number in absent}
        if absent and not self.locals and not self.conditions:
            self.state.positional = ()  # the script's arguments that the user has not given
            return True
        self.state.positional = self.state.positional if absent else self.state.positional[count:]
        return not absent

    def _options(self, arguments: list[str]) -> None:
        """Evaluate `set -e`, `set -u`, `set -o errexit`, `set -o nounset` and their opposites."""
        rest = list(arguments)
        while rest and rest[0] != "--" and rest[0][:1] in ("-", "+"):
            letters = rest.pop(0)
            named = rest.pop(0) if "o" in letters and rest else ""
            if "e" in letters or named == "errexit":
                self.state.errexit = letters[0] == "-"
            if "u" in letters or named == "nounset":
                self.nounset = letters[0] == "-"

    def _function(self, name: str, words: list[Expanded], line: int) -> Status:
        body = self.state.functions[name]
        if body is None:
            raise InputError(f"line {line}: the script defines {name} in several ways; which of them runs is unknown")
        positional: list[ShellVariable] = []
        unknown = None
        for word in words:
            if isinstance(word.fields, Undetermined):
                if unknown is None and not _is_single(word.word):
                    unknown = word.fields
                positional.append(ShellVariable(word.fields, word.facts))
            else:
                if not _is_single(word.word) and word.fields:
                    unknown = unknown or self.absence(word.fields[0])
                positional += [ShellVariable(text, word.facts) for text in word.fields]
        saved = self.state.positional, self.state.positional_unknown
        self.state.positional, self.state.positional_unknown = tuple(positional), unknown
        self.locals.append({})
        try:
            return self._body(body, line)
        finally:
            self.state.positional, self.state.positional_unknown = saved
            for variable, value in self.locals.pop().items():
                self.state.variables.pop(variable, None)
                if value is not None:
                    self.state.variables[variable] = value

    def _body(self, body: Node, line: int) -> Status:
        if self.depth >= _DEPTH:
            raise InputError(f"line {line}: functions are nested too deeply")
        before, count = self.state.copy(), len(self.calls)
        self.depth += 1
        try:
            return self.statement(body)
        except Jump as jump:
            if jump.kind == "unknown":
                self.state = before
                del self.calls[count:]
                return self.forget([body], doubt_of(jump), jump.line)
            if jump.kind != "return":
                raise
            return jump.status
        finally:
            self.depth -= 1

    def _shell(self, arguments: list[str], statement: Node, node: Node) -> Status:
        """Evaluate `bash -c TEXT` and `bash << END`."""
        at = next((i for i, argument in enumerate(arguments) if re.fullmatch(r"-\w*c", argument)), None)
        documents = [redirect["Hdoc"] for redirect in statement.get("Redirs", []) if "Hdoc" in redirect]
        line = node["Line"]
        if at is not None and at + 2 < len(arguments):
            problem = "the arguments after the text of bash -c are not read; write them into the text"
            raise InputError(f"line {line}: {problem}")
        if at is not None and at + 1 < len(arguments):
            return self.isolated(lambda: self._nested(arguments[at + 1], line), errexit=False)
        if documents and all(argument.startswith("-") for argument in arguments):
            try:
                text = self.text(documents[-1])
            except Undetermined as error:
                raise InputError(f"line {line}: the here-document of {arguments or 'bash'}: {error}") from error
            return self.isolated(lambda: self._nested(text, line + 1), errexit=False)
        self.lose_output(node)
        return self.unknown_status(node)

    def _nested(self, text: str, line: int) -> Status:
        if self.depth >= _DEPTH:
            raise InputError(f"line {line}: shells are nested too deeply")
        self.depth += 1
        try:
            return self.run(parse(text, line))
        finally:
            self.depth -= 1


def _is_single(word: Node) -> bool:
    """Return whether a word is one field, whatever its value: it has quotes, and no "$@" or "${ARRAY[@]}"."""
    return literal(word) is not None or ('"' in word["Source"] and "@" not in word["Source"])
