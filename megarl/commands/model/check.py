"""Check whether megarl trains a model, by its config.json. Takes seconds, and imports neither Megatron nor an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.model import new_family
from megarl.errors import RecipeError, command_name
from megarl.hf import hub, published, weights
from megarl.hf.config import context_length, experts_per_token, number_of_experts, text_fields
from megarl.hf.families import FAMILIES, family_of, has_tower
from megarl.hf.families.check import model_faults, size_faults
from megarl.hf.families.tables.megatron_bridge import translate
from megarl.hf.linears import linears_of
from megarl.hf.shape import model_shape
from megarl.megatron.megatron_bridge import reader
from megarl.preflight.models import read_hf_config


@dataclass(frozen=True)
class ModelCheck:
    """The result for one model. `reasons`: why megarl does not train it, all of them; empty if it does."""

    model: str
    family: str
    reasons: list[str]
    facts: dict[str, str]
    hints: list[str]


def check_model_of(model: str, *, as_json: bool) -> int:
    """Print the result for `model`; see `check_config`. Returns 0 if megarl trains the model, else 1.

    Raises ValueError if `model` has no readable config.json.
    """
    read = read_config(model)
    config = read.config
    result = check_config(model, config, read.weights_fault)
    if config.get("model_type") not in FAMILIES:
        result = replace(result, hints=[*result.hints, *bridge_hints(config)])
    if read.notice:
        print(read.notice, file=sys.stderr)
    print(json.dumps(asdict(result), indent=1) if as_json else "\n".join(_lines(result)))
    return 1 if result.reasons else 0


def check_config(model: str, config: dict[str, Any], weights_problem: str | None = None) -> ModelCheck:
    """Return the result for a config.json. `weights_problem`: a fault of the weights in its folder, if any."""
    reasons = [*model_faults(config), *size_faults(config)]
    reasons = [reason.replace("model.path holds a", "this is a") for reason in reasons]
    if weights_problem:
        reasons.append(f"Its weights: {weights_problem}.")
    family = str(config.get("model_type"))
    supported = family in FAMILIES
    return ModelCheck(
        model, family, reasons, _facts(config, readable=not reasons), [] if supported else new_family.hints(config)
    )


@dataclass(frozen=True)
class ReadModel:
    """A model's config.json, and whether its weights fit it."""

    config: dict[str, Any]  # its config.json
    folder: Path | None  # with config.json; None: a published model, of which megarl has config.json alone
    weights_fault: str | None = None
    notice: str | None = None  # why its weights are not checked


def read_config(model: str) -> ReadModel:
    """Read config.json of a folder, a file, a name on the hub or a published model. Raises ValueError if there is none."""
    path = Path(model).expanduser()
    if path.is_file():
        path = path.parent if path.name == "config.json" else path
    if path.is_dir():
        config = _config_in(path)
        if not any(path.glob("*.safetensors")):
            return ReadModel(config, path)  # a config.json alone is enough for this check
        return ReadModel(config, path, weights.find_fault(path, int(text_fields(config).get("num_hidden_layers") or 0)))
    if model in published.names():
        return ReadModel(published.read(model), None)
    name = hub.model_name(model)
    if name is None:
        raise ValueError(
            f"{model} is neither a folder with a config.json, nor a name on the hub (OWNER/NAME), nor a model whose "
            f"config.json megarl has, such as {published.similar(model)}"
        )
    try:
        folder = hub.config_folder(name)
    except hub.HubError as error:
        published_name = name.repo.rpartition("/")[2]
        if published_name in published.names():
            command = f"{command_name()} model check {published_name}"
            raise ValueError(f"{error}. megarl contains the config.json of {published_name}: {command}") from error
        raise
    return ReadModel(_config_in(folder), folder, *hub.weights_fault(name))


def bridge_hints(config: dict[str, Any]) -> list[str]:
    """Return whether the table of Megatron-Bridge, where it is installed, can be used for a model that megarl has no table for."""
    version = reader.installed_version()
    if version is None:
        return [
            f"Megatron-Bridge: not installed. With it ({reader.INSTALL}), `megarl model table` may write this family's table"
        ]
    try:
        whole = reader.whole_config(config)
        reasons = translate(reader.read_bridge(whole, None), whole).reasons
    except ValueError as error:
        reasons = [str(error)]
    if not reasons:
        return [f"Megatron-Bridge {version} has a table that can be used: megarl model table MODEL --out FILE"]
    return [f"Megatron-Bridge {version} has no table that can be used:", *(f"  - {reason}" for reason in reasons)]


def _config_in(folder: Path) -> dict[str, Any]:
    try:
        return read_hf_config(str(folder))
    except RecipeError as error:
        raise ValueError(f"{folder}: {error.problem}: {error.remedy}") from error


def _facts(config: dict[str, Any], *, readable: bool) -> dict[str, str]:
    """Return facts by label. `readable`: the family is known and config.json is complete."""
    text = text_fields(config)
    facts = {
        "family": f"{config.get('model_type')} ({', '.join(config.get('architectures') or []) or 'no architectures'})"
    }
    if readable:
        shape = model_shape(config)
        active = f", {shape.active:,} active per token" if number_of_experts(text) else ""
        facts["size"] = f"{shape.total:,} parameters{active}, {text['num_hidden_layers']} layers"
        facts["heads"] = (
            f"{text['num_attention_heads']} of queries, {text.get('num_key_value_heads') or 'as many'} of keys"
        )
    if number_of_experts(text):
        facts["experts"] = f"{number_of_experts(text)} per layer, {experts_per_token(text)} per token"
    length = context_length(config)
    facts["context"] = (
        f"{length:,} tokens" if length is not None else "the engine computes it (scaled rotary embeddings)"
    )
    facts["images"] = "yes" if has_tower(config) else "no"
    if readable:
        with_adapters = family_of(config).adapters
        facts["adapters"] = (
            f"yes: {', '.join(_leaves(config))}" if with_adapters else "no: train all weights (lora.rank: 0)"
        )
    return facts


def _leaves(config: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears_of(text_fields(config))))


def _lines(result: ModelCheck) -> list[str]:
    lines = [result.model, *(f"  {label:<9} {text}" for label, text in result.facts.items()), ""]
    if not result.reasons:
        return [*lines, "megarl trains this model."]
    many = len(result.reasons)
    lines.append(f"megarl does not train this model{f', for {many} reasons' if many > 1 else ''}:")
    lines += [f"  - {reason}" for reason in result.reasons]
    return [*lines, *(["", *(f"  {hint}" for hint in result.hints)] if result.hints else [])]
