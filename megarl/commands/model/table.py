"""Write the table of a model's family from Megatron-Bridge's mappings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megarl.atomic_files import write_atomically
from megarl.commands.model.check import read_config
from megarl.hf import weights
from megarl.hf.config import text_fields
from megarl.hf.families import FAMILIES
from megarl.hf.families.tables.family_table import COMPARE, FamilyTable, to_json
from megarl.hf.families.tables.megatron_bridge import Translation, translate
from megarl.megatron.megatron_bridge.reader import read_bridge, whole_config

_LAYER, _NUMBER = re.compile(r"\blayers\.(\d+)\."), re.compile(r"(\b(?:layers|experts)\.)\d+(?=\.)")


def write_table(model: str, out: Path, folder: str | None) -> int:
    """Write the table of `model`, or print the reasons against it. Returns 0 if the table is written, else 1.

    model: as for `megarl model check`. folder: of Megatron-Bridge; None: this environment. Raises ValueError if the model has a
    table of megarl's, or if Megatron-Bridge cannot read it.
    """
    read = read_config(model)
    hf_config = read.config
    kind = hf_config.get("model_type")
    if kind in FAMILIES:
        raise ValueError(f"megarl has its own, tested table for {kind!r} models: no file is needed")
    translation, dump = table_of(hf_config, folder)
    names = _tensor_names(read.folder)
    reasons = translation.reasons + _untranslated(names, translation.table, hf_config)
    if reasons:
        print(f"{model}: the table of {translation.table.source} cannot be used:")
        print("\n".join(f"  - {reason}" for reason in reasons))
        return 1
    write_atomically(out, to_json(translation.table).encode())
    print("\n".join(_lines(out, translation.table, dump, compared=bool(names))))
    return 0


def table_of(hf_config: dict[str, Any], folder: str | None) -> tuple[Translation, dict[str, Any]]:
    """Return the translation of Megatron-Bridge's table for a config.json, and the dump that it was made from."""
    config = whole_config(hf_config)
    dump = read_bridge(config, folder)
    return translate(dump, config), dump


def _tensor_names(folder: Path | None) -> set[str]:
    """Return the names of the tensors in a folder's *.safetensors; none without a folder."""
    files = folder.glob("*.safetensors") if folder is not None else ()
    return {tensor.name for file in files for tensor in weights.tensors_of(file)}


def _untranslated(names: set[str], table: FamilyTable, hf_config: dict[str, Any]) -> list[str]:
    """Return a reason for the tensors of a model that no row has. `names`: of its tensors.

    Layers for multi-token prediction follow the last layer and are exported unchanged.
    """
    layers = int(text_fields(hf_config)["num_hidden_layers"])
    trained = {name for name in names if not (match := _LAYER.search(name)) or int(match[1]) < layers}
    known = {name.format(layer=0, expert=0) for _, _, tensors in table.rows for name in tensors}
    unknown = sorted({_NUMBER.sub(r"\g<1>0", name) for name in trained} - known)
    return [f"its weights have tensors that no row has: {', '.join(unknown)}"] if unknown else []


def _lines(out: Path, table: FamilyTable, dump: dict[str, Any], *, compared: bool) -> list[str]:
    lines = [f"{out}: the table of {table.model_type} models from {table.source}, {len(table.rows)} rows"]
    if dump["absent"]:
        lines.append(f"  read with empty modules for absent packages: {', '.join(dump['absent'])}")
    if not compared:
        lines.append(
            "  its rows were not compared with the model's tensors: name a folder with its *.safetensors to do so"
        )
    lines += [f"  {name}: {json.dumps(table.config[name])} in config.json is read by neither" for name in table.unread]
    return [
        *lines,
        "megarl has not compared this table with transformers. In a clone of megarl, compare a tiny random model:",
        f"  {COMPARE} MODEL --table {out}",
        f"then name the table in the recipe: model.table: {out}",
    ]
