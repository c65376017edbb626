"""Fields of a model's config.json that several modules read. Pure."""

from __future__ import annotations

from typing import Any

_MODEL_FIELDS = ("architectures", "model_type", "tie_word_embeddings")
"""Fields that describe the whole model at the top level; a text section may repeat them for the text model."""


def text_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the fields of its text section, which some multi-modal models have, at the top level.

    The section overrides the top level, as in transformers, which builds the text model from it, except for
    `_MODEL_FIELDS`.
    """
    model = {name: hf_config[name] for name in _MODEL_FIELDS if name in hf_config}
    return {**hf_config, **(hf_config.get("text_config") or {}), **model}


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of routed experts in config.json."""


def with_experts(config: dict[str, Any], count: int) -> dict[str, int]:
    """Return the fields of a mixture of experts' config.json that set `count` routed experts."""
    return {name: count for name in EXPERTS if config.get(name)}


def number_of_experts(config: dict[str, Any]) -> int:
    """Return the number of routed experts per layer, 0 for a dense model. `config`: from `text_fields`."""
    return next((int(config[name]) for name in EXPERTS if config.get(name)), 0)


def context_length(hf_config: dict[str, Any]) -> int | None:
    """Return the model's context length in tokens; None if config.json does not state it. With scaled rotary embeddings
    only the engine computes it."""
    fields = text_fields(hf_config)
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    length = fields.get("max_position_embeddings")
    return None if scaled or length is None else int(length)
