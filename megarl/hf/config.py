"""What several parts of megarl read off a model's config.json in the same way. Pure."""

from __future__ import annotations

from typing import Any

_OF_THE_WHOLE = ("architectures", "model_type", "tie_word_embeddings")
"""Fields that a text section repeats for itself; the whole model's are at the top."""


def text_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the fields of its text part, which multi-modal models may keep in a section of their own.

    Where a field stands in both places, the section's counts, as in transformers, which builds the text part from it;
    those of `_OF_THE_WHOLE` are the whole's.
    """
    whole = {name: hf_config[name] for name in _OF_THE_WHOLE if name in hf_config}
    return {**hf_config, **(hf_config.get("text_config") or {}), **whole}


def number_of_experts(config: dict[str, Any]) -> int:
    """Routed experts of a layer, of what `text_fields` returns; 0 for a dense model."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if config.get(name):
            return int(config[name])
    return 0


def context_length(hf_config: dict[str, Any]) -> int | None:
    """Tokens that a model was made for; None where its config.json does not say: with scaled rotary embeddings the engine
    knows."""
    fields = text_fields(hf_config)
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    known = fields.get("max_position_embeddings")
    return None if scaled or known is None else int(known)
