"""The state of a conversion: verl's options on one side, the recipe's settings and notes on the other."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import yaml

from megarl.commands.convert_verl.hydra.overrides import OptionValue
from megarl.commands.convert_verl.option import Option
from megarl.errors import InputError, cut_end
from megarl.recipe.load import OPEN

_ALGORITHMIC = ("algorithm.", "actor_rollout_ref.actor.", "critic.optim.", "distillation.", "async_training.")
_HARMLESS = ("trainer.", "ray_kwargs.", "global_profiler.", "checkpoint.", "hydra.")
"""Prefixes of options that are left out if the tables lack them and have no similar name. Any other unknown option is refused, as by
Hydra."""


@dataclass
class Conversion:
    """Options, and the settings derived from them so far.

    options: the options of the command by name. defaults: verl's defaults. settings: the recipe's, by dotted key.
    user_choices: keys of the recipe that the user sets, and options of verl that may be left out; nothing is refused for them.
    origins: the option that each setting came from. open: options without a value, and the script's text (`open_settings.py`).
    machines: their number and the devices of each, for the recipe's head; None: unknown.
    notes: one line per option that was changed or omitted. minor: the notes of options that change nothing in the result.
    """

    options: dict[str, OptionValue]
    defaults: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    machines: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)
    minor: set[str] = field(default_factory=set)
    user_choices: Collection[str] = ()
    refused: dict[str, str] = field(default_factory=dict)  # options -> the reason, in the order of the command

    def get(self, option: str, otherwise: Any = None) -> Any:
        """Return the command's value, else verl's default, else `otherwise`."""
        return self.options[option].value if option in self.options else self.defaults.get(option, otherwise)

    def is_on(self, option: str) -> bool:
        """Return the value of a switch; 1 and 0 count as True and False, null as False. Raises InputError for any other value."""
        value = self.get(option)
        if value not in (None, "", OPEN, True, False):  # 1 == True
            raise InputError(f"{self.where(option)}{option}={value!r} is not True or False; write one of these")
        return value in (True, 1)

    def number(self, option: str, otherwise: int | None = None) -> int:
        value = self.get(option, otherwise)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{self.where(option)}{option}={value!r} is not an integer")
        return value

    def first(self, *options: str) -> Any:
        """Return the value of the first of these options that the command has, or None."""
        return next((self.options[option].value for option in options if option in self.options), None)

    def where(self, option: str) -> str:
        return f"{self.options[option].place}: " if option in self.options else ""

    def note(self, option: str, reason: str, *, minor: bool = False) -> None:
        """Add a note with the reason why `option` was changed or omitted. minor: the result is the same without it."""
        value = f"={_short(self.options[option].value)}" if option in self.options else " (verl's default)"
        self.notes.append(f"{self.where(option)}{option}{value}: {reason}")
        if minor:
            self.minor.add(self.notes[-1])

    def leave_out(self, option: str, reason: str, *, to: str = "", changes: bool = False) -> None:
        """Note that `option` is left out; refuse it if that changes the algorithm, unless the user accepts it (`check`).

        to: the recipe's key, if there is one. changes: it is known that the algorithm changes.
        """
        algorithmic = changes or option.startswith(_ALGORITHMIC) or to.startswith(("algorithm.", "actor.optimizer."))
        if algorithmic and option in self.options and not {option, to} & set(self.user_choices):
            value = _short(self.options[option].value)
            instead = f"{to}=VALUE after the file, or " if to else ""
            self.refused[option] = (
                f"{self.where(option)}{option}={value}: {reason}. The recipe would compute something else: give {instead}"
                f"--accept {option} to leave the option out"
            )
            return
        self.note(option, reason)

    def check(self) -> None:
        """Raise InputError with all options that were refused."""
        if self.refused:
            every = "" if len(self.refused) == 1 else "\n" + " ".join(f"--accept {option}" for option in self.refused)
            raise InputError("\n".join(self.refused.values()) + every)

    def _take_arguments(self, name: str, value: Any) -> None:
        """Set an argument of the reward function; null and empty text are values, and a mapping has several."""
        if isinstance(value, dict):
            for part, item in value.items():
                self._take_arguments(f"{name}.{part}" if name else str(part), item)
        else:
            self.settings[f"reward.arguments.{name}"] = value

    def drop(self, prefix: str, reason: str = "") -> None:
        """Remove the settings that start with `prefix`. With a reason, add a note for each."""
        for key in [key for key in self.settings if key.startswith(prefix)]:
            value = self.settings.pop(key)
            if reason and value:
                self.notes.append(f"{key}={value}: omitted, {reason}")

    def apply(self, table: Sequence[Option], unread: Mapping[str, str] = MappingProxyType({})) -> None:
        """Convert all options by `table`. Options that it lacks get a note.

        unread: reasons why verl does not read an option in this run, by option.
        """
        for name in [*self.options, *(name for name in self.defaults if name not in self.options)]:
            option = next((row for row in table if fnmatch.fnmatchcase(name, row.verl)), None)
            if option is None and name.startswith("data.") and "data.custom_cls.path" in self.options:
                self.note(name, "the dataset class reads it")
            elif option is None:
                near = difflib.get_close_matches(name, [row.verl for row in table], n=1, cutoff=0.85)
                reason = f"unknown option{f'; nearest: {near[0]}' if near else ', omitted'}"
                self.leave_out(name, reason, changes=bool(near) or not name.startswith(_HARMLESS))
            elif option.to is None and self.get(name) in option.same:
                continue
            elif name in unread:
                self.note(name, f"not used: {unread[name]}", minor=True)
            elif option.changes and not option.names:
                self.leave_out(name, f"no counterpart: {option.remark}", changes=True)
            elif option.to is None:
                if name in self.options:
                    self.note(name, f"no counterpart: {option.remark}", minor=not option.differs)
            elif not option.derived:
                self._take(name, option)

    def _take(self, name: str, option: Option) -> None:
        value = self.get(name)
        assert option.to is not None
        if option.to == "reward.arguments.*":
            self._take_arguments(name.partition("reward_kwargs.")[2], value)
            return
        if value == OPEN:
            self.settings[option.to], self.origins[option.to] = value, name
            return
        if value == "":
            raise InputError(f"{self.where(name)}{name}= has no value")
        if option.names and (value is not None or None in option.names):
            key = value if isinstance(value, (str, bool, type(None))) else str(value)
            if key not in option.names:
                supported = ", ".join(map(str, option.names))
                reason = f"this value has no counterpart; supported: {supported}"
                reason += f"; {option.remark}" if option.changes else ""
                self.leave_out(name, reason, to=str(option.to), changes=option.changes)
                return
            value = option.names[key]
        elif value is None:
            if name in self.options and self.defaults.get(name) is not None:
                self.note(name, f"{option.to} has megarl's default")
            return
        to = option.to
        if to.endswith(".betas") and isinstance(value, str):
            value = yaml.safe_load(value)  # in quotes
        if to.endswith(".*"):
            to = to[:-1] + name[len(option.verl) - 1 :]
        if option.to.removesuffix("s").endswith("_file") or to == "lora.targets":
            value = value if isinstance(value, list) else [value]
        if to in self.settings and self.settings[to] != value:
            if name not in self.options:
                return  # a default does not replace an option of the command
            self.note(self.origins[to], f"not used: {name} also sets {to}")
        self.settings[to], self.origins[to] = value, name


def _short(value: Any) -> str:
    return cut_end(str(value).replace("\n", " "), 60)
