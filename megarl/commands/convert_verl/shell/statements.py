"""Evaluation of statements: lists, pipelines, conditions and loops.

A condition that only a running shell can decide is unknown: both paths are followed, and a variable that differs between
them is unknown afterwards.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from megarl.commands.convert_verl.shell.arithmetic import compute
from megarl.commands.convert_verl.shell.syntax import Node, children, literal
from megarl.commands.convert_verl.shell.tests import double_bracket
from megarl.commands.convert_verl.shell.values import (
    Call,
    Facts,
    Jump,
    ScriptContext,
    ShellVariable,
    Status,
    Undetermined,
    absent_names,
    doubt_of,
    merge,
)
from megarl.commands.convert_verl.shell.words import Words
from megarl.errors import InputError

_STEPS = 20_000  # statements that are evaluated
_CAPTURED = (None, "1")
_ENDING = ("CallExpr", "DeclClause", "TestClause", "ArithmCmd", "LetClause", "Subshell")
"""Statements that end a script if they fail after `set -e`. Of lists, pipelines and compound statements the parts do."""
SETTING_COMMANDS = ("read", "mapfile", "readarray", "getopts", "unset", "printf", "shift", "set", "cd")
"""Commands that may set the variables named in their arguments."""


class Statements(Words):
    """Evaluates statements. A derived class evaluates simple commands and assignments.

    calls: the training commands so far. doubts: the unknown conditions that the current path depends on.
    substituted: the status of the last command substitution. conditions: the conditions around the current statement.
    """

    def __init__(self, user_values: Mapping[str, str], context: ScriptContext):
        super().__init__(user_values, context)
        self.calls: list[Call] = []
        self.doubts: list[Undetermined] = []
        self.steps = 0
        self.substituted: Status = True
        self.conditions = 0
        self._evaluators: dict[str, Callable[[Node], Status]] = {
            "DeclClause": self.declare, "BinaryCmd": self._binary, "IfClause": self._if, "CaseClause": self._case,
            "ForClause": self._for, "WhileClause": self._while, "FuncDecl": self._define,
            "ArithmCmd": self._arithmetic, "LetClause": self._arithmetic,
            "Block": lambda node: self.run(node.get("Stmts", [])),
            "Subshell": lambda node: self.isolated(lambda: self.run(node.get("Stmts", []))),
            "TestClause": lambda node: double_bracket(node["X"], self, node["Line"]),
            "TimeClause": lambda node: self.statement(node["Stmt"]) if node.get("Stmt") else True,
        }  # fmt: skip

    def call(self, node: Node, statement: Node) -> Status:
        """Evaluate a simple command, with the redirections of its statement."""
        raise NotImplementedError

    def declare(self, node: Node) -> Status:
        """Evaluate `export`, `local` or `declare`."""
        raise NotImplementedError

    def assign(self, name: str, value: str | tuple[str, ...] | Undetermined) -> None:
        """Set a variable, unless the user gave its value."""
        if name not in self.user_values:
            self.state.variables[name] = ShellVariable(value, frozenset(self.facts) | self.condition_facts)

    # Statements.

    def run(self, statements: list[Node]) -> Status:
        """Evaluate statements. Raises Jump at `exit`, and InputError for a construct that is not supported."""
        status: Status = True
        for statement in statements:
            status = self.statement(statement)
        return status

    def statement(self, node: Node) -> Status:
        self.steps += 1
        if self.steps > _STEPS:
            raise InputError(f"line {node['Line']}: the script has too many steps to follow, such as an endless loop")
        command = node.get("Cmd")
        redirected = any(
            redirect["Op"].startswith((">", "&>")) and (redirect.get("N") or {}).get("Value") in _CAPTURED
            for redirect in node.get("Redirs", [])
        )
        if redirected:
            output, self.state.output = self.state.output, None
        try:
            if command is None:
                status: Status = True
                self.lose_output(node)
            elif node.get("Background"):
                status = self.isolated(lambda: self._command(command, node))
            else:
                status = self._command(command, node)
        finally:
            if redirected:
                self.state.output = output
        if node.get("Negated"):
            return (not status) if isinstance(status, bool) else status
        ends = self.state.errexit and status is False and not self.conditions
        if ends and command is not None and command["Type"] in _ENDING and not node.get("Background"):
            raise Jump("exit", node["Line"], frozenset(self.facts) | self.condition_facts, False)
        return status

    def _command(self, node: Node, statement: Node) -> Status:
        if node["Type"] == "CallExpr":
            return self.call(node, statement)
        if node["Type"] not in self._evaluators:
            raise InputError(f"line {node['Line']}: {node['Source'].splitlines()[0]} is not supported")
        return self._evaluators[node["Type"]](node)

    def _define(self, node: Node) -> Status:
        self.state.functions[node["Name"]["Value"]] = node["Body"]
        return True

    def isolated(self, path: Callable[[], Status], *, errexit: bool = True) -> Status:
        """Evaluate `path` in a subshell: it leaves nothing but its output. `errexit`: `set -e` holds in it too."""
        before = self.state.copy()
        self.state.errexit = self.state.errexit and errexit
        try:
            status = path()
        except Jump as jump:
            status = jump.status if jump.kind == "exit" else doubt_of(jump)
            if jump.kind == "unknown" and self.state.output is not None:
                self.state.output = doubt_of(jump)
        output, self.state = self.state.output, before
        self.state.output = output
        return status

    def output_of(self, statements: list[Node]) -> str:
        before = self.state.output
        self.state.output = ""
        try:
            self.substituted = self.isolated(lambda: self.run(statements), errexit=False)
            output = self.state.output
        finally:
            self.state.output = before
        if isinstance(output, Undetermined):
            raise output
        return (output or "").rstrip("\n")

    def _arithmetic(self, node: Node) -> Status:
        expressions = node.get("Exprs") or [node["X"]]
        try:
            values = [compute(expression, self, node["Line"], node["Source"]) for expression in expressions]
            return bool(values[-1])
        except Undetermined as error:
            self.forget([node], error, node["Line"])
            return error

    # Paths.

    def _binary(self, node: Node) -> Status:
        symbol, left, right = node["Op"], node["X"], node["Y"]
        if symbol not in ("&&", "||"):  # a pipeline: each side runs in a subshell
            output, self.state.output = self.state.output, None
            self.isolated(lambda: self.statement(left))
            self.isolated(lambda: self.statement(right))
            self.state.output = output
            self.lose_output(node)
            return self.unknown_status(node)
        status, facts = self._condition([left])
        if isinstance(status, Undetermined):
            runs_anyway = status.external and symbol == "&&"  # mkdir logs && python ...: the user expects it to succeed
            self._paths(status, [lambda: self.statement(right), lambda: True], node["Line"], doubted=not runs_anyway)
            return Undetermined(str(status), status.causes, external=status.external)
        if status != (symbol == "&&"):
            return status
        with self._within(facts):
            return self._guarded(lambda: self.statement(right), facts, lambda: not status)

    def _if(self, node: Node) -> Status:
        then, otherwise = node.get("Then", []), node.get("Else")
        if "Cond" not in node:
            return self.run(then)

        def rest() -> Status:
            return self._if(otherwise) if otherwise else True

        status, facts = self._condition(node["Cond"])
        if isinstance(status, Undetermined):
            return self._paths(status, [lambda: self.run(then), rest], node["Line"])
        with self._within(facts):
            return self._guarded(lambda: self.run(then), facts, rest) if status else rest()

    def _case(self, node: Node) -> Status:
        items = node.get("Items", [])
        if any(item["Op"] != ";;" for item in items):
            raise InputError(f"line {node['Line']}: ;& and ;;& in a case are not supported")
        paths = [lambda item=item: self.run(item.get("Stmts", [])) for item in items]
        with self.tracing() as facts:
            try:
                with self.deciding():
                    text = self.text(node["Word"])
                matches = [
                    any(fnmatch.fnmatchcase(text, self.pattern(pattern)) for pattern in item["Patterns"])
                    for item in items
                ]
            except Undetermined as error:
                return self._paths(error, [*paths, lambda: True], node["Line"])
        with self._within(frozenset(facts)):
            return paths[matches.index(True)]() if True in matches else True

    def _for(self, node: Node) -> Status:
        loop, body, line = node["Loop"], node.get("Do", []), node["Line"]
        if loop["Type"] != "WordIter":
            return self._counted_loop(loop, body, line)
        with self.tracing() as facts:
            try:
                if "Items" in loop or loop.get("InPos"):
                    items = [field for word in loop.get("Items", []) for field in self.fields(word)]
                else:
                    items = self._items("@", line, "")
                if error := next((self.absences[name] for item in items for name in absent_names(item)), None):
                    raise error
            except Undetermined as error:
                return self.forget([node], error, line)
        with self._within(frozenset(facts)):
            for item in items:
                self.assign(loop["Name"]["Value"], item)
                if not self._round(body, node):
                    break
        return True

    def _counted_loop(self, loop: Node, body: list[Node], line: int) -> Status:
        def value(key: str) -> int:
            return compute(loop[key], self, line, loop[key]["Source"]) if loop.get(key) else 1

        try:
            value("Init")
            while value("Cond"):
                self.steps += 1
                if self.steps > _STEPS:
                    raise InputError(f"line {line}: the loop has too many steps to follow")
                if not self._round(body, loop):
                    break
                value("Post")
        except Undetermined as error:
            return self.forget([loop, *body], error, line)
        return True

    def _while(self, node: Node) -> Status:
        while True:
            status, facts = self._condition(node["Cond"])
            if isinstance(status, Undetermined):
                return self.forget([node], status, node["Line"])
            if status == bool(node.get("Until")):
                return True
            with self._within(facts):
                if not self._round(node.get("Do", []), node):
                    return True

    def _round(self, body: list[Node], loop: Node) -> bool:
        """Evaluate a loop's body once. Returns False after `break`."""
        before, count = self.state.copy(), len(self.calls)
        try:
            self.run(body)
        except Jump as jump:
            if jump.kind == "unknown":
                self.state = before
                del self.calls[count:]
                self.forget([loop, *body], doubt_of(jump), jump.line)
                return False
            if jump.kind not in ("break", "continue"):
                raise
            return jump.kind == "continue"
        return True

    def _condition(self, statements: list[Node]) -> tuple[Status, Facts]:
        self.conditions += 1
        try:
            with self.tracing() as facts:
                status = self.run(statements)
        finally:
            self.conditions -= 1
        self.facts |= facts
        return status, frozenset(facts)

    @contextmanager
    def _within(self, facts: Facts) -> Iterator[None]:
        """Add the facts of a condition to every value that the block sets."""
        before = self.condition_facts
        self.condition_facts |= facts
        try:
            yield
        finally:
            self.condition_facts = before

    def _guarded(self, path: Callable[[], Status], facts: Facts, otherwise: Callable[[], Status]) -> Status:
        """Evaluate `path`. If it exits only because a variable is unset, as a check of arguments does, skip it."""
        before, count = self.state.copy(), len(self.calls)
        try:
            return path()
        except Jump as jump:
            if jump.kind != "exit" or len(self.calls) > count or not any(fact.unset for fact in facts):
                raise
            self.state = before
            return otherwise()

    def _paths(
        self, cause: Undetermined, paths: list[Callable[[], Status]], line: int, *, doubted: bool = True
    ) -> Status:
        """Evaluate alternative paths and merge their results. A path that exits is left out."""
        start, ends, jumps = self.state, [], []
        if doubted:
            self.doubts.append(cause)
        try:
            for path in paths:
                self.state = start.copy()
                try:
                    path()
                    ends.append(self.state)
                except Jump as jump:
                    jumps.append(jump)
        finally:
            if doubted:
                self.doubts.pop()
        self.state = start
        if leaving := [jump for jump in jumps if jump.kind != "exit"]:
            raise Jump("unknown", leaving[0].line)
        if not ends:
            raise jumps[0]
        self.state = merge(ends, cause, line)
        return cause

    def forget(self, nodes: list[Node], cause: Undetermined, line: int) -> Status:
        """Mark every variable that a loop or a function sets as unknown, because its path is unknown."""
        before = self.state.copy()
        names: set[str] = set()
        collect_names(nodes, self.state.functions, names, set())
        unknown = Undetermined(
            f"line {line} sets it in a loop or function that cannot be followed: {cause}", cause.causes
        )
        for name in names - self.user_values.keys():
            before.variables[name] = ShellVariable(unknown)
        if "shift" in names or "set" in names:
            before.positional_unknown = unknown
        if "cd" in names:
            before.folder = unknown
        if before.output is not None:
            before.output = unknown
        self.state = before.copy()
        body = [child for node in nodes for child in (node.get("Do") or ([node] if "Cmd" in node else []))]
        if body and cause not in self.doubts:
            self.doubts.append(cause)
            try:
                self.run(body)  # a training command in it is reported, with its doubt
            except Jump:
                pass  # its variables are unknown in any case
            finally:
                self.doubts.pop()
        self.state = before
        return cause

    def lose_output(self, node: Node, cause: Undetermined | None = None) -> None:
        """Make the collected output unknown: `node` may print."""
        if self.state.output is not None:
            message = f"line {node['Line']}: the output of {node['Source']} is unknown"
            self.state.output = cause or Undetermined(message, external=True)

    @staticmethod
    def unknown_status(node: Node) -> Undetermined:
        source = node["Source"].splitlines()[0]
        return Undetermined(f"line {node['Line']}: whether {source} succeeds", external=True)


def collect_names(nodes: list[Node], functions: Mapping[str, Node | None], names: set[str], visited: set[str]) -> None:
    """Add to `names` every variable that `nodes` may set, the functions that they call included."""
    for node in nodes:
        kind = node.get("Type", "")
        if "Name" in node and ({"Append", "Value", "Array", "Naked"} & node.keys() or kind in ("", "WordIter")):
            names.add(node["Name"]["Value"])
        if kind in ("BinaryArithm", "UnaryArithm") and node["X"].get("Type") == "Word":
            names.add(literal(node["X"]) or "")
        if kind == "ParamExp" and (node.get("Exp") or {}).get("Op") in ("=", ":="):
            names.add(node["Param"]["Value"])
        if kind == "CallExpr" and node.get("Args"):
            words = [literal(word) or "" for word in node["Args"]]
            names.update(words if words[0] in SETTING_COMMANDS else words[:1])
            body = functions.get(words[0])
            if body is not None and words[0] not in visited:
                visited.add(words[0])
                collect_names([body], functions, names, visited)
        collect_names(children(node), functions, names, visited)
