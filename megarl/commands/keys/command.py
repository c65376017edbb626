"""`megarl keys`: the settings of a recipe, with type, default, choices, bounds and meaning."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from megarl.commands.keys.describe import KeyDescription

_WHOLE = 20  # more settings have a line each
_WIDEST = 120  # characters of a line


def keys_command(
    pattern: Annotated[
        Optional[str],
        typer.Argument(
            metavar="[PATTERN]",
            help="Part of a setting's name, or a pattern with * for the whole name, e.g. 'rollout.*'. If no name matches, it is searched in the meanings. Default: all settings.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the settings.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """List a recipe's settings with type, default and meaning; a line each if there are more than 20."""
    from megarl.commands.keys.describe import sections

    keys = matching([key for section in sections() for key in section.keys], pattern)
    if as_json:
        typer.echo(json.dumps([_plain(key) for key in keys], indent=1))
        return
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    lines = _table(keys, width) if len(keys) > _WHOLE else (line for key in keys for line in _block(key, width))
    typer.echo("\n".join(lines))


def matching(keys: Sequence[KeyDescription], pattern: str | None) -> list[KeyDescription]:
    """Return the keys with a matching name, else the keys for a matching name of another framework, else those with the pattern in
    their meaning. Raises InputError if there are none."""
    from megarl.errors import InputError
    from megarl.recipe.former_names import OTHER_NAMES
    from megarl.registry import did_you_mean

    if pattern is None:
        return list(keys)
    lowered = pattern.lower()
    wild = lowered if "*" in lowered else f"*{lowered}*"
    by_name = [key for key in keys if fnmatchcase(key.key, wild)]
    replaced = [key for key in keys if key.key in OTHER_NAMES.get(lowered, ())]
    matches = by_name or replaced or [key for key in keys if lowered in key.meaning.lower()]
    if not matches:
        near = did_you_mean(lowered, [*(key.key for key in keys), *(key.key.rpartition(".")[2] for key in keys)])
        raise InputError(f"no setting matches {pattern!r}{near} megarl keys without a pattern lists all")
    return matches


def default_text(value: Any) -> str:
    """Return a default as a recipe writes it."""
    from megarl.recipe.key import yaml_word

    if isinstance(value, (list, tuple, dict)):
        return json.dumps(value, ensure_ascii=False)
    return yaml_word(value) if value != "" else "''"


def _plain(key: KeyDescription) -> dict[str, Any]:
    return {
        "key": key.key,
        "type": _type(key),
        "default": key.default,
        "choices": list(key.choices),
        "bounds": list(key.bounds),
        "meaning": key.meaning,
    }


def _type(key: KeyDescription) -> str:
    return key.type.replace("`", "")


def _table(keys: Sequence[KeyDescription], width: int) -> Iterator[str]:
    """Yield a line per setting: name, default, and the beginning of its meaning."""
    names = max(len(key.key) for key in keys)
    for key in keys:
        line = f"{key.key:<{names}}  {default_text(key.default):<10}  {key.meaning}"
        yield line if len(line) <= width else f"{line[: width - 3]}..."


def _block(key: KeyDescription, width: int) -> Iterator[str]:
    bounds = f" ({', '.join(key.bounds)})" if key.bounds else ""
    yield key.key
    yield f"  type     {_type(key)}{bounds}"
    yield f"  default  {default_text(key.default)}"
    yield from textwrap.wrap(key.meaning, width, initial_indent="  ", subsequent_indent="  ")
