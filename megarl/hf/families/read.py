"""Read a model's config.json with transformers, also where transformers does not know its `model_type`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.hf.families import FAMILIES


def config_of_unknown_type(directory: Path) -> Any:
    """Return transformers' configuration of a directory if megarl's families say how to read it; None otherwise."""
    from transformers import CONFIG_MAPPING

    file = directory / "config.json"
    fields = json.loads(file.read_text()) if file.is_file() else {}
    family = FAMILIES.get(fields.get("model_type", ""))
    if family is None or not family.reads_as:
        return None
    return CONFIG_MAPPING[family.reads_as].from_dict({**fields, "model_type": family.reads_as})
