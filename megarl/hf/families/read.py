"""Read a model's config.json with transformers, also where transformers does not know its `model_type`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.hf.families import FAMILIES


def transformers_config(directory: Path) -> Any:
    """Return the configuration of a Hugging Face directory; None if it has no config.json."""
    from transformers import CONFIG_MAPPING, AutoConfig

    file = directory / "config.json"
    if not file.is_file():
        return None
    fields = json.loads(file.read_text())
    family = FAMILIES.get(fields.get("model_type"))
    if family is not None and family.reads_as:
        return CONFIG_MAPPING[family.reads_as].from_dict({**fields, "model_type": family.reads_as})
    return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
