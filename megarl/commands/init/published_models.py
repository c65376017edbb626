"""Notices of `megarl init` about a published model: quantized weights, and recipes of megarl that train it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megarl.errors import InputError, command_name
from megarl.hf import hub, published
from megarl.hf.config import text_fields
from megarl.platform.device_table import device_named, device_of_machine
from megarl.recipe.paths import recipes_folder
from megarl.recipe.text import hardware_of

_SHAPE = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "moe_intermediate_size", "n_routed_experts", "num_experts", "num_local_experts"),
)  # fmt: skip
_MOST = 3  # recipes in a notice


def published_name(model: str, config: dict[str, Any]) -> str | None:
    """Return the published model with the name or the shape of `model`, a folder or a name on the hub; None: megarl has none.

    config: its config.json.
    """
    last = _last_part(model)
    if last in published.names():
        return last
    fields = text_fields(config)
    for name in published.names():
        other = text_fields(published.read(name))
        if all(fields.get(each) == other.get(each) for each in _SHAPE):
            return name
    return None


def quantized_notice(model: str) -> str | None:
    """Return a notice if `model` has the name of a model that is published with quantized weights, and has no weights here.

    Its shape alone tells nothing: copies in bfloat16 have the same. Other quantized models are refused by their config.json.
    """
    name = _last_part(model)
    weights = published.QUANTIZED.get(name)
    if weights is None or any(Path(model).glob("*.safetensors")):
        return None
    on_hub = hub.model_name(model)
    repo = on_hub.repo if on_hub is not None else f"OWNER/{name}"
    folder = f"models/{name}"
    return (
        f"the weights of {name} are published in {weights}, which trainers do not read. Convert them: `hf download {repo} --local-dir "
        f"{folder}`, then `{command_name()} convert-weights {folder} --out {folder}-BF16`, and set model.path: {folder}-BF16"
    )


def recipes_notice(name: str, kind: str, *, other_kinds: bool) -> str | None:
    """Return a notice with megarl's recipes that train the published model `name`; None if there are none.

    They are for devices of `kind` (cluster.device). other_kinds: if there are none, they are for other devices.
    """
    try:
        files = sorted(recipes_folder().rglob("*.yaml"))
    except InputError:  # an installation without recipes
        return None
    head = re.compile(rf"^# Shape: {re.escape(name)}$", re.MULTILINE)
    files = [file for file in files if head.search(file.read_text(encoding="utf-8")) and hardware_of(file)]
    same = [file for file in files if _kind_of(file) == kind]
    shown = [f"{file} ({_machines(file)})" for file in (same or (files if other_kinds else []))[:_MOST]]
    return f"recipes for {name} to start from: {', '.join(shown)}" if shown else None


def _last_part(model: str) -> str:
    return Path(model).name.partition("@")[0]


def _kind_of(recipe: Path) -> str | None:
    machine, _, _ = hardware_of(recipe) or ("", 0, 0)
    device = device_of_machine(machine)
    return device_named(device).kind if device is not None else None


def _machines(recipe: Path) -> str:
    machine, nodes, per_node = hardware_of(recipe) or ("", 0, 0)
    return f"{nodes} x {per_node} {machine}"
