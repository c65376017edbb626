"""Entry point of ``python -m megarl convert-config``: convert a verl script or command line to a recipe."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl import engines
from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.atomic_files import check_new, write_atomically
from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.fully_async import FULLY_ASYNC, FULLY_ASYNC_DEFAULTS
from megarl.commands.convert_verl.gkd import GKD, GKD_DEFAULTS
from megarl.commands.convert_verl.hydra.config_files import read_config, resolve_references
from megarl.commands.convert_verl.hydra.overrides import OptionValue, read_options, value_of
from megarl.commands.convert_verl.open_settings import (
    MACHINE,
    expand_home,
    machine_notes,
    next_command,
    open_notes,
    set_aside,
    stand_ins,
)
from megarl.commands.convert_verl.option import Option
from megarl.commands.convert_verl.sampling import ASYNC_FLOW, ASYNC_FLOW_DEFAULTS, PARTIAL_ROLLOUT
from megarl.commands.convert_verl.sft import OPTIM_DEFAULTS, SFT, SFT_DEFAULTS, translate_sft
from megarl.commands.convert_verl.shell.parser import Command, read_command
from megarl.commands.convert_verl.shell.pasted import with_quoted_placeholders, without_fences
from megarl.commands.convert_verl.shell.values import ScriptContext, absent_names
from megarl.commands.convert_verl.table import ACTOR, DEFAULTS, LOSS_MODE, RL, TRAINER
from megarl.commands.convert_verl.table import LOSSES as LOSS_MODES
from megarl.commands.convert_verl.trainers import devices_of, machines_of
from megarl.commands.convert_verl.translate import evaluates_alone, translate_rl
from megarl.commands.convert_verl.unread_options import unread_options
from megarl.errors import InputError, RecipeError
from megarl.hf import published
from megarl.megatron.layout import check_layout
from megarl.preflight.load import load_recipe
from megarl.preflight.recipe.megatron_extra import refusal_of_extra
from megarl.recipe.derived.megatron_ddp import refusal_of_ddp
from megarl.recipe.key import RecipeDumper, is_text
from megarl.recipe.load import OPEN, UNKNOWN_KEY
from megarl.recipe.schema import Recipe
from megarl.recipe.text import settings_of
from megarl.registry import did_you_mean

_OF_KIND: dict[str, tuple[list[Option], dict[str, Any]]] = {
    "fully_async": (FULLY_ASYNC, FULLY_ASYNC_DEFAULTS),
    "partial_rollout": (PARTIAL_ROLLOUT, DEFAULTS),
    "distillation": (GKD, DEFAULTS | GKD_DEFAULTS),
    "async_flow": (ASYNC_FLOW, DEFAULTS | ASYNC_FLOW_DEFAULTS),
}
"""Options of a kind of RL trainer that precede the tables, and its defaults."""


_MINOR = "without effect on what the run computes:"
_ENGINE_ARGS = "rollout.engine_args."


@dataclass(frozen=True)
class Converted:
    """The text of a recipe, and its notes, which the text also has as comments at the top.

    minor: the last notes, of options without counterpart that change nothing in the result.
    """

    text: str
    notes: list[str]
    minor: frozenset[str] = frozenset()


def convert(
    text: str,
    arguments: Sequence[str] = (),
    *,
    rows: int | None = None,
    accepted: Collection[str] = (),
    source: str = "a command line",
    machine: str | None = None,
    context: ScriptContext | None = None,
) -> Converted:
    """Convert the training command in `text` to a recipe. The text is parsed, never run.

    arguments: "NAME=value" sets a shell variable; "dotted.key=value" is a setting that overrides the command's.
    rows: number of rows of training data, to convert epochs to steps; None: unknown.
    accepted: options of the algorithm that may be left out.
    machine: its name in the recipe's line ``# Hardware:``, which `plan` reads; None: left open, with a note.
    context: see `read_command`.
    Raises InputError if a value cannot be determined, or if the resulting recipe is invalid.
    """
    pairs = [_pair(argument) for argument in arguments]
    variables = {name: value for name, value in pairs if "." not in name}
    overrides = {name: _setting(name, value) for name, value in pairs if "." in name}
    chosen = {key: str(value) for key, value in overrides.items() if key in ("algorithm.advantage", "algorithm.loss")}
    context = context or ScriptContext()
    unfenced, fences = without_fences(text)
    text = with_quoted_placeholders(unfenced)
    command = read_command(text, variables, context)
    options, flags = read_options(command.arguments)
    config = read_config(flags, command, context)
    options = config.options | options
    _check_names(text, variables, accepted, options)
    user_choices = frozenset({*overrides, *accepted})
    conversion = _translated(command, config.base, options, user_choices, chosen, rows=rows)
    conversion.check()
    for name, value in conversion.settings.items():
        if _is_number(value) and is_text(Recipe, name):  # scripts have no types, and recipes refuse a number for a text
            conversion.settings[name] = str(value)
    conversion.settings |= overrides
    conversion.notes += expand_home(conversion.settings, variables.get("HOME", context.home))
    _drop_unused(conversion, overrides.keys())
    _drop_rejected(conversion, overrides.keys())
    _note_model(conversion)
    _note_exports(conversion, text)
    conversion.notes += [*fences, *command.notes, *config.notes]
    conversion.notes.sort(key=lambda note: (note in conversion.minor, _line(note)))
    conversion.notes[:0] = [*open_notes(conversion), *machine_notes(conversion, machine)]
    return Converted(_recipe(conversion, source, machine), conversion.notes, frozenset(conversion.minor))


def _check_names(text: str, variables: Collection[str], accepted: Collection[str], options: Collection[str]) -> None:
    """Raise InputError for a variable that the script lacks, or an accepted option that the command lacks."""
    for name in accepted:
        if name not in options:
            raise InputError(f"--accept {name}: the command has no such option{did_you_mean(name, options)}")
    assigned = set(re.findall(r"(?:^|[\s;&|(])([A-Za-z_]\w*)\+?=", text)) - set(options)
    names = assigned | set(re.findall(r"\$[{#!]*([A-Za-z_]\w*)", text))
    for name in variables:
        if name not in names and name != "HOME" and not name.isdigit():
            raise InputError(f"{name}=...: the script has no such variable{did_you_mean(name, sorted(names))}")


def _translated(
    command: Command,
    config: str,
    options: dict[str, OptionValue],
    user_choices: frozenset[str],
    chosen: Mapping[str, str],
    *,
    rows: int | None,
) -> Conversion:
    """Apply the tables and the derived settings. config: the name of verl's configuration file. chosen: advantage and loss that the user sets."""
    entry = command.entry
    if entry.kind == "sft":
        optim = OPTIM_DEFAULTS.get(str(options["optim"].value) if "optim" in options else "", {})
        resolve_references(options, SFT_DEFAULTS[entry.module])
        conversion = Conversion(options, SFT_DEFAULTS[entry.module] | optim, user_choices=user_choices)
        set_aside(conversion, [*SFT, *TRAINER], command.absences)
        conversion.apply([*SFT, *TRAINER])
        translate_sft(conversion, processes=_processes(command, conversion), rows=rows)
        return conversion
    first, defaults = _OF_KIND.get(entry.kind, ([], DEFAULTS))
    resolve_references(options, defaults | dict(entry.defaults))
    conversion = Conversion(options, defaults | dict(entry.defaults), user_choices=user_choices)
    table = [*first, *RL, *TRAINER]
    set_aside(conversion, table, command.absences)
    engine = conversion.get("model_engine")
    groups = f"{config} {conversion.get(f'actor@{ACTOR}', '')}"
    megatron = engine == "megatron" or "megatron" in groups or "mlite" in groups
    megatron = megatron or conversion.get(f"{ACTOR}.strategy") == "megatron"
    fixed: dict[str, Any] = {**entry.settings, **chosen}
    loss = fixed.get("algorithm.loss") or LOSS_MODES.get(str(conversion.get(LOSS_MODE, "vanilla")), "")
    critic = (fixed.get("algorithm.advantage") or conversion.get("algorithm.adv_estimator")) == "gae"
    trains = not evaluates_alone(conversion)
    unread = unread_options(conversion.options, megatron=megatron, loss=loss, critic=critic, trains=trains)
    conversion.apply(table, unread)
    conversion.settings |= fixed  # other settings depend on them
    conversion.notes += entry.notes
    translate_rl(conversion, megatron=megatron, kind=entry.kind, rows=rows)
    return conversion


