"""Find the training command in a shell script, evaluated by `interpreter.py`. The script is never run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.commands.convert_verl.entry_points import NAMES, EntryPoint, entry_point_of
from megarl.commands.convert_verl.shell.interpreter import Interpreter
from megarl.commands.convert_verl.shell.slurm import submitted_variables
from megarl.commands.convert_verl.shell.syntax import parse
from megarl.commands.convert_verl.shell.values import (
    Call,
    Expanded,
    Fact,
    Jump,
    ScriptContext,
    ShellVariable,
    Undetermined,
    absent_names,
    combined,
)
from megarl.errors import InputError

LARGEST = 200_000
"""Longest script, in characters. verl's longest has 12,000."""

_NO_LAUNCHERS = {"echo", "printf", "grep", "pgrep", "pkill", "ls", "cp", "cat"}


@dataclass(frozen=True)
class Argument:
    """A word of the training command, and its line."""

    line: int
    text: str


@dataclass(frozen=True)
class Command:
    """A training command.

    trainer: the trainer's module as the script names it. launcher: the words before it. arguments: the words after it. notes: facts from outside the script
    that the arguments depend on, such as the current folder. absences: the errors about the variables that the script does
    not set, by name; `values.absent` stands for their values.
    """

    trainer: str
    entry: EntryPoint
    line: int
    launcher: list[str]
    arguments: list[Argument]
    notes: list[str]
    absences: dict[str, Undetermined]


def read_command(text: str, variables: Mapping[str, str], context: ScriptContext | None = None) -> Command:
    """Return the training command of `text`, a script or a single command line.

    variables: values that take precedence over the script's assignments; "1" is the first positional parameter.
    context: the surroundings; None: this machine, and a script from standard input.
    Raises InputError, with line and construct, if a value cannot be determined.
    """
    if len(text) > LARGEST:
        raise InputError(f"{len(text):,} characters are not a launch script: at most {LARGEST:,} are read")
    context = context or ScriptContext()
    shell = Interpreter(variables, context, _is_training)
    home = Fact(f"$HOME is {context.home}, as on the machine of this conversion; HOME=FOLDER after the file changes it")
    shell.state.variables |= {"HOME": ShellVariable(context.home, frozenset({home})), **submitted_variables(text)}
    try:
        shell.run(parse(text))
    except Jump as jump:
        if not shell.calls:
            names = sorted(fact.unset for fact in jump.facts if fact.unset)
            advice = f": add {' '.join(f'{name}=VALUE' for name in names)} after the file" if names else ""
            raise InputError(f"line {jump.line}: the script ends here, before a training command{advice}") from None
    except RecursionError as error:
        raise InputError("the script is nested too deeply") from error
    if not shell.calls:
        raise InputError(f"no training command: no line runs one of {NAMES}")
    if len(shell.calls) > 1:
        lines = ", ".join(str(call.line) for call in shell.calls)
        raise InputError(f"several training commands, in lines {lines}: keep only one")
    return _command(shell.calls[0], shell.absences)


def _is_training(fields: list[str]) -> bool:
    return any(map(entry_point_of, fields)) and fields[0] not in _NO_LAUNCHERS


def _command(call: Call, absences: dict[str, Undetermined]) -> Command:
    if call.doubt:
        raise InputError(
            f"line {call.line}: the training command is inside an if, a loop or a function with a condition that is unknown;"
            f" move it out, or give the value that decides: {call.doubt}"
        )
    launcher: list[str] = []
    arguments: list[Argument] = []
    errors: list[Undetermined] = []
    notes: set[str] = set()
    trainer, entry = "", None
    for word in call.words:
        if isinstance(word.fields, Undetermined):
            if trainer or _counts_processes(word):
                errors.append(word.fields)
            launcher.append(word.word["Source"])
            continue
        for text in word.fields:
            if trainer:
                errors += [absences[name] for name in absent_names(text.partition("=")[0])]
                arguments.append(Argument(word.word["Line"], text))
            elif entry := entry_point_of(text):
                trainer = text
            else:
                launcher.append(text)
        if trainer:
            notes.update(fact.note for fact in word.facts if fact.note)
    if errors:
        raise combined(errors)
    assert entry, "the call was recognized by its fields"
    return Command(trainer, entry, call.line, launcher, arguments, sorted(notes), absences)


def _counts_processes(word: Expanded) -> bool:
    return "nproc" in word.word["Source"] or "nnodes" in word.word["Source"]
