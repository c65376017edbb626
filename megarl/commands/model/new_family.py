"""Sources to read before adding a model family: its code in transformers and vLLM, and its fields of config.json.

Reads installed packages as text, without importing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.engines import package_folder
from megarl.hf import published
from megarl.hf.config import text_fields
from megarl.hf.families import FAMILIES

STEPS = "docs/add_a_model.md has the steps"
_SHOWN = 12  # unknown fields
# Fields without influence on the computation, which every model may have.
_WITHOUT_EFFECT = {
    "transformers_version", "dtype", "torch_dtype", "use_cache", "pad_token_id", "initializer_range", "auto_map",
    "_attn_implementation",
}  # fmt: skip


def hints(config: dict[str, Any]) -> list[str]:
    """Return what to know before adding the family of a config.json."""
    return [f"to add the family: {STEPS}", *_code(config), *_fields(config)]


def _code(config: dict[str, Any]) -> Iterator[str]:
    """Yield the files of the model's code, or that a package has none."""
    folder = _transformers_code(config)
    if folder is None:
        yield (
            "transformers: the installed version does not know this model_type. Take a newer one, or name the class that "
            "reads the model (reads_as)"
        )
    else:
        yield f"transformers: {folder}"
        if relatives := _relatives(folder):
            yield f"families of megarl with some of the same layers: {', '.join(relatives)}"
    for name in config.get("architectures") or ():
        file = _vllm_code(name)
        yield f"vLLM: {file}" if file else f"vLLM: the installed version has no {name}, so nothing can sample the model"


def _transformers_code(config: dict[str, Any]) -> Path | None:
    package, kind = package_folder("transformers"), str(config.get("model_type"))
    folder = package / "models" / kind if package and kind.isidentifier() else None
    return folder if folder and folder.is_dir() else None


def _vllm_code(architecture: str) -> Path | None:
    package = package_folder("vllm")
    models = package / "model_executor" / "models" if package else None
    if models is None or not (models / "registry.py").is_file():
        return None
    entry = re.search(rf'"{re.escape(architecture)}":\s*\(\s*"(\w+)"', (models / "registry.py").read_text())
    return models / f"{entry[1]}.py" if entry else None


def _relatives(folder: Path) -> list[str]:
    """Return the families of megarl from which a model's code in transformers inherits, according to its modular file."""
    modular = folder / f"modular_{folder.name}.py"
    code = modular.read_text(encoding="utf-8") if modular.is_file() else ""
    return sorted(FAMILIES.keys() & set(re.findall(r"^from \.\.(\w+)\.modeling_", code, re.MULTILINE)))


def _fields(config: dict[str, Any]) -> Iterator[str]:
    """Yield the fields that no published model has: first the ones that the model's code in transformers reads, then the others."""
    known = _WITHOUT_EFFECT.union(*(text_fields(published.read(name)) for name in published.names()))
    unknown = sorted({*config, *(config.get("text_config") or {})} - known)
    folder = _transformers_code(config)
    code = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py")) if folder else ""
    unread = [name for name in unknown if folder and not re.search(rf"\b{re.escape(name)}\b", code)]
    if new := [name for name in unknown if name not in unread]:
        yield f"config.json has fields that no supported family has: {_some(new)}"
    if unread:
        yield f"of no effect in transformers: {_some(unread)}"


def _some(names: Iterable[str]) -> str:
    shown = [*names]
    return ", ".join(shown[:_SHOWN]) + (f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
