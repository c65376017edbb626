"""A config.json with its kind, its pattern of layers and its ratios, at a size of some hundred thousand parameters. Pure."""

from __future__ import annotations

from typing import Any

from megarl.commands.data.tiny_tokenizer import EOS_ID, FIRST_IMAGE_ID, IMAGE_TOKENS, PAD_ID, VOCAB_LIMIT
from megarl.commands.rehearse.changes import Changes
from megarl.hf.config import number_of_experts, text_fields

Config = dict[str, Any]

# Sizes that vLLM has CPU kernels for, and that two tensor-parallel ranks divide.
HEAD, HIDDEN, WIDTH, EXPERT_WIDTH, RANK = 32, 64, 128, 64, 32
EXPERTS, CHOSEN, GROUPS = 8, 2, 4
VISION = {"depth": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "fullatt_block_indexes": [1, 3], "window_size": 56}  # fmt: skip
_SPREAD = 0.05  # of random weights
_OF_FILES = "of the files; model.dtype is the trainer's"
_WHY = {"initializer_range": "random weights", "dtype": _OF_FILES, "torch_dtype": _OF_FILES}
_ROTARY = ("rope_scaling", "rope_parameters")  # before transformers 5, and since

# What is told of as kept where a model has it: with these it would be another kind of model.
_STRUCTURE = (
    "model_type", "architectures", "num_nextn_predict_layers", "n_shared_experts", "kv_lora_rank", "qk_rope_head_dim",
    "tie_word_embeddings", *_ROTARY, "rope_theta", "attention_bias", "use_qk_norm", "partial_rotary_factor", "scoring_func", "topk_method", "norm_topk_prob",
    "routed_scaling_factor", "decoder_sparse_step", "mlp_only_layers", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def shrink_model(hf_config: Config, layers: int, changes: Changes) -> Config:
    """The twin of a config.json, with at least `layers` layers. What became of it is noted in `changes`."""
    given = text_fields(hf_config)
    given.pop("text_config", None)
    small = {**given, **_attention(given), **_experts(given), **_ids(given)}
    dense = min(1, given.get("first_k_dense_replace") or 0)
    if dense:
        small["first_k_dense_replace"] = dense
    small |= {"num_hidden_layers": max(layers, dense + 1), "vocab_size": VOCAB_LIMIT, "initializer_range": _SPREAD}
    small |= {"intermediate_size": WIDTH, "dtype" if "dtype" in given else "torch_dtype": "float32"}
    small |= _of_each_layer(given, small["num_hidden_layers"])
    if "vision_config" in given:
        small |= _vision(given, small)
    _note(given, small, changes)
    return small


def _of_each_layer(given: Config, layers: int) -> Config:
    """What transformers 5 writes of each layer, and of where layers begin to differ."""
    small: Config = {}
    if kinds := given.get("layer_types"):
        small["layer_types"] = (kinds * layers)[:layers]
    if given.get("max_window_layers") is not None:
        small["max_window_layers"] = min(given["max_window_layers"], layers)
    return small


def _attention(given: Config) -> Config:
    """Heads and key/value heads in the model's ratio; of latent attention, which has no such heads, the ranks."""
    heads = given["num_attention_heads"]
    if given.get("kv_lora_rank"):
        rank = {"q_lora_rank": RANK} if given.get("q_lora_rank") else {}
        small = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": HIDDEN}
        whole = {"qk_head_dim": HEAD + given["qk_rope_head_dim"]} if "qk_head_dim" in given else {}
        return {**small, **rank, **whole, "qk_nope_head_dim": HEAD, "v_head_dim": HEAD}
    groups = given.get("num_key_value_heads") or heads
    small_groups = min(groups, 2)
    small = {"num_attention_heads": small_groups * (heads // groups), "num_key_value_heads": small_groups}
    if given.get("head_dim"):
        return {**small, "head_dim": HEAD, "hidden_size": HIDDEN}
    return {**small, "hidden_size": HEAD * small["num_attention_heads"]}


def _experts(given: Config) -> Config:
    """As many groups and chosen experts as show how they are chosen."""
    if not number_of_experts(given):
        return {}
    name = next(name for name in ("num_experts", "n_routed_experts", "num_local_experts") if given.get(name))
    small = {name: min(given[name], EXPERTS), "moe_intermediate_size": EXPERT_WIDTH, "num_experts_per_tok": min(given["num_experts_per_tok"], CHOSEN)}  # fmt: skip
    if (given.get("n_group") or 1) > 1:
        groups = min(given["n_group"], GROUPS)
        chosen = min(given["topk_group"], groups // 2)
        each = given["num_experts_per_tok"] // given["topk_group"]  # of a group: Megatron knows two alone
        small |= {"n_group": groups, "topk_group": chosen, "num_experts_per_tok": each * chosen}
    return small


def _ids(given: Config) -> Config:
    """The tiny tokenizer's."""
    ids: Config = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    if "vision_config" in given:
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        assert len(names) == len(IMAGE_TOKENS)
        ids |= {name: FIRST_IMAGE_ID + number for number, name in enumerate(names)}
    return ids


def _vision(given: Config, small: Config) -> Config:
    tower = {**given["vision_config"], **VISION, "out_hidden_size": small["hidden_size"]}
    return {"vision_config": tower, **{name: _sections(given[name]) for name in _ROTARY if given.get(name)}}


def _sections(rotary: Config) -> Config:
    """With the parts of half a head that are for time, height and width."""
    sections = rotary.get("mrope_section")
    return {**rotary, "mrope_section": [part * HEAD // 2 // sum(sections) for part in sections]} if sections else rotary


def _note(given: Config, small: Config, changes: Changes) -> None:
    heads, groups = given["num_attention_heads"], given.get("num_key_value_heads")
    if groups and groups != heads and not given.get("kv_lora_rank"):
        changes.kept("config.json: query heads of a key/value head", heads // groups)
    for name in _STRUCTURE:
        if given.get(name) is not None and small.get(name) == given[name]:
            changes.kept(f"config.json: {name}", given[name])
    for name, value in small.items():
        if name in given and given[name] != value and not name.endswith("token_id"):
            changes.note("reduced", f"config.json: {name}", given[name], value, _WHY.get(name, "size"))
