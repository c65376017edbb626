"""The text of a recipe: all settings as YAML, and the comments at the head of a file.

The comments say which published models and hardware the recipe is for.
``# Shape: Qwen3-8B`` names the model of `model.path`; ``# Shape of teacher.path: Qwen3-32B`` names the model of another setting.
`megarl.hf.published` has the names. Without such a line, the base files' lines apply, up to the first file that sets the path.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from megarl.recipe.former_names import with_present_names
from megarl.recipe.hub_inputs import with_hub_names
from megarl.recipe.key import RecipeDumper, section_types
from megarl.recipe.load import layers, value_in
from megarl.recipe.schema import Recipe

_POLICY = "model.path"


def to_yaml(recipe: Recipe) -> str:
    """Format the recipe as YAML with every key. Files in the cache of the hub have their name and commit."""
    content = _with_lists(dataclasses.asdict(with_hub_names(recipe)))
    return str(yaml.dump(content, Dumper=RecipeDumper, default_flow_style=False, allow_unicode=True, sort_keys=False))


def _with_lists(value: Any) -> Any:
    """Return the content of YAML with lists instead of tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of `recipe` by dotted key. `flat_settings` reads the same settings from its text."""
    return _flat(dataclasses.asdict(with_hub_names(recipe)))


def flat_settings(text: str) -> dict[str, Any]:
    """Return the settings of a resolved recipe by dotted key. A mapping with keys that the user chooses is a single setting."""
    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    return _flat(with_present_names(content, None))


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(content: dict[str, Any], section: type, prefix: str) -> None:
        types = section_types(section)
        for name, value in content.items():
            if dataclasses.is_dataclass(types.get(name)) and isinstance(value, dict):
                walk(value, types[name], f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = value

    walk(_with_lists(content), Recipe, "")
    return flat


def shape_of(recipe: Path, key: str = _POLICY) -> str | None:
    """Return the published model with the config.json of the setting `key`; None if no head names one."""
    words = "Shape" if key == _POLICY else f"Shape of {key}"
    for file, content in reversed(layers(recipe)):
        line = re.search(rf"^# {re.escape(words)}: (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if line:
            return line[1].strip()
        if value_in(content, key) is not None:
            return None
    return None


def hardware_of(path: Path) -> tuple[str, int, int] | None:
    """Return the machine in the head of the recipe at `path`, the number of machines, and the devices of each."""
    if not path.is_file():  # loading the recipe reports it
        return None
    line = re.search(
        r"^# Hardware: (.+), (\d+) x (\d+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    return (line[1], int(line[2]), int(line[3])) if line else None
