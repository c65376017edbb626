"""Which published model a recipe is for, where the model is not on this machine: lines of the recipe's head.

``# Shape: Qwen3-8B`` is of `model.path`, ``# Shape of teacher.path: Qwen3-32B`` of that setting; the names are those of
`megarl.hf.published`. A recipe without such a line has its bases', up to the first file that sets the path itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from omegaconf import OmegaConf

from megarl.recipe.load import layers

_POLICY = "model.path"


def shape_of(recipe: Path, key: str = _POLICY) -> str | None:
    """The name of the published model that has the config.json of `key`'s; None where no head says."""
    words = "Shape" if key == _POLICY else f"Shape of {key}"
    for file, content in reversed(layers(recipe)):
        found = re.search(rf"^# {re.escape(words)}: (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
        if OmegaConf.select(content, key) is not None:
            return None
    return None


def hardware_of(path: Path) -> tuple[str, int, int] | None:
    """The machine that the head of the recipe at `path` names, how many of them, and the devices of each."""
    if not path.is_file():  # who loads it says so
        return None
    found = re.search(r"^# Hardware: (.+), (\d+) x (\d+)$", path.read_text(), re.MULTILINE)
    return (found[1], int(found[2]), int(found[3])) if found else None
