"""Output of simple commands, computed without running them: echo, printf, date, dirname, basename, pwd, seq."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from megarl.commands.convert_verl.shell.arithmetic import integer
from megarl.commands.convert_verl.shell.values import Fact, Undetermined
from megarl.commands.convert_verl.shell.words import Words

Output = Callable[[list[str], Words, int], str | None]


def echo(arguments: list[str], shell: Words, line: int) -> str | None:
    newline = "\n"
    while arguments and re.fullmatch(r"-[neE]+", arguments[0]):
        newline = "" if "n" in arguments[0] else newline
        if "e" in arguments[0] and any("\\" in argument for argument in arguments):
            return None
        arguments = arguments[1:]
    return " ".join(arguments) + newline


def printf(arguments: list[str], shell: Words, line: int) -> str | None:
    """Support %s, %d, %% and \\n, with as many arguments as the format has."""
    if not arguments or re.search(r"%[^sd%]|\\[^n]", arguments[0]) or arguments[0].startswith("-"):
        return None
    form, rest = arguments[0].replace("\\n", "\n"), arguments[1:]
    if len(re.findall(r"%[sd]", form)) != len(rest):
        return None
    values = iter(rest)
    return re.sub(r"%([sd%])", lambda match: "%" if match[1] == "%" else next(values), form)


def date(arguments: list[str], shell: Words, line: int) -> str | None:
    now = shell.context.now
    if not arguments:
        form = "%a %b %e %H:%M:%S %Z %Y"
    elif len(arguments) == 1 and re.fullmatch(r"\+([^%]|%[YmdHMSyjFTsbB%])*", arguments[0]):
        form = arguments[0][1:]
    else:
        return None
    shell.facts.add(Fact(f"line {line}: $(date) is the time of this conversion, {now:%Y-%m-%d %H:%M:%S}"))
    return now.strftime(form) + "\n"


def pwd(arguments: list[str], shell: Words, line: int) -> str | None:
    return None if arguments else shell.current_folder(line) + "\n"


def dirname(arguments: list[str], shell: Words, line: int) -> str | None:
    arguments = _operands(arguments)
    if len(arguments) != 1:
        return None
    path = arguments[0].rstrip("/") or "/"
    return (posixpath.dirname(path).rstrip("/") or ("/" if path.startswith("/") else ".")) + "\n"


def basename(arguments: list[str], shell: Words, line: int) -> str | None:
    arguments = _operands(arguments)
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        return None
    name = posixpath.basename(arguments[0].rstrip("/")) or "/"
    suffix = arguments[1] if len(arguments) == 2 else ""
    return (name.removesuffix(suffix) or name) + "\n"


def realpath(arguments: list[str], shell: Words, line: int) -> str | None:
    """Make a path absolute. Symbolic links are not resolved."""
    paths = [argument for argument in arguments if argument not in ("-f", "-m", "-e", "--")]
    if len(paths) != 1 or paths[0].startswith("-"):
        return None
    path = paths[0] if paths[0].startswith("/") else posixpath.join(shell.current_folder(line), paths[0])
    return posixpath.normpath(path) + "\n"


def readlink(arguments: list[str], shell: Words, line: int) -> str | None:
    return realpath(arguments, shell, line) if arguments[:1] == ["-f"] else None


def seq(arguments: list[str], shell: Words, line: int) -> str | None:
    numbers = [number for argument in arguments if (number := integer(argument)) is not None]
    if not 1 <= len(numbers) == len(arguments) <= 3:
        return None
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    last = numbers[-1]
    if not step or abs(last - first) // abs(step) > 10_000:
        return None
    return "".join(f"{number}\n" for number in range(first, last + (1 if step > 0 else -1), step))


def _operands(arguments: list[str]) -> list[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


OUTPUTS: dict[str, Output] = {
    "echo": echo, "printf": printf, "date": date, "pwd": pwd, "dirname": dirname, "basename": basename,
    "realpath": realpath, "readlink": readlink, "seq": seq, ":": lambda *_: "", "true": lambda *_: "",
}  # fmt: skip
"""Standard output by command. None: it is unknown."""


def change_folder(arguments: list[str], shell: Words, line: int) -> None:
    """Set the current folder as `cd` does, if the folder exists."""
    paths = [argument for argument in arguments if argument not in ("--", "-P", "-L")]
    target = paths[0] if paths else shell.variable_text("HOME", line, "cd")
    if len(paths) > 1 or target.startswith("-"):
        shell.state.folder = Undetermined(f"line {line}: cd {' '.join(arguments)}")
    elif target.startswith("/"):
        shell.state.folder = posixpath.normpath(target)
    elif isinstance(shell.state.folder, str):
        shell.state.folder = posixpath.normpath(posixpath.join(shell.state.folder, target))
