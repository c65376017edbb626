"""Reduce a config.json to a few hundred thousand parameters, with the same architecture and layer pattern. Pure."""

from __future__ import annotations

from typing import Any

from megarl.commands.data.tiny_tokenizer import EOS_ID, FIRST_IMAGE_ID, IMAGE_TOKENS, PAD_ID, VOCAB_LIMIT
from megarl.commands.rehearse.changes import Changes
from megarl.hf.config import (
    experts_per_token,
    layer_kinds,
    number_of_experts,
    text_fields,
    with_experts,
    with_experts_per_token,
    with_layers,
)
from megarl.hf.families import family_of, has_tower

Config = dict[str, Any]

# vLLM has CPU kernels for these sizes, and two tensor-parallel ranks divide them.
HEAD, HIDDEN, WIDTH, EXPERT_WIDTH, RANK = 32, 64, 128, 64, 32
DELTA_HEAD = 64  # the smallest head of a delta net
EXPERTS, CHOSEN, GROUPS = 8, 2, 4
WINDOW = 16
VISION = {"depth": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
# Fields that some towers have. One tapped layer fits every pipeline: the first stage has at least one layer.
OF_TOWERS = {"fullatt_block_indexes": [1, 3], "window_size": 56, "num_position_embeddings": 36, "deepstack_visual_indexes": [2]}  # fmt: skip
_SPREAD = 0.05  # standard deviation of random weights
_FILE_DTYPE = "dtype of the weight files; model.dtype is the trainer's dtype"
_REASONS = {"initializer_range": "random weights", "dtype": _FILE_DTYPE, "torch_dtype": _FILE_DTYPE}
_IMAGE_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_ROTARY = ("rope_scaling", "rope_parameters")  # names before transformers 5, and since

# Fields that define the architecture. The table of changes lists them as kept.
_STRUCTURE = (
    "model_type", "architectures", "num_nextn_predict_layers", "n_shared_experts", "kv_lora_rank", "qk_rope_head_dim",
    "tie_word_embeddings", *_ROTARY, "rope_theta", "attention_bias", "use_qk_norm", "partial_rotary_factor", "scoring_func", "topk_method", "norm_topk_prob",
    "routed_scaling_factor", "decoder_sparse_step", "mlp_only_layers", "rope_interleave", "index_head_dim", "max_position_embeddings", "rms_norm_eps", "swiglu_limit",
)  # fmt: skip


def shrink_model(hf_config: Config, layers: int, changes: Changes) -> Config:
    """Return a small version of a config.json with at least `layers` layers. Record the changes in `changes`.

    Its text section is merged into the top level, except where transformers reads the text model from the section only. A tower
    that is not trained is left out if transformers has a separate class for the language model (`Family.alone`).
    """
    config = text_fields(hf_config)
    config.pop("text_config", None)
    small = {**config, **_attention(config), **_experts(config), **_ids(config)}
    small |= with_layers(config, layers) | {"vocab_size": VOCAB_LIMIT, "initializer_range": _SPREAD}
    small |= {"intermediate_size": WIDTH, "dtype" if "dtype" in config else "torch_dtype": "float32"}
    if has_tower(config):
        small |= _vision(config, small)
    if alone := family_of(hf_config).alone:
        small |= {"model_type": alone[0], "architectures": [alone[1]]}
        for name in ("vision_config", *_IMAGE_IDS):
            small.pop(name, None)
        changes.note("reduced", "config.json: vision_config", "a tower", "none", "it is not trained")
    _note(config, small, changes)
    return _in_sections(small, hf_config["text_config"]) if family_of(hf_config).deepstack else small


def _in_sections(small: Config, text: Config) -> Config:
    """Return a small config.json with the fields of `text`, the whole model's text section, in a section."""
    names = text.keys() - {"architectures", "model_type", "tie_word_embeddings"}
    section = {"model_type": text.get("model_type"), **{name: small[name] for name in small if name in names}}
    return {**{name: value for name, value in small.items() if name not in names}, "text_config": section}


def _attention(config: Config) -> Config:
    """Return small attention sizes with the model's ratio of heads to key/value heads, or small latent ranks."""
    heads = config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        rank = {"q_lora_rank": RANK} if config.get("q_lora_rank") else {}
        small = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": HIDDEN}
        total = {"qk_head_dim": HEAD + config["qk_rope_head_dim"]} if "qk_head_dim" in config else {}
        indexer = {"index_n_heads": 2, "index_topk": WINDOW} if config.get("index_topk") else {}
        return {**small, **rank, **total, **indexer, "qk_nope_head_dim": HEAD, "v_head_dim": HEAD}
    groups = config.get("num_key_value_heads") or heads
    small_groups = min(groups, 2)
    small = {"num_attention_heads": small_groups * (heads // groups), "num_key_value_heads": small_groups}
    if config.get("linear_num_key_heads"):
        per_key = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * per_key}
        small |= {"linear_key_head_dim": DELTA_HEAD, "linear_value_head_dim": DELTA_HEAD}
    if "sliding_attention" in layer_kinds(config):
        small["sliding_window"] = min(config["sliding_window"], WINDOW)
    if config.get("rotary_dim"):
        small["rotary_dim"] = HEAD * config["rotary_dim"] // config["head_dim"]
    if config.get("head_dim"):
        return {**small, "head_dim": HEAD, "hidden_size": HIDDEN}
    return {**small, "hidden_size": HEAD * small["num_attention_heads"]}


def _experts(config: Config) -> Config:
    """Return few experts, but enough groups and chosen experts to exercise the routing."""
    experts = number_of_experts(config)
    if not experts:
        return {}
    chosen = min(experts_per_token(config), CHOSEN)
    small = with_experts(config, min(experts, EXPERTS))
    small |= with_experts_per_token(config, chosen)
    for width in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if config.get(width):
            small[width] = EXPERT_WIDTH
    if (config.get("n_group") or 1) > 1:
        groups = min(config["n_group"], GROUPS)
        chosen = min(config["topk_group"], groups // 2)
        each = config["num_experts_per_tok"] // config["topk_group"]  # experts per group: Megatron only supports two
        small |= {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": each * chosen}
    return small


def _ids(config: Config) -> Config:
    """Return the token ids of the tiny tokenizer."""
    ids: Config = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    if has_tower(config):
        assert len(_IMAGE_IDS) == len(IMAGE_TOKENS)
        ids |= {name: FIRST_IMAGE_ID + number for number, name in enumerate(_IMAGE_IDS)}
    return ids


def _vision(config: Config, small: Config) -> Config:
    vision = config["vision_config"]
    optional = {name: value for name, value in OF_TOWERS.items() if name in vision}
    tower = {**vision, **VISION, **optional, "out_hidden_size": small["hidden_size"]}
    return {"vision_config": tower, **{name: _sections(config[name]) for name in _ROTARY if config.get(name)}}


def _sections(rotary: Config) -> Config:
    """Scale the rotary sections (time, height, width) to half the small head size."""
    sections = rotary.get("mrope_section")
    return {**rotary, "mrope_section": [part * HEAD // 2 // sum(sections) for part in sections]} if sections else rotary


def _note(config: Config, small: Config, changes: Changes) -> None:
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups and groups != heads and not config.get("kv_lora_rank"):
        changes.kept("config.json: query heads per key/value head", heads // groups)
    for name in _STRUCTURE:
        if config.get(name) is not None and small.get(name) == config[name]:
            changes.kept(f"config.json: {name}", config[name])
    for name, value in small.items():
        if name in config and config[name] != value and not name.endswith("token_id"):
            changes.note("reduced", f"config.json: {name}", config[name], value, _REASONS.get(name, "size"))
