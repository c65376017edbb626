"""Refuse models that Megatron would compute differently from the engine, or not at all. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.errors import command_name
from megarl.hf.config import text_fields
from megarl.hf.families import family_of
from megarl.hf.families.family import Family
from megarl.hf.families.settings import rotary_scaling, rotated_part

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_QUANTIZATION = ("quantization_config", "compression_config")


def check_model(hf_config: dict[str, Any]) -> None:
    """Refuse a model that the trainer does not support. `hf_config` is the model's config.json.

    Raises ValueError that names the unsupported field, the first of `model_faults`.
    """
    for fault in model_faults(hf_config):
        raise ValueError(fault)


def model_faults(hf_config: dict[str, Any]) -> Iterator[str]:
    """Yield every reason for which the trainer refuses a model. `hf_config`: the model's config.json."""
    config = text_fields(hf_config)
    family = None
    try:
        family = family_of(hf_config)
    except ValueError as error:
        yield str(error)
    yield from _weight_faults(config)
    for setting in unsupported_settings(family, config) if family else ():
        yield (
            f"The model's config.json asks for {setting}, which the trainer cannot do for {config['model_type']}: it "
            "would compute another model than the engine. Use a model without it."
        )


def unsupported_settings(family: Family, config: dict[str, Any]) -> list[str]:
    """Return the settings of a configuration (from `text_fields`) that the trainer does not support.

    Absent fields have the defaults of transformers.
    """
    activation = config.get("hidden_act") or "silu"
    scaling = rotary_scaling(config)
    scaled = scaling["rope_type"] == "yarn" and scaling.get("attention_factor") != 1.0
    partial = rotated_part(config) != 1.0
    sliding = not family.windows and "sliding_attention" in (config.get("layer_types") or ())
    needs = scaling["rope_type"] == "yarn" and not {"factor", "original_max_position_embeddings"} <= scaling.keys()
    refusals = [
        (needs, "rotary scaling 'yarn' without factor and original_max_position_embeddings"),
        (scaling["rope_type"] not in family.rotary, f"rotary scaling {scaling['rope_type']!r}"),
        (activation not in ("silu", "swish"), f"hidden_act: {activation}"),
        (bool(config.get("use_sliding_window")) or sliding, "sliding windows (use_sliding_window or layer_types)"),
        (bool(config.get("attention_dropout")), "attention_dropout, which engines do not apply"),
        (not family.biased and bool(config.get("attention_bias")), "attention_bias: true"),
        (not family.ties and bool(config.get("tie_word_embeddings")), "tie_word_embeddings: true"),
        *family.unsupported(config),
    ]
    if not family.latent:
        refusals.append((scaled and partial, "rotary scaling 'yarn' of a part of each head (partial_rotary_factor)"))
    return [setting for present, setting in refusals if present]


def check_sizes(hf_config: dict[str, Any]) -> None:
    """Refuse a config.json without the sizes that every model has; later readers assume them. Raises ValueError."""
    for fault in size_faults(hf_config):
        raise ValueError(fault)


def size_faults(hf_config: dict[str, Any]) -> Iterator[str]:
    """Yield a reason for each size that every model has and config.json lacks."""
    config = text_fields(hf_config)
    for name in _SIZES:
        size = config.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            state = "has no" if size is None else f"has {size!r} as its"
            yield f"The model's config.json {state} {name}, which must be a positive integer."


def _weight_faults(config: dict[str, Any]) -> Iterator[str]:
    for name in _QUANTIZATION:
        if method := config.get(name):
            method_name = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
            blocks = method_name == "mxfp4" or (method_name == "fp8" and method.get("weight_block_size"))
            remedy = (
                f"Convert them first: {command_name()} convert-weights FOLDER --out FOLDER-BF16, and name that in the recipe"
                if blocks
                else f"Take the unquantized model, or convert it to bfloat16 and remove {name} from config.json"
            )
            yield (
                f"The model's weights are quantized ({name} in config.json: {method_name}); the trainer would read the numbers "
                f"without their scales. {remedy}."
            )