def _note_exports(conversion: Conversion, text: str) -> None:
    """Add a note about exported variables that the script does not read itself."""
    exported = re.findall(r"^\s*export\s+([A-Za-z_]\w*)=", text, re.MULTILINE)
    names = {name for name in exported if not re.search(rf"\${{?{name}\b", text)}
    if names:
        conversion.notes.append(
            f"exported variables are not part of the recipe (cluster.environment.all sets some): {', '.join(sorted(names))}"
        )


def _line(note: str) -> int:
    """Return the line number of a note, for sorting. Notes without a line come last."""
    match = re.match(r"line (\d+):", note)
    return int(match[1]) if match else 1 << 30


def convert_file(
    file: str,
    arguments: Sequence[str],
    *,
    out: Path | None,
    rows: int | None,
    accepted: Collection[str] = (),
    machine: str | None = None,
) -> None:
    """Convert `file` ("-": standard input) and write the recipe to `out` or standard output, and notes to stderr.

    Raises InputError if `file` cannot be read, and ValueError if `out` exists or its folder cannot be written.
    """
    if out is not None:
        check_new("--out", out)
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        first = ": the script comes first, then variables and settings" if "=" in file else f": {error}"
        raise InputError(f"{file} cannot be read{first}") from error
    source, context = ("a command line", ScriptContext()) if file == "-" else (Path(file).name, ScriptContext(file))
    converted = convert(text, arguments, rows=rows, accepted=accepted, source=source, machine=machine, context=context)
    for line in _listed(converted.notes, converted.minor):
        print(line, file=sys.stderr)
    if out is None:
        print(converted.text, end="")
    else:
        write_atomically(out, converted.text.encode())
        print(f"wrote {out}\nnext: {next_command(converted.text, out)}", file=sys.stderr)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is neither NAME=value (a shell variable) nor section.key=value (a recipe setting)")
    return name, value


