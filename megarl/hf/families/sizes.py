"""Shapes of a model's parameters and checkpoint tensors, from config.json and the family's table. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megarl.hf.config import layer_kinds, number_of_experts
from megarl.hf.families.family import Family
from megarl.hf.families.rows import TableRow
from megarl.hf.families.slices import Config, ParameterShard, delta_sizes

Shape = tuple[int, ...]


class Parameter(NamedTuple):
    """A Megatron parameter of the whole model, without parallelism."""

    row: TableRow  # with numbers filled in
    shape: Shape


def parameters(family: Family, config: Config) -> Iterator[Parameter]:
    """Yield the parameters of the text model, layer by layer. `config`: from `text_fields`."""
    vocabulary, hidden = (config["vocab_size"], config["hidden_size"]), (config["hidden_size"],)
    outside = {"embedding.word_embeddings.weight": vocabulary, "decoder.final_layernorm.weight": hidden}
    if not config.get("tie_word_embeddings"):
        outside["output_layer.weight"] = vocabulary
    for name, shape in outside.items():
        yield Parameter(family.row_of(family.prefix + name), shape)
    for layer in range(config["num_hidden_layers"]):
        yield from layer_parameters(family, config, layer)


def layer_parameters(family: Family, config: Config, layer: int) -> Iterator[Parameter]:
    """Yield the parameters of one layer."""
    shapes = {**_mixer(family, config, layer), **_mlp(family, config, layer)}
    for name, shape in shapes.items():
        numbered = (
            [name.format(expert=expert) for expert in range(number_of_experts(config))] if "{" in name else [name]
        )
        for full in numbered:
            yield Parameter(family.row_of(f"{family.prefix}decoder.layers.{layer}.{full}"), shape)


def tensors(family: Family, config: Config) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of each tensor of a checkpoint's text model."""
    seen = set()  # a stack of experts has a row for each
    for row, shape in parameters(family, config):
        for name, place in zip(row.tensors, row.kind(config, shape, ParameterShard()), strict=True):
            if name not in seen:
                seen.add(name)
                yield name, place.shape


def _mixer(family: Family, config: Config, layer: int) -> dict[str, Shape]:
    """Return the shapes of attention, or of what a layer has in its place, with the norm before it."""
    if family.delta_nets and layer_kinds(config)[layer] == "linear_attention":
        shapes = _delta_net(config)
    elif family.latent:
        shapes = {**_latent_attention(config), **(_indexer(config) if family.indexer else {})}
    else:
        shapes = _attention(family, config)
    return {
        name if name == "input_layernorm.weight" else f"self_attention.{name}": shape for name, shape in shapes.items()
    }


def _attention(family: Family, config: Config) -> dict[str, Shape]:
    settings = family.settings(config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups, size = config.get("num_key_value_heads") or heads, head_size(config)
    rows = (heads * (2 if settings.get("attention_output_gate") else 1) + 2 * groups) * size
    shapes: dict[str, Shape] = {"linear_qkv.layer_norm_weight": (hidden,), "linear_qkv.weight": (rows, hidden)}
    biased = bool(settings.get("add_bias_linear"))
    if biased or settings.get("add_qkv_bias"):
        shapes["linear_qkv.bias"] = (rows,)
    if biased:
        shapes["linear_proj.bias"] = (hidden,)
    if family.sinks:
        shapes["core_attention.softmax_offset"] = (heads,)
    if settings.get("qk_layernorm") or family.wide_norms:
        shapes["q_layernorm.weight"] = (heads * size if family.wide_norms else size,)
        shapes["k_layernorm.weight"] = (groups * size if family.wide_norms else size,)
    if family.post_norms:
        shapes["linear_proj.post_norm_weight"] = (hidden,)
    return {**shapes, "linear_proj.weight": (hidden, heads * size)}


def _latent_attention(config: Config) -> dict[str, Shape]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query, query_rank = heads * (plain + rotary), config.get("q_lora_rank")
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    if query_rank:
        shapes["linear_q_down_proj.weight"] = (query_rank, hidden)
        shapes["linear_q_up_proj.layer_norm_weight"] = (query_rank,)
        shapes["linear_q_up_proj.weight"] = (query, query_rank)
    else:
        shapes["linear_q_proj.weight"] = (query, hidden)
    return {
        **shapes,
        "linear_kv_down_proj.weight": (rank + rotary, hidden),
        "linear_kv_up_proj.layer_norm_weight": (rank,),
        "linear_kv_up_proj.weight": (heads * (plain + value), rank),
        "linear_proj.weight": (hidden, heads * value),
    }


def _indexer(config: Config) -> dict[str, Shape]:
    heads, size, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    return {
        "indexer.wq_b": (heads * size, config["q_lora_rank"]),
        "indexer.wk": (size, hidden),
        "indexer.k_norm_weight": (size,),
        "indexer.k_norm_bias": (size,),
        "indexer.weights_proj": (heads, hidden),
    }


def _delta_net(config: Config) -> dict[str, Shape]:
    hidden, sizes, kernel = config["hidden_size"], delta_sizes(config), config["linear_conv_kernel_dim"]
    values = sizes.heads * sizes.per_key
    return {
        "in_proj.layer_norm_weight": (hidden,),
        "in_proj.weight": (sizes.heads * sum(sizes.parts), hidden),
        "convolution": (sizes.heads * sum(sizes.parts[:3]), 1, kernel),
        "A_log": (values,),
        "dt_bias": (values,),
        "norm": (config["linear_value_head_dim"],),
        "out_proj.weight": (hidden, sizes.heads * sizes.value),
    }


def _mlp(family: Family, config: Config, layer: int) -> dict[str, Shape]:
    hidden = config["hidden_size"]
    if not family.sparse(config, layer):
        after = {"mlp.linear_fc2.post_norm_weight": (hidden,)} if family.post_norms else {}
        norm = "mlp.linear_fc1.layer_norm_weight"
        return _gated("mlp.linear_fc{}.weight", hidden, config["intermediate_size"], norm=norm) | after
    settings: dict[str, Any] = family.settings(config)
    experts = number_of_experts(config)
    shapes = {"pre_mlp_layernorm.weight": (hidden,), "mlp.router.weight": (experts, hidden)}
    if settings.get("moe_router_enable_expert_bias"):
        shapes["mlp.router.expert_bias"] = (experts,)
    width = settings["moe_ffn_hidden_size"]
    shapes |= _gated("mlp.experts.linear_fc{}.weight{{expert}}", hidden, width)
    if settings.get("add_bias_linear"):
        shapes["mlp.router.bias"] = (experts,)
        shapes |= {
            "mlp.experts.linear_fc1.bias{expert}": (2 * width,),
            "mlp.experts.linear_fc2.bias{expert}": (hidden,),
        }
    if shared := settings.get("moe_shared_expert_intermediate_size"):
        shapes |= _gated("mlp.shared_experts.linear_fc{}.weight", hidden, shared)
    if settings.get("moe_shared_expert_gate"):
        shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
    return shapes


def _gated(name: str, hidden: int, width: int, norm: str | None = None) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {norm: (hidden,)} if norm else {}
    return shapes | {name.format(1): (2 * width, hidden), name.format(2): (hidden, width)}


def head_size(config: Config) -> int:
    """Return the size of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
