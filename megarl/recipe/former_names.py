"""Former names of recipe keys and values: read them as the present ones, with a warning that names both."""

from __future__ import annotations

import warnings
from typing import Any

from megarl.errors import RecipeError

SECTIONS = {"exchange": "weight_sync"}  # former section -> present one
VALUES = {"weight_sync.route": {"planned": "sharded", "export": "full"}}  # key -> former value -> present one


class FormerNameWarning(FutureWarning):
    """A recipe has a key or value under its former name."""


def with_present_names(content: dict[str, Any], origin: str | None) -> dict[str, Any]:
    """Return the settings of one layer of a recipe with present names. `origin`: the layer's file, or "command line".

    Warns about each former name, unless `origin` is None (a recipe that megarl wrote). Raises RecipeError if a layer sets a
    key under both names.
    """
    renamed = dict(content)
    for former, present in SECTIONS.items():
        if former not in renamed:
            continue
        section, other = renamed.pop(former), renamed.get(present)
        if present in renamed and section is None:  # an empty section
            continue
        if present in renamed and not (isinstance(section, dict) and isinstance(other, dict)):
            problem = f"{present} is the same section, and it is set too"
            raise RecipeError(former, problem, "delete one of them", value=section, origin=origin)
        if isinstance(section, dict) and isinstance(other, dict):
            for name in section.keys() & other.keys():
                problem = f"{present}.{name} is the same key, and it is set too"
                raise RecipeError(f"{former}.{name}", problem, "delete one of them", value=section[name], origin=origin)
            section = {**section, **other}
        _warn(f"the section {former} is now {present}", origin)
        renamed[present] = section
    for key, values in VALUES.items():
        section_name, name = key.split(".")
        section = renamed.get(section_name) or {}
        value = section.get(name) if isinstance(section, dict) else None
        if isinstance(value, str) and value in values:
            _warn(f"{key}={value} is now {key}={values[value]}", origin)
            renamed[section_name] = {**section, name: values[value]}
    return renamed


def _warn(change: str, origin: str | None) -> None:
    if origin is not None:
        warnings.warn(f"{origin}: {change}; the former name still works", FormerNameWarning, stacklevel=2)
