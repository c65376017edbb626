"""Checks of engine arguments without importing the inference library."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path


def package_folder(package: str) -> Path | None:
    """Return the folder of a package without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) if folders else None


def check_argument(
    name: str, section: str, library: str, supported: Iterable[str], owned: Mapping[str, str | None]
) -> None:
    """Raise ValueError for an argument in `section`.engine_args that another setting determines or that is unknown.

    `supported`: argument names of the installed library; empty if it is not installed. `owned`: arguments that other
    settings determine -> the setting, in which {section} is replaced; None if megarl sets a fixed value.
    """
    key, supported = f"{section}.engine_args.{name}", list(supported)
    if name in owned:
        owner = owned[name]
        instead = f"set {owner.format(section=section)} instead" if owner else "megarl sets it"
        raise ValueError(f"{key} cannot be set: {instead}")
    if supported and name not in supported:
        near = difflib.get_close_matches(name, supported, 1, 0.0)[0]
        raise ValueError(f"{key}: {library} has no such engine argument; did you mean {near!r}?")
