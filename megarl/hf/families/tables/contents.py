"""The check of a file with a family's table, which may come from anybody: fields, kinds of rows and settings that it may have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from reprlib import repr as shortened
from typing import Any

from megarl.hf.families.family import after_the_first, never
from megarl.hf.families.slices import Config, Kind, copy, gate_up, qkv, vocabulary

KINDS: dict[str, Kind] = {"copy": copy, "gate_up": gate_up, "qkv": qkv, "vocabulary": vocabulary}
"""The kinds of rows in a file, by name."""

_TENSORS = {"copy": 1, "gate_up": 2, "qkv": 3, "vocabulary": 1}  # of a row, by its kind

SETTINGS: dict[str, type | tuple[str, ...]] = {
    "add_qkv_bias": bool,
    "layernorm_zero_centered_gamma": bool,
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_router_enable_expert_bias": bool,
    "moe_router_pre_softmax": bool,
    "moe_router_score_function": ("sigmoid", "softmax"),
    "moe_router_topk_scaling_factor": float,
    "moe_shared_expert_overlap": bool,
    "qk_layernorm": bool,
}
"""Fields of Megatron's TransformerConfig that a file may set, beyond the sizes that megarl computes from config.json: a type, or
the words that Megatron-Core 0.16.1 accepts. Numbers are positive."""


def _always(config: Config, layer: int) -> bool:
    return True


LAYERS: dict[str, Callable[[Config, int], bool]] = {
    "never": never,
    "always": _always,
    "after_the_first": after_the_first,
}
"""Which layers are mixtures of experts: none, all, all after `first_k_dense_replace` dense ones."""

_FIELDS: dict[str, type] = {
    "model_type": str, "source": str, "rows": list, "layers": str, "settings": dict, "latent": bool, "ties": bool,
    "biased": bool, "config": dict, "unread": list,
}  # fmt: skip
_WORDS = {str: "a string", list: "an array", dict: "an object", bool: "true or false"}
_PLACEHOLDER = re.compile(r"\{(?:layer|expert)\}")
_NAME = re.compile(r"(?:[A-Za-z0-9_.-]|\{layer\}|\{expert\})+")  # names are formatted: no other field may be in them


def check_table(content: Any) -> None:
    """Raise ValueError that names the first fault if `content`, read from JSON, is not the content of a `FamilyTable`."""
    if not isinstance(content, dict) or content.keys() != _FIELDS.keys():
        given = ", ".join(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"it must be an object with {', '.join(_FIELDS)}, and has {given}")
    for name, kind in _FIELDS.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"{name} is {shortened(content[name])}, and must be {_WORDS[kind]}")
    for name in ("model_type", "source"):
        if not content[name] or not content[name].isprintable():
            raise ValueError(f"{name} is {shortened(content[name])}, and must be one line of text")
    if content["layers"] not in LAYERS:
        raise ValueError(f"layers is {shortened(content['layers'])}, and must be one of {', '.join(LAYERS)}")
    for name in content["unread"]:
        if not isinstance(name, str) or name not in content["config"]:
            raise ValueError(f"unread has {shortened(name)}, which is not a field of config")
    for name, value in content["settings"].items():
        _check_setting(name, value)
    parameters: set[str] = set()
    for row in content["rows"]:
        _check_row(row)
        if row[1] in parameters:
            raise ValueError(f"{row[1]} has two rows, and must have one")
        parameters.add(row[1])


def _check_setting(name: str, value: Any) -> None:
    kind = SETTINGS.get(name)
    if kind is None:
        raise ValueError(f"settings.{name} is {shortened(value)}; a file may set {', '.join(SETTINGS)}")
    if isinstance(kind, tuple):
        fits, expected = isinstance(value, str) and value in kind, " or ".join(kind)
    elif kind is bool:
        fits, expected = isinstance(value, bool), _WORDS[bool]
    else:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits, expected = is_number and math.isfinite(value) and value > 0, "a positive number"
    if not fits:
        raise ValueError(f"settings.{name} is {shortened(value)}, and must be {expected}")


def _check_row(row: Any) -> None:
    well_formed = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[2], list)
    if not well_formed or row[0] not in KINDS:
        raise ValueError(
            f"{shortened(row)} is not a valid row: it must be [{' | '.join(KINDS)}, parameter, [tensor, ...]]"
        )
    kind, parameter, tensors = row
    for name in (parameter, *tensors):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{shortened(name)} is not a valid name in a row: it must consist of letters, digits, `_`, `.`, `-`, and the "
                "placeholders {layer} and {expert}"
            )
    if len(tensors) != _TENSORS[kind]:
        raise ValueError(f"{parameter}: a {kind} row has {_TENSORS[kind]} tensors, and this one has {len(tensors)}")
    numbers = sorted(_PLACEHOLDER.findall(parameter))
    if len({*numbers}) < len(numbers) or any(sorted(_PLACEHOLDER.findall(name)) != numbers for name in tensors):
        raise ValueError(f"{parameter}: it and its tensors must have the same placeholders, each once")
