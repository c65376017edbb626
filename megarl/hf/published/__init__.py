"""config.json files of published models, so that recipes can be checked offline.

Each folder has the name of the model on the Hugging Face hub, without its owner, and holds the fields of the published
config.json that describe the model, without `quantization_config`, as after conversion to bfloat16. sources.md has the sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.registry import nearest

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the models in this folder."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def read(name: str) -> dict[str, Any]:
    """Read the config.json of the model `name`, e.g. "Qwen3-8B". ValueError if it is not in this folder."""
    if name not in names():
        near = nearest(name, names())
        hint = f" Nearest: {near}." if near else ""
        raise ValueError(f"the config.json of {name!r} is not kept in {_FOLDER.name}.{hint}")
    return dict(json.loads((_FOLDER / name / "config.json").read_text()))
