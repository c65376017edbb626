"""``python -m megarl convert-config``: a verl script or command line as a recipe."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.commands.convert_verl.parser import TRAINERS, Command, read_command
from megarl.commands.convert_verl.sheet import Sheet, read_options, value_of
from megarl.commands.convert_verl.table import DEFAULTS, RL, SFT, SFT_DEFAULTS, TRAINER
from megarl.commands.convert_verl.translate import translate_rl, translate_sft
from megarl.engines.vllm.args import check_engine_args
from megarl.errors import InputError, RecipeError
from megarl.hf import published
from megarl.megatron.layout import check_layout
from megarl.preflight.load import load_recipe
from megarl.preflight.recipe.megatron_extra import refusal_of_extra
from megarl.recipe.load import flat_settings, to_yaml
from megarl.recipe.megatron_ddp import refusal_of_ddp
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class Converted:
    """A recipe's text, with the notes as comments at its head."""

    text: str
    notes: list[str]


def convert(
    text: str, given: Sequence[str] = (), *, rows: int | None = None, source: str = "a command line"
) -> Converted:
    """The recipe of the training command in `text`, which is read and never run.

    given: "NAME=value" of shell variables, and "dotted.key=value" of settings, which win over the command's.
    rows: of the training data, from which epochs become steps.
    Raises InputError for what would have to be guessed, and where the recipe that results cannot be run.
    """
    pairs = [_pair(one) for one in given]
    variables = {"HOME": os.path.expanduser("~"), **{name: value for name, value in pairs if "." not in name}}
    command = read_command(text, variables)
    options, config = read_options(command.arguments)
    kind = TRAINERS.search(command.trainer)
    assert kind
    if kind[1] in SFT_DEFAULTS:
        sheet = Sheet(options, SFT_DEFAULTS[kind[1]])
        sheet.apply([*SFT, *TRAINER])
        translate_sft(sheet, processes=_processes(command), rows=rows)
    else:
        sheet = Sheet(options, DEFAULTS)
        sheet.apply([*RL, *TRAINER])
        megatron = "megatron" in config or sheet.get("actor_rollout_ref.actor.strategy") == "megatron"
        translate_rl(sheet, megatron=megatron, ahead="one_step_off" in command.trainer, rows=rows)
    _leave_out_unread(sheet)
    _leave_out_refused(sheet)
    sheet.settings |= {name: _setting(name, value) for name, value in pairs if "." in name}
    _say_what_else(sheet)
    sheet.notes.sort(key=_line)
    return Converted(_recipe(sheet, source), sheet.notes)


def _line(note: str) -> int:
    """Notes that no line of the command is behind come last."""
    found = re.match(r"line (\d+):", note)
    return int(found[1]) if found else 1 << 30


def convert_file(file: str, given: Sequence[str], *, out: Path | None, rows: int | None) -> None:
    """Read `file` ("-": standard input) and write the recipe to `out`, or standard output; notes go to stderr.

    Raises InputError for a file that cannot be read or would be overwritten.
    """
    if out is not None and out.exists():
        raise InputError(f"{out} is there already: name another file with --out, or remove it")
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    converted = convert(text, given, rows=rows, source="a command line" if file == "-" else Path(file).name)
    for note in converted.notes:
        print(note, file=sys.stderr)
    if out is None:
        print(converted.text, end="")
    else:
        out.write_text(converted.text)
        print(f"wrote {out}", file=sys.stderr)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is neither NAME=value of a shell variable nor a.key=value of the recipe")
    return name, value


def _setting(name: str, text: str) -> Any:
    value = value_of(text, 0)
    return [value] if name.startswith("data.") and name.endswith("_files") and isinstance(value, str) else value


def _processes(command: Command) -> int:
    """torchrun's processes of all nodes."""
    said = " ".join(command.launcher)
    count = 1
    for flag in ("nproc[_-]per[_-]node", "nnodes"):
        if found := re.search(rf"--{flag}[= ](\S+)", said):
            if not found[1].isdigit():
                raise InputError(f"line {command.line}: --{flag.replace('[_-]', '_')}={found[1]} is no number")
            count *= int(found[1])
    return count


def _leave_out_unread(sheet: Sheet) -> None:
    """Settings of other advantages and losses than the chosen ones, verl's defaults among them."""
    settings = sheet.settings
    advantage, loss = settings.get("algorithm.advantage", "grpo"), settings.get("algorithm.loss", "ppo_clip")
    read = {*ADVANTAGES[advantage].settings, *LOSSES[loss].settings}
    for name in {
        one for registry in (ADVANTAGES, LOSSES) for key in registry.names() for one in registry[key].settings
    }:
        if name not in read and f"algorithm.{name}" in settings:
            del settings[f"algorithm.{name}"]
            if (origin := sheet.origins.get(f"algorithm.{name}")) in sheet.given:
                sheet.note(str(origin), f"left out: {advantage} and {loss} do not read algorithm.{name}")


def _leave_out_refused(sheet: Sheet) -> None:
    """Fields of Megatron that other settings decide, and arguments that this vLLM does not have."""
    for key, value in list(sheet.settings.items()):
        section, _, name = key.rpartition(".extra.")
        refusal = refusal_of_extra(name, section) if section else None
        if ".ddp." in key:
            refusal = refusal_of_ddp(key.rpartition(".ddp.")[2])
        if refusal:
            del sheet.settings[key]
            sheet.notes.append(f"{key}={value}: left out, {refusal[0]}; {refusal[1]}")
        if key.startswith("rollout.engine_args."):
            top = key.split(".")[2]
            try:
                check_engine_args({top: value})
            except ValueError as error:
                del sheet.settings[key]
                sheet.notes.append(f"{key}={value}: left out, {error}")


def _say_what_else(sheet: Sheet) -> None:
    path = str(sheet.settings.get("model.path", ""))
    if re.fullmatch(r"[\w-]+/[\w.-]+", path):
        sheet.notes.append(f"model.path={path}: a name on the hub; model.path is a folder that holds the model")
    name = path.rstrip("/").rsplit("/", 1)[-1]
    if name not in published.names():
        return
    try:
        recipe = _load(_nested(sheet.settings))
        check_layout(published.read(name), recipe.megatron, recipe.cluster.trainers)
    except RecipeError:
        return  # said where the recipe is written
    except ValueError as error:
        sheet.notes.append(f"the layout does not fit {name}: {error}")


def _recipe(sheet: Sheet, source: str) -> str:
    """YAML that loads. Settings at megarl's own defaults are left out."""
    defaults = flat_settings(to_yaml(Recipe()))
    own = {key: value for key, value in sheet.settings.items() if key not in defaults or value != defaults[key]}
    content = _nested(own)
    try:
        _load(content)
    except RecipeError as error:
        error.origin = None  # a file that is gone
        raise InputError(
            f"the command makes a recipe that cannot be run:{error}\n  Give the setting behind the file, as in {error.key}=VALUE."
        ) from error
    head = [f"# From {source}, by megarl convert-config. What was not taken over as it stands:"]
    head += [f"#   {note}" for note in sheet.notes] or ["#   nothing"]
    return "\n".join(head) + "\n" + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _load(content: Mapping[str, Any]) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))
        return load_recipe(path)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections, in the order of the schema's."""
    order = list(Recipe.__dataclass_fields__)
    nested: dict[str, Any] = {}
    for key in sorted(settings, key=lambda key: order.index(key.split(".")[0])):
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = settings[key]
    return nested