def _setting(name: str, text: str) -> Any:
    value = value_of(text, 0)
    if _is_number(value) and is_text(Recipe, name):
        return text
    return [value] if name.startswith("data.") and name.endswith("_files") and isinstance(value, str) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _processes(command: Command, conversion: Conversion) -> int | str:
    """Return the number of training processes on all nodes, torchrun's or Ray's, or OPEN, and set the machines."""
    if command.entry.module == "sft_trainer_ray":
        pool = ("trainer.nnodes", "trainer.n_gpus_per_node")
        conversion.machines = machines_of([(conversion.get(pool[0]), conversion.get(pool[1]))])
        return devices_of(conversion, pool)
    launcher = " ".join(command.launcher)
    counts = {"nproc[_-]per[_-]node": 1, "nnodes": 1}
    for flag in counts:
        if match := re.search(rf"--{flag}[= ](\S+)", launcher):
            if absent_names(match[1]):
                return OPEN
            if not match[1].isdigit():
                raise InputError(f"line {command.line}: --{flag.replace('[_-]', '_')}={match[1]} is not a number")
            counts[flag] = int(match[1])
    per_node, nodes = counts.values()
    conversion.machines = machines_of([(nodes, per_node)])
    return nodes * per_node


def _drop_unused(conversion: Conversion, kept: Collection[str]) -> None:
    """Remove settings that the chosen advantage and loss do not use, except the settings `kept`."""
    settings = conversion.settings
    advantage = str(settings.get("algorithm.advantage", "grpo"))
    loss = str(settings.get("algorithm.loss", "ppo_clip"))
    if advantage not in ADVANTAGES or loss not in LOSSES:
        return  # `_recipe` raises
    used = {*ADVANTAGES[advantage].settings, *LOSSES[loss].settings}
    for name in sorted(
        {name for registry in (ADVANTAGES, LOSSES) for key in registry.names() for name in registry[key].settings}
    ):
        if name not in used and f"algorithm.{name}" in settings.keys() - kept:
            del settings[f"algorithm.{name}"]
            if (origin := conversion.origins.get(f"algorithm.{name}")) in conversion.options:
                conversion.note(str(origin), f"omitted: {advantage} and {loss} do not use algorithm.{name}")


def _drop_rejected(conversion: Conversion, kept: Collection[str]) -> None:
    """Remove Megatron fields that other settings determine, and engine arguments that the installed engine rejects.

    The settings `kept` are not removed.
    """
    for key, value in [item for item in conversion.settings.items() if item[0] not in kept]:
        section, _, name = key.rpartition(".extra.")
        refusal = refusal_of_extra(name, section) if section else None
        if ".ddp." in key:
            refusal = refusal_of_ddp(key.rpartition(".ddp.")[2])
        if refusal:
            del conversion.settings[key]
            conversion.notes.append(f"{key}={value}: omitted, {refusal[0]}; {refusal[1]}")
    try:
        engine = engines.arguments_of(str(conversion.settings.get("rollout.engine", "vllm")))
    except ValueError:
        return  # an unknown engine, which the user chose: the preflight of a run reports it
    for top in dict.fromkeys(key.split(".")[2] for key in conversion.settings if key.startswith(_ENGINE_ARGS)):
        _drop_rejected_argument(conversion, engine, top, kept)


