"""Overrides of Hydra (``key=value``), and its flags --config-name, --config-path and --config-dir."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megarl.commands.convert_verl.shell.parser import Argument
from megarl.errors import InputError

_OVERRIDE = re.compile(r"(~|\+{0,2})([\w@./-]+?)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_FLAGS = {
    "--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path", "--config-dir": "folder", "-cd": "folder",
}  # fmt: skip


@dataclass(frozen=True)
class OptionValue:
    """The value of an option, and its line in the script. file: the configuration file that has it; "": the command."""

    value: Any
    line: int
    file: str = ""

    @property
    def place(self) -> str:
        return self.file or f"line {self.line}"


@dataclass(frozen=True)
class ConfigFlags:
    """The flags of a command that select its configuration file; "" for an absent one. line: of --config-name."""

    name: str = ""
    path: str = ""
    folder: str = ""
    line: int = 0


def read_options(arguments: Sequence[Argument]) -> tuple[dict[str, OptionValue], ConfigFlags]:
    """Parse Hydra's overrides and flags. The last override of an option counts. Raises InputError."""
    options: dict[str, OptionValue] = {}
    flags: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.text.startswith("-"):
            flag, equals, value = argument.text.partition("=")
            if flag not in _FLAGS:
                raise InputError(f"line {argument.line}: the hydra option {argument.text} is not supported")
            flags[_FLAGS[flag]] = value if equals else rest.pop(0).text if rest else ""
            if _FLAGS[flag] == "name":
                flags["line"] = argument.line
            continue
        match = _OVERRIDE.fullmatch(argument.text)
        if not match or (match[3] is None and match[1] != "~"):
            backslash = ": a backslash before a space joins two words" if argument.text != argument.text.strip() else ""
            raise InputError(
                f"line {argument.line}: {argument.text!r} is not an override of the form key=value{backslash}"
            )
        if match[1] == "~":
            raise InputError(f"line {argument.line}: {argument.text!r} deletes an option, which is not supported")
        value = value_of(match[3], argument.line)
        options |= {name: OptionValue(leaf, argument.line) for name, leaf in leaves(match[2], value)}
    return options, ConfigFlags(**flags)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the options that a value sets: Hydra merges a mapping into the section `name`."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value


def value_of(text: str, line: int) -> Any:
    """Parse the value of an override: a number, a word, True, null, a list or a mapping.

    Raises InputError if it refers to other options or cannot be read.
    """
    if not text or text.startswith(("{{", "{%")):  # a chat template
        return text
    if "${" in text:
        raise InputError(f"line {line}: {text!r} refers to other options of verl; write the value instead")
    if _NUMBER.fullmatch(text):
        return _number(text)
    is_mapping = text.startswith("{")
    try:
        value = yaml.safe_load(_spaced(text) if is_mapping else text)
    except yaml.YAMLError as error:
        if is_mapping:
            return text  # with Hydra's escapes
        raise InputError(f"line {line}: the value {text!r} cannot be read") from error
    if is_mapping:
        return _with_numbers(value)
    if isinstance(value, (str, list, type(None))):
        return value
    # YAML reads further words as True or False, and 12:30 or 0x10 as numbers; Hydra reads them as text
    return value if isinstance(value, bool) and text.lower() in ("true", "false") else text


def _number(text: str) -> int | float:
    return float(text) if re.search(r"[.eE]", text) else int(text)


def _with_numbers(value: Any) -> Any:
    """Return `value` with 1e-6 as a number, which YAML reads as text."""
    if isinstance(value, Mapping):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return _number(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _spaced(text: str) -> str:
    """Insert a space after the colon of each key of a mapping: Hydra reads {a:1} as {a: 1}, YAML as the key 'a:1'."""
    result, quote = "", ""
    brackets: list[str] = []
    expects_key = False
    for letter in text:
        result += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "{[":
            brackets.append(letter)
            expects_key = letter == "{"
        elif letter in "}]" and brackets:
            brackets.pop()
            expects_key = False
        elif letter == ",":
            expects_key = brackets[-1:] == ["{"]
        elif letter == ":" and expects_key:
            result += " "
            expects_key = False
    return result
