"""verl's options as a command gives them, and the recipe's settings and notes that are made of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from megarl.commands.convert_verl.parser import Argument
from megarl.commands.convert_verl.table import Option
from megarl.errors import InputError
from megarl.registry import nearest

_OVERRIDE = re.compile(r"(~|\+{0,2})([\w@./-]+?)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Given:
    """An option's value in the command. `line`: where it stands."""

    value: Any
    line: int


@dataclass
class Sheet:
    """`given`: options of the command; `defaults`: verl's. `settings`: the recipe's, by dotted key. `origins`: the option
    that a setting was taken from. `notes`: what could not be carried over, or was changed, one line each."""

    given: dict[str, Given]
    defaults: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def get(self, option: str, otherwise: Any = None) -> Any:
        """The command's value, else verl's default, else `otherwise`."""
        return self.given[option].value if option in self.given else self.defaults.get(option, otherwise)

    def number(self, option: str, otherwise: int | None = None) -> int:
        value = self.get(option, otherwise)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{self.where(option)}{option}={value!r} is no whole number")
        return value

    def first(self, *options: str) -> Any:
        """Of the first of them that the command gives."""
        return next((self.given[option].value for option in options if option in self.given), None)

    def where(self, option: str) -> str:
        return f"line {self.given[option].line}: " if option in self.given else ""

    def note(self, option: str, why: str) -> None:
        """Say why `option` was not taken over as it stands."""
        said = f"={_short(self.given[option].value)}" if option in self.given else " (verl's default)"
        self.notes.append(f"{self.where(option)}{option}{said}: {why}")

    def apply(self, table: Sequence[Option]) -> None:
        """Take over what `table` says of each option; of those that it does not know, say so."""
        for name in [*self.given, *(name for name in self.defaults if name not in self.given)]:
            option = next((one for one in table if fnmatch.fnmatchcase(name, one.verl)), None)
            if option is None:
                near = nearest(name, [one.verl for one in table])
                self.note(name, f"not known here, and not carried over{f'; nearest: {near}' if near else ''}")
            elif option.to is None and self.get(name) in option.same:
                continue
            elif option.to is None:
                self.note(name, f"no counterpart: {option.why}")
            elif not option.derived:
                self._take(name, option)

    def _take(self, name: str, option: Option) -> None:
        value = self.get(name)
        assert option.to is not None
        if option.names:
            key = value if isinstance(value, (str, bool, type(None))) else str(value)
            if key not in option.names:
                known = ", ".join(str(one) for one in option.names)
                self.note(name, f"no counterpart for this value; those with one: {known}")
                return
            value = option.names[key]
        elif value is None:
            return
        to = option.to
        if to.endswith(".*"):
            to = to[:-1] + name[len(option.verl) - 1 :]
        if option.to.removesuffix("s").endswith("_file") or to == "lora.targets":
            value = value if isinstance(value, list) else [value]
        self.settings[to], self.origins[to] = value, name


def read_options(arguments: Sequence[Argument]) -> tuple[dict[str, Given], str]:
    """Hydra's overrides by name, the last one of a name; and the --config-name. Raises InputError for anything else."""
    given: dict[str, Given] = {}
    config, rest = "", list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.text.startswith("--"):
            flag, equals, value = argument.text.partition("=")
            if flag not in ("--config-path", "--config-name", "--config-dir"):
                raise InputError(f"line {argument.line}: {argument.text} is no option of hydra that is known here")
            value = value if equals else rest.pop(0).text if rest else ""
            config = value if flag == "--config-name" else config
            continue
        found = _OVERRIDE.fullmatch(argument.text)
        if not found or (found[3] is None and found[1] != "~"):
            raise InputError(f"line {argument.line}: {argument.text!r} is no override of the form key=value")
        if found[1] == "~":
            raise InputError(f"line {argument.line}: {argument.text!r} deletes an option, which is not read here")
        given[found[2]] = Given(value_of(found[3], argument.line), argument.line)
    return given, config


def value_of(text: str, line: int) -> Any:
    """An override's value: a number, a word, True, null, or a list. Raises InputError for what refers to other options."""
    if "${" in text:
        raise InputError(f"line {line}: {text!r} refers to other options of verl; write the value out")
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"line {line}: the value {text!r} cannot be read") from error
    return text if isinstance(value, (dict, float)) and not text.startswith("{") else value


def _short(value: Any) -> str:
    text = str(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."
