"""Former names of recipe keys and values: read them as the present ones, with a warning that names both."""

from __future__ import annotations

import warnings
from typing import Any

from megarl.errors import RecipeError

SECTIONS = {"exchange": "weight_sync"}  # former section -> present one
REJECTION = {"mask": "none", "mask_low": 0.5, "mask_high": 5.0, "veto": None}  # former keys and their defaults
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
    algorithm = renamed.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("correction"), dict):
        correction = _with_reject(algorithm["correction"], origin)
        renamed["algorithm"] = {**algorithm, "correction": correction}
    return renamed


def _with_reject(section: dict[str, Any], origin: str | None) -> dict[str, Any]:
    """Return the settings of `algorithm.correction` with `reject` instead of `mask`, `mask_low`, `mask_high` and `veto`."""
    former = {name: section[name] for name in REJECTION if name in section}
    if not former:
        return section
    key, values = "algorithm.correction", {**REJECTION, **former}
    limits: dict[str, Any] = {}
    if values["mask"] != "none":
        span = {"geometric": "mean"}.get(str(values["mask"]), values["mask"])
        limits[f"{span}_ratio"] = [values["mask_low"], values["mask_high"]]
    elif "mask" not in former and former.keys() - {"veto"}:
        name = sorted(former.keys() - {"veto"})[0]
        problem = f"{key}.reject replaces it, and {key}.mask, which says what to reject, is not set here"
        remedy = f"set e.g. {key}.reject={{token_ratio: [0.5, 5.0]}}"
        raise RecipeError(f"{key}.{name}", problem, remedy, value=former[name], origin=origin)
    if values["veto"] is not None:
        limits["worst_ratio"] = [values["veto"], None]
    _warn(f"{', '.join(f'{key}.{name}' for name in former)} is now {key}.reject={limits}", origin)
    present = {name: value for name, value in section.items() if name not in REJECTION}
    return {**present, "reject": {**limits, **(section.get("reject") or {})}}


def _warn(change: str, origin: str | None) -> None:
    if origin is not None:
        warnings.warn(f"{origin}: {change}; the former name still works", FormerNameWarning, stacklevel=2)
