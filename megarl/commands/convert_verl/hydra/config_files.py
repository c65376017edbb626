"""Configuration files of the user that --config-name names. Their options come before the command's.

verl's own files are not read: the tables have their defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.convert_verl.hydra.overrides import ConfigFlags, OptionValue, leaves
from megarl.commands.convert_verl.shell.parser import Command
from megarl.commands.convert_verl.shell.values import ScriptContext, absent_names, combined, without_absent
from megarl.errors import InputError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")

VERLS_FILES = frozenset({
    "ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "one_step_off_ppo_trainer",
    "one_step_off_ppo_megatron_trainer", "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer",
    "fully_async_dapo_trainer", "transfer_queue_ppo_trainer", "transfer_queue_ppo_megatron_trainer", "fully_async", "async_grpo",
    "dapo_trainer", "dapo_megatron_trainer", "dapo_transfer_queue_trainer", "dynamo_trainer", "entropy_trainer", "gvpo_trainer",
    "sppo_trainer", "on_policy_distill_trainer", "rep_exp_trainer", "spo_trainer",
})  # fmt: skip
"""Files of verl and verl-recipe with the defaults of `entry_points.py` and the tables."""


@dataclass(frozen=True)
class ConfigFile:
    """The options of a configuration file.

    base: the file of verl at its root, or the name that the command gives. file: the user's file; None: verl's.
    """

    base: str
    options: dict[str, OptionValue]
    notes: tuple[str, ...] = ()
    file: Path | None = None


def read_config(flags: ConfigFlags, command: Command, context: ScriptContext) -> ConfigFile:
    """Return the options of the file that --config-name names: none for a file of verl.

    Raises InputError if a file of the user is not on this machine or cannot be converted.
    """
    name = _stem(flags.name)
    if not name or (not absent_names(name) and name in VERLS_FILES):
        return ConfigFile(name, {})
    if names := absent_names(f"{flags.name}{flags.path}{flags.folder}"):
        raise combined([command.absences[each] for each in names])
    folders = list(_folders(flags, command, context))
    candidates = (folder / f"{name}.yaml" for folder in (*folders, *_beside_script(flags, context)))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        searched = f"{folders[0] / name}.yaml" if folders else f"{name}.yaml in an unknown folder"
        raise InputError(
            f"line {flags.line}: --config-name={flags.name} is a configuration file of yours, and its options belong to the run, "
            f"but {searched} does not exist: convert in the folder where the script runs, or copy the file there"
        )
    options: dict[str, OptionValue] = {}
    base = _read(file, options, ())
    note = f"line {flags.line}: --config-name={flags.name}: the options of {file}"
    if file.parent not in folders:
        note += f", because {flags.folder or flags.path} does not exist here: check that it is the same file"
    return ConfigFile(base or name, options, (note,), file)


def _stem(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


def _folders(flags: ConfigFlags, command: Command, context: ScriptContext) -> Iterator[Path]:
    """Iterate over the folders that may have the file. A relative path is relative to the trainer's file, as in Hydra."""
    current = Path(context.folder)
    script = Path(context.script).absolute().parent if context.script else None
    parents = [script, *script.parents] if script else []
    module = Path(command.trainer.removesuffix(".py").replace(".", "/")).parent
    for text in (path for path in (flags.folder, flags.path) if path):
        path = Path(text)
        if path.is_absolute():
            yield path
            if path.is_relative_to(current):  # a script that was written for another current folder
                yield from (parent / path.relative_to(current) for parent in parents)
        else:
            yield from (root / module / path for root in (current, *parents))
            yield from (root / path for root in (current, *parents))
    if not flags.path:
        yield current / module / "config"


def _beside_script(flags: ConfigFlags, context: ScriptContext) -> Iterator[Path]:
    """Iterate over folders near the script whose path ends as the command's does: for BASE/recipe/x/config and a script in recipe/x, the
    folder config beside the script. Folders with more equal parts come first."""
    script = Path(context.script).absolute().parent if context.script else None
    parts = Path(flags.folder or flags.path).parts
    if script:
        for start in range(1, len(parts)):
            yield from (parent.joinpath(*parts[start:]) for parent in (script, *script.parents))


def _read(file: Path, options: dict[str, OptionValue], readers: tuple[Path, ...]) -> str:
    """Add the options of `file`, and before them the ones of the files in its defaults list. Returns verl's file among these."""
    from omegaconf import OmegaConf

    if file in readers:
        raise InputError(f"{file}: its defaults name the file itself")
    try:
        content = OmegaConf.load(file)
        plain: Any = OmegaConf.to_container(content, resolve=False)
    except Exception as error:
        raise InputError(f"{file} cannot be read as YAML: {type(error).__name__}: {error}") from error
    if not isinstance(plain, dict):
        raise InputError(f"{file} has no options, but {type(plain).__name__}")
    defaults = plain.pop("defaults", None) or []
    plain.pop("hydra", None)
    base = ""
    if "_self_" not in defaults:
        defaults = [*defaults, "_self_"]
    for entry in defaults:
        if entry == "_self_":
            options |= _own(file, plain)
        elif isinstance(entry, str) and _stem(entry.rpartition("/")[2]) in VERLS_FILES:
            base = _stem(entry.rpartition("/")[2])
        elif isinstance(entry, str) and (file.parent / f"{_stem(entry)}.yaml").is_file():
            base = _read(file.parent / f"{_stem(entry)}.yaml", options, (*readers, file)) or base
        elif isinstance(entry, Mapping) and len(entry) == 1:
            group, value = next(iter(entry.items()))
            options[str(group).removeprefix("override ").lstrip("/")] = OptionValue(value, 0, file.name)
        else:
            raise InputError(f"{file}: its defaults name {entry!r}, which is not in its folder and not a file of verl")
    return base


def _own(file: Path, content: Mapping[str, Any]) -> dict[str, OptionValue]:
    """Return the options that the file sets itself, without names of verl's own configuration classes."""
    return {
        name: OptionValue(value, 0, file.name)
        for name, value in leaves("", content)
        if not (name.endswith("._target_") and str(value).startswith("verl."))
    }


def resolve_references(options: dict[str, OptionValue], defaults: Mapping[str, Any]) -> None:
    """Replace values of the form ``${name}`` by the value of the option `name`, else by verl's default.

    Raises InputError for any other reference.
    """
    for name, option in options.items():
        value, seen = option.value, {name}
        while isinstance(value, str) and (match := _REFERENCE.fullmatch(value)) and match[1] not in seen:
            seen.add(match[1])
            value = options[match[1]].value if match[1] in options else defaults.get(match[1], value)
        if option.file and "${" in str(value):
            raise InputError(
                f"{option.file}: {name}={without_absent(str(value))} refers to other options of verl; write the value instead"
            )
        options[name] = replace(option, value=value)