def _drop_rejected_argument(
    conversion: Conversion, engine: engines.EngineArguments, top: str, kept: Collection[str]
) -> None:
    """Remove the keys of the engine argument `top` that the engine rejects, or all of them if the rest is rejected without these."""
    settings, key_of_top = conversion.settings, f"{_ENGINE_ARGS}{top}"
    while keys := [key for key in settings if f"{key}.".startswith(f"{key_of_top}.")]:
        try:
            engine.check_engine_args(_nested({key: settings[key] for key in keys})["rollout"]["engine_args"])
            return
        except ValueError as error:
            # Messages without a key of their own start with it.
            named = error.key if isinstance(error, RecipeError) else str(error).split()[0].rstrip(":")
            reason = f"{error.problem}; {error.remedy}" if isinstance(error, RecipeError) else str(error)
        removable = [key for key in keys if key not in kept]
        if not removable or named in kept:
            return  # the preflight of a run reports the user's own settings
        wrong = [key for key in removable if f"{key}.".startswith(f"{named}.")]
        for key in wrong or removable:
            where = f"{named}: " if key != named and not reason.startswith(named) else ""
            conversion.notes.append(f"{key}={settings.pop(key)}: omitted, {where}{reason}")


def _note_model(conversion: Conversion) -> None:
    """Add a note if the layout does not fit a published model."""
    path = str(conversion.settings.get("model.path", ""))
    name = path.rstrip("/").rsplit("/", 1)[-1]
    if name not in published.names():
        return
    try:
        recipe = _load(_nested(conversion.settings | stand_ins(conversion.settings)))
        check_layout(published.read(name), recipe.megatron, recipe.cluster.trainers)
    except RecipeError:
        return  # `_recipe` reports it
    except ValueError as error:
        conversion.notes.append(f"the layout does not fit {name}: {error}")


def _recipe(conversion: Conversion, source: str, machine: str | None) -> str:
    """Return the recipe as YAML, without settings that equal megarl's defaults. Raises InputError if it does not load."""
    defaults = settings_of(Recipe())
    loss = str(conversion.settings.get("algorithm.loss", "ppo_clip"))
    if loss in LOSSES:  # otherwise `_load` raises
        defaults |= {f"algorithm.{name}": value for name, value in LOSSES[loss].defaults.items()}
    if conversion.settings.get("rollout.quantization") is not None:
        defaults.pop("algorithm.correction.weights")  # quantized engines change it (`apply_quantization`)
    changed = {
        key: value for key, value in conversion.settings.items() if key not in defaults or value != defaults[key]
    }
    content = _nested(changed)
    try:
        _load(_nested(changed | stand_ins(conversion.settings)))
    except RecipeError as error:
        error.origin = None  # a temporary file that no longer exists
        add = "" if error.problem == UNKNOWN_KEY else f"\n  Add the setting after the file, as in {error.key}=VALUE."
        raise InputError(f"the command results in an invalid recipe:{error}{add}") from error
    head = [f"# Converted from {source} by megarl convert-config. Options that were changed or omitted:"]
    # A line break in a note would end its comment.
    head += [f"#   {' '.join(line.split())}" for line in _listed(conversion.notes, conversion.minor)] or ["#   nothing"]
    if conversion.machines:
        head.append(f"# Hardware: {machine or MACHINE}, {conversion.machines[0]} x {conversion.machines[1]}")
    body = yaml.dump(content, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True)
    text = "\n".join(head) + "\n" + body
    assert yaml.safe_load(text) == yaml.safe_load(body), f"the notes are not comments:\n{text}"
    if names := absent_names(text):
        raise InputError(f"the script does not set ${names[0]}: add {names[0]}=VALUE after the file")
    return text


def _listed(notes: Sequence[str], minor: Collection[str]) -> list[str]:
    """Return the notes with a heading in front of the minor ones."""
    first = [note for note in notes if note not in minor]
    return [*first, _MINOR, *notes[len(first) :]] if len(first) < len(notes) else first


def _load(content: Mapping[str, Any]) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.dump(dict(content), Dumper=RecipeDumper, sort_keys=False, allow_unicode=True))
        return load_recipe(path)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested sections, in the order of the schema."""
    order = list(Recipe.__dataclass_fields__)
    nested: dict[str, Any] = {}
    if unknown := [key for key in settings if key.split(".")[0] not in order]:
        raise InputError(
            f"{unknown[0]} is not a setting of a recipe. Give settings of the recipe or variables of the script after the file; change "
            "verl's options in the script"
        )
    for key in sorted(settings, key=lambda key: order.index(key.split(".")[0])):
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = settings[key]
    return nested
