"""Fields of a model's config.json that several modules read. Pure."""

from __future__ import annotations

from typing import Any

_MODEL_FIELDS = ("architectures", "model_type", "tie_word_embeddings")
"""Fields that describe the whole model at the top level; a text section may repeat them for the text model."""

_GEMMA3: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_ERNIE: dict[str, Any] = {"tie_word_embeddings": True, "rope_theta": 500_000.0, "moe_num_shared_experts": 2}
_ABSENT = {"ernie4_5_moe": _ERNIE, "gemma3": _GEMMA3, "gemma3_text": _GEMMA3}
"""Transformers' defaults of fields that published config.json files of a `model_type` leave out."""


def text_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the fields of its text section, which some multi-modal models have, at the top level.

    The section overrides the top level, as in transformers, which builds the text model from it, except for
    `_MODEL_FIELDS`.
    """
    model = {name: hf_config[name] for name in _MODEL_FIELDS if name in hf_config}
    absent = _ABSENT.get(hf_config.get("model_type", ""), {})
    fields = {**absent, **hf_config, **(hf_config.get("text_config") or {}), **model}
    if "rope_parameters" in fields and "rope_theta" in absent:  # transformers 5 writes the bases there
        fields.pop("rope_theta")
    return fields


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k")
SHARED = ("n_shared_experts", "moe_num_shared_experts")
DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index")
"""Names in config.json, by family: number of routed experts, of those that a token is sent to, of shared experts that have the
width of a routed one, and of dense layers before the first mixture of experts. A family with another name adds it here."""


def _count(config: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def with_experts(config: dict[str, Any], count: int) -> dict[str, int]:
    """Return the fields of a mixture of experts' config.json that set `count` routed experts."""
    return {name: count for name in EXPERTS if config.get(name)}


def number_of_experts(config: dict[str, Any]) -> int:
    """Return the number of routed experts per layer, 0 for a dense model. `config`: from `text_fields`."""
    return _count(config, EXPERTS)


def with_experts_per_token(config: dict[str, Any], count: int) -> dict[str, int]:
    """Return the fields of a mixture of experts' config.json that send each token to `count` experts."""
    return {name: count for name in CHOSEN if config.get(name)}


def experts_per_token(config: dict[str, Any]) -> int:
    """Return the number of experts that a token is sent to, 0 for a dense model. `config`: from `text_fields`."""
    return _count(config, CHOSEN)


def shared_experts(config: dict[str, Any]) -> int:
    """Return the number of shared experts with the width of a routed one. `config`: from `text_fields`."""
    return _count(config, SHARED)


def leading_dense_layers(config: dict[str, Any]) -> int:
    """Return the number of dense layers before the first mixture of experts. `config`: from `text_fields`."""
    return _count(config, DENSE_FIRST)


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """Return the kind of each layer, by transformers' names: "full_attention", "linear_attention", "sliding_attention".

    Configurations from before transformers 5 give the interval of full attention, or nothing. `config`: from `text_fields`.
    """
    if kinds := config.get("layer_types"):
        return list(kinds)
    layers, pattern = config.get("num_hidden_layers") or 0, config.get("sliding_window_pattern")
    interval = pattern or config.get("full_attention_interval") or (4 if config.get("linear_num_key_heads") else 1)
    other = "sliding_attention" if pattern else "linear_attention"
    return ["full_attention" if (layer + 1) % interval == 0 else other for layer in range(layers)]


def with_layers(config: dict[str, Any], layers: int, *, dense: int = 1) -> dict[str, Any]:
    """Return the fields of config.json that set the number of layers, with the lists that transformers 5 writes per layer.

    `config`: from `text_fields`. `dense`: largest number of dense layers before mixtures of experts, which keep at least
    one layer.
    """
    most_dense = dense
    dense = min(dense, leading_dense_layers(config))
    layers = max(layers, dense + 1)
    fields: dict[str, Any] = {"num_hidden_layers": layers}
    fields |= {name: dense for name in DENSE_FIRST if config.get(name)}
    if any(config.get(name) for name in ("layer_types", "full_attention_interval", "sliding_window_pattern")):
        kinds = layer_kinds(config)
        few = (kinds * layers)[:layers]
        absent = [kind for kind in dict.fromkeys(kinds) if kind not in few]
        fields["layer_types"] = [*few[: layers - len(absent)], *absent] if layers > len(absent) else few
    if of_layers := config.get("mlp_layer_types"):
        first = min(of_layers.index("sparse"), most_dense)
        fields["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (layers - first)
    if of_indexers := config.get("indexer_types"):
        fields["indexer_types"] = (of_indexers * layers)[:layers]
    if config.get("max_window_layers") is not None:
        fields["max_window_layers"] = min(config["max_window_layers"], layers)
    return fields


def context_length(hf_config: dict[str, Any]) -> int | None:
    """Return the model's context length in tokens; None if config.json does not state it. With scaled rotary embeddings
    only the engine computes it."""
    fields = text_fields(hf_config)
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    length = fields.get("max_position_embeddings")
    return None if scaled or length is None else int(length)
