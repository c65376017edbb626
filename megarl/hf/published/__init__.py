"""config.json files of published models, so that recipes can be checked offline.

Each folder has the name of the model on the Hugging Face hub, without its owner, and holds the fields of the published
config.json that describe the model, without `quantization_config`, as after conversion to bfloat16. sources.md has the sources.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
QUANTIZED = {
    **dict.fromkeys(("DeepSeek-V3", "DeepSeek-V3.2", "Kimi-K2-Instruct", "MiniMax-M2"), "FP8"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "MXFP4"),
}
"""Models with quantized weights on the hub, and the format."""


def names() -> list[str]:
    """Return the names of the models in this folder."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def read(name: str) -> dict[str, Any]:
    """Read the config.json of the model `name`, e.g. "Qwen3-8B". ValueError if it is not in this folder."""
    if name not in names():
        raise ValueError(f"megarl has no config.json of {name!r}. Nearest: {similar(name)}")
    return dict(json.loads((_FOLDER / name / "config.json").read_text()))


def similar(text: str) -> str:
    """Return the end of an error message, with the three names nearest to `text` and the folder of all names. Names that begin with
    `text` come first."""
    last = Path(text).name.lower()
    lowered = {name.lower(): name for name in names()}
    begun = [name for name in lowered if name.startswith(last)]
    like = [name for name in difflib.get_close_matches(last, lowered, n=3, cutoff=0.0) if name not in begun]
    return f"{', '.join(lowered[name] for name in [*begun, *like][:3])} ({_FOLDER} has a folder for each)"
