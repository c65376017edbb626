"""Check a PEFT directory that training starts from against the recipe's adapters, without reading tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.hf.config import text_fields
from megarl.hf.linears import linears_of_layer, matches, without_expert
from megarl.hf.weights import Tensor, tensors_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""First part of the names of tensors in `WEIGHTS`."""

# Fields of adapter_config.json with the only values that megarl's adapters have.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_rslora": (False, None), "use_dora": (False, None), "bias": ("none", None),
    "lora_bias": (False, None), "fan_in_fan_out": (False, None), "modules_to_save": (None, []), "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}), "layer_replication": (None,), "trainable_token_indices": (None,),
}  # fmt: skip
_SHOWN = 4  # names in a message


def adapter_faults(
    folder: Path, hf_config: dict[str, Any], rank: int, alpha: float, targets: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, problem, remedy) for each difference between the adapter in `folder` and the recipe.

    `hf_config`: config.json of the model. `rank`, `alpha`, `targets`: of the recipe's section `lora`. Raises ValueError for a
    directory that cannot be read.
    """
    config = _read_config(folder)
    for field, allowed in _ONLY.items():
        if field in config and config[field] not in allowed:
            yield "lora.path", f"its {CONFIG} has {field}: {config[field]!r}", "name an adapter without it"
    for setting, value, field in (("lora.rank", rank, "r"), ("lora.alpha", alpha, "lora_alpha")):
        if config.get(field) != value:
            theirs = config.get(field)
            yield setting, f"the adapter in {folder} has {field} {theirs}", f"set {setting}={theirs}, as it was trained"
    tensors = tensors_of(folder / WEIGHTS)
    yield from _module_faults(tensors, hf_config, targets)
    wrong = [each.name for each in tensors if not _has_rank(each, int(config.get("r") or 0))]
    if wrong:
        yield (
            "lora.path",
            f"{WEIGHTS} has {_some(wrong)}, not a matrix of rank {config.get('r')}",
            "name another adapter",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"it contains no {name}, as PEFT writes it")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"its {CONFIG} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} is not a JSON object")
    return config


def _module_faults(
    tensors: Iterable[Tensor], hf_config: dict[str, Any], targets: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Compare the linears of the adapter with the linears that `lora.targets` selects in the model."""
    text = text_fields(hf_config)
    expected = {
        f"model.layers.{layer}.{name}"
        for layer in range(text["num_hidden_layers"])
        for name in linears_of_layer(text, layer)
        if matches(name, targets)
    }
    has = {without_expert(each.name.removeprefix(PREFIX).rsplit(".lora_", 1)[0]) for each in tensors}
    if more := has - expected:
        named = sorted({name.rsplit(".", 1)[-1] for name in has})
        yield (
            "lora.targets",
            f"the adapter also has {_some(more)}",
            f"set lora.targets to its linears: {', '.join(named)}",
        )
    if missing := expected - has:
        named = sorted({name.rsplit(".", 1)[-1] for name in has & expected})
        remedy = f"set lora.targets to its linears: {', '.join(named)}" if named else "name an adapter of this model"
        yield "lora.targets", f"the adapter has no {_some(missing)}", remedy


def _has_rank(tensor: Tensor, rank: int) -> bool:
    side = {"lora_A": 0, "lora_B": -1}.get(tensor.name.removesuffix(".weight").rsplit(".", 1)[-1])
    return side is not None and len(tensor.shape) == 2 and tensor.shape[side] == rank


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
