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
