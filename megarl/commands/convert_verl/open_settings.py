"""Options with a placeholder (``/path/to/model``) or with a variable in their value that the script does not set.

Paths become ``???`` in the recipe, which `read_recipe` refuses until the user gives a value. So do counts of devices. Names lose
the variable, as in bash; a placeholder as name is left out. Options that the conversion leaves out keep it. Any other value with a variable is an error.
"""

from __future__ import annotations

import fnmatch
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.option import Option
from megarl.commands.convert_verl.shell.pasted import is_placeholder
from megarl.commands.convert_verl.shell.values import Undetermined, absent_names, combined, without_absent
from megarl.errors import InputError, command_name
from megarl.platform.device_table import DEVICES_OF, device_of_machine, devices
from megarl.recipe.load import OPEN
from megarl.registry import did_you_mean

MACHINE = "MACHINE"  # in the recipe's head, instead of an unknown name
_PATHS = (
    "model.path", "model.tokenizer", "critic.model_path", "data.train_files", "data.eval_files", "teacher.path", "reward.remote.model",
    "agent.loop",
)  # fmt: skip
_WITH_PLACEHOLDERS = ("reward.function", "cluster.trainers")  # open for a placeholder, but not for a variable
_FILES, _FORMATS = ("data.train_files", "data.eval_files"), (".parquet", ".jsonl")
_NAMES = ("name", "observe.project")
_DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")


def set_aside(conversion: Conversion, table: Sequence[Option], absences: Mapping[str, Undetermined]) -> None:
    """Replace the values of options that contain a variable without a value, as the module describes.

    absences: the errors about these variables, by name. Raises Undetermined with all variables that need a value.
    """
    errors: list[Undetermined] = []
    has_class = "data.custom_cls.path" in conversion.options  # it reads files of any format
    for name, option in list(conversion.options.items()):
        row = next((row for row in table if fnmatch.fnmatchcase(name, row.verl)), None)
        to = (row.to or "").split(", ")[0] if row else ""
        texts = list(_texts(option.value))
        names = [each for text in texts for each in absent_names(text)]
        unreadable = to in _FILES and not has_class and not all(text.endswith(_FORMATS) for text in texts)
        is_open = to in (*_PATHS, *_NAMES, *_WITH_PLACEHOLDERS) and any(
            is_placeholder(text) and not _exists(text) for text in texts
        )
        if not (names or unreadable or is_open or (texts == [""] and to in _PATHS)):
            continue
        shown = _shown(option.value)
        if to in _PATHS or name in _DEVICES or (is_open and to not in _NAMES):
            conversion.options[name] = replace(option, value=OPEN)
            reason = f", not {', '.join(_FORMATS)}" if unreadable and not (names or is_open) else ""
            conversion.open[name] = f"{shown}{reason}"
        elif to in _NAMES and not names:
            conversion.note(name, f"omitted, a placeholder; set {to}")
            del conversion.options[name]
        elif to in _NAMES:
            conversion.options[name] = replace(option, value=without_absent(texts[0], "").strip("-_/ "))
            conversion.note(name, f"without {', '.join(f'${each}' for each in names)}, which the script does not set")
        elif not to and name not in ("model_engine", "actor_rollout_ref.actor.strategy"):
            conversion.options[name] = replace(option, value=shown)
        else:
            errors += [absences[each] for each in names]
    if errors:
        raise combined(errors)


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _texts(value: Any) -> Iterator[str]:
    """Iterate over the texts in a value of Hydra."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return without_absent(value) if isinstance(value, str) else value


def open_notes(conversion: Conversion) -> list[str]:
    """Return a note for each open setting."""
    notes = []
    for key, value in conversion.settings.items():
        if value == OPEN:
            # A number of processes follows from numbers of devices, which may be several options.
            origins = [conversion.origins[key]] if key in conversion.origins else list(_DEVICES)
            options = ", ".join(f"{name}={conversion.open[name]}" for name in origins if name in conversion.open)
            notes.append(
                f"{key}=???: set it before the run; the script leaves it open: {options or 'it has no option for it'}"
            )
    return notes


def machine_notes(conversion: Conversion, machine: str | None) -> list[str]:
    """Return a note about the line ``# Hardware:`` in the recipe's head, if it is incomplete. Raises InputError for an unknown machine."""
    if machine is not None and device_of_machine(machine) is None:
        names = [*DEVICES_OF, *(name for name in devices() if name not in DEVICES_OF)]
        raise InputError(
            f"--machine {machine}: plan has no such machine{did_you_mean(machine, names)} Give one of {', '.join(names)}."
        )
    if machine is not None and conversion.machines is None:
        return [
            f"--machine {machine}: not used, the numbers of machines and of their devices do not follow from the script"
        ]
    if machine is not None or conversion.machines is None:
        return []
    return [
        f"# Hardware: {MACHINE}: the script does not name its machines; write it there, or convert with --machine NAME "
        "(such as H100 or 910B); then plan needs no --device"
    ]


def expand_home(settings: dict[str, Any], home: str) -> list[str]:
    """Replace ``~`` at the start of the `settings`, which bash leaves in an argument. Return a note if there was one."""
    names = [key for key, value in settings.items() if any(_starts_at_home(item) for item in _items(value))]
    for key in names:
        value = settings[key]
        changed = [home + item[1:] if _starts_at_home(item) else item for item in _items(value)]
        settings[key] = changed if isinstance(value, list) else changed[0]
    return [f"{', '.join(names)}: ~ is {home}, as on the machine of this conversion"] if names else []


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _starts_at_home(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("~/")


def next_command(recipe: str, out: Path) -> str:
    """Return what to do next with the text of a converted recipe, which is in the file `out`."""
    command = f"{command_name()} plan {shlex.quote(str(out))}"
    if f"# Hardware: {MACHINE}," in recipe:
        command += " --device NAME (such as H100 or 910B)"
    is_open = any(line.endswith(OPEN) for line in recipe.splitlines() if not line.startswith("#"))
    return f"write the values that are {OPEN}, then {command}" if is_open else command


def stand_ins(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the open `settings` by dotted key, with which the rest of the recipe can be checked."""
    sizes = [settings.get(f"{section}.{name}_parallel") or 1 for section in ("megatron", "critic.megatron") for name in (
        "tensor", "context", "pipeline", "expert", "expert_tensor")]  # fmt: skip
    engine = int(settings.get("rollout.tensor_parallel") or 1) * int(settings.get("rollout.data_parallel") or 1)
    devices = math.prod(int(size) for size in sizes) * engine
    values: dict[str, Any] = {
        "cluster.trainers": devices, "critic.trainers": devices, "rollout.engines": devices // engine,
        "data.train_files": ["stand-in.parquet"], "data.eval_files": ["stand-in.parquet"],
        "reward.remote.url": "http://stand-in/classify",
        "reward.function": "stand_in:score",
    }  # fmt: skip
    return {key: values.get(key, "stand-in") for key, value in settings.items() if value == OPEN}
