"""Comments at the head of a recipe file: the published models and the hardware that the recipe is for.

``# Shape: Qwen3-8B`` names the model of `model.path`; ``# Shape of teacher.path: Qwen3-32B`` names the model of another setting.
`megarl.hf.published` has the names. Without such a line, the base files' lines apply, up to the first file that sets the path.
"""

from __future__ import annotations

import re
from pathlib import Path

from megarl.recipe.load import layers, value_in

_POLICY = "model.path"


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
    line = re.search(r"^# Hardware: (.+), (\d+) x (\d+)$", path.read_text(), re.MULTILINE)
    return (line[1], int(line[2]), int(line[3])) if line else None
