"""Rows of the families' tables that several families share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.hf.families.slices import Kind, copy, delta_convolution, gate_up, gated_qkv, qkv, tower_qkv, vocabulary


@dataclass(frozen=True)
class TableRow:
    """Tensors of a checkpoint that hold one Megatron parameter.

    `{layer}` and `{expert}` stand for numbers that count over all pipeline stages and ranks.
    """

    kind: Kind
    parameter: str
    tensors: tuple[str, ...]


def row(kind: Kind, parameter: str, *tensors: str) -> TableRow:
    """Map a Megatron parameter to checkpoint tensors: one row of a family's table."""
    return TableRow(kind, parameter, tensors)


def prefixed(rows: Iterable[TableRow], parameter: str, tensor: str) -> tuple[TableRow, ...]:
    """Return `rows` with prefixes for Megatron's and the checkpoint's names."""
    return tuple(
        TableRow(row.kind, parameter + row.parameter, tuple(tensor + name for name in row.tensors)) for row in rows
    )


def in_layers(*rows: TableRow) -> tuple[TableRow, ...]:
    """Return `rows` of a decoder layer with the names that they have in the model."""
    return prefixed(rows, "decoder.layers.{layer}.", "model.layers.{layer}.")


def under(prefix: str, rows: Iterable[TableRow]) -> tuple[TableRow, ...]:
    """Return `rows` with tensors under `prefix` instead of "model."."""
    return tuple(
        TableRow(row.kind, row.parameter, tuple(re.sub(r"^model\.", prefix, name) for name in row.tensors))
        for row in rows
    )


MODEL = (
    row(vocabulary, "embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    row(copy, "decoder.final_layernorm.weight", "model.norm.weight"),
    row(vocabulary, "output_layer.weight", "lm_head.weight"),
)
"""Rows outside the layers."""

ATTENTION = in_layers(
    row(copy, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    row(
        qkv,
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkv"),
    ),
    row(qkv, "self_attention.linear_qkv.bias", *(f"self_attn.{name}_proj.bias" for name in "qkv")),
    row(copy, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    row(copy, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    row(copy, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
"""Grouped-query attention. A model without biases or norms of queries and keys has no such parameters."""

DENSE = in_layers(
    row(copy, "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    row(gate_up, "mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    row(copy, "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
"""A gated MLP."""

EXPERTS = in_layers(
    row(copy, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    row(copy, "mlp.router.weight", "mlp.gate.weight"),
    row(
        gate_up,
        "mlp.experts.linear_fc1.weight{expert}",
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    row(copy, "mlp.experts.linear_fc2.weight{expert}", "mlp.experts.{expert}.down_proj.weight"),
)
"""A mixture of experts."""


def stacked_experts(kind: Kind) -> tuple[TableRow, ...]:
    """Return the rows of a mixture of experts of which the checkpoint stores all experts of a layer as one tensor."""
    return (
        *(each for each in EXPERTS if "{expert}" not in each.parameter),
        *in_layers(
            row(kind, "mlp.experts.linear_fc1.weight{expert}", "mlp.experts.gate_up_proj"),
            row(kind, "mlp.experts.linear_fc2.weight{expert}", "mlp.experts.down_proj"),
        ),
    )


def shared_experts(name: str) -> tuple[TableRow, ...]:
    """Return the rows of shared experts, which the checkpoint calls `name`."""
    return in_layers(
        row(
            gate_up,
            "mlp.shared_experts.linear_fc1.weight",
            f"mlp.{name}.gate_proj.weight",
            f"mlp.{name}.up_proj.weight",
        ),
        row(copy, "mlp.shared_experts.linear_fc2.weight", f"mlp.{name}.down_proj.weight"),
    )


ROUTING_BIAS = in_layers(row(copy, "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"))

LATENT_ATTENTION = in_layers(
    row(copy, "input_layernorm.weight", "input_layernorm.weight"),
    row(copy, "self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    row(copy, "self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    row(copy, "self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    row(copy, "self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    row(copy, "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    row(copy, "self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    row(copy, "self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    row(copy, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
"""Multi-head latent attention."""

GATED_ATTENTION = in_layers(
    row(copy, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    row(gated_qkv, "self_attention.linear_qkv.weight", *(f"self_attn.{name}_proj.weight" for name in "qkv")),
    row(copy, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    row(copy, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    row(copy, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
DELTA_NET = in_layers(
    row(copy, "self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
    row(delta_convolution, "self_attention.convolution", "linear_attn.conv1d.weight"),
    row(copy, "self_attention.A_log", "linear_attn.A_log"),
    row(copy, "self_attention.dt_bias", "linear_attn.dt_bias"),
    row(copy, "self_attention.norm", "linear_attn.norm.weight"),
    row(copy, "self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
)

TOWER_LAYER = (
    row(copy, "self_attention.linear_qkv.layer_norm_weight", "norm1.weight"),
    row(tower_qkv, "self_attention.linear_qkv.weight", "attn.qkv.weight"),
    row(tower_qkv, "self_attention.linear_qkv.bias", "attn.qkv.bias"),
    row(copy, "self_attention.linear_proj.weight", "attn.proj.weight"),
    row(copy, "self_attention.linear_proj.bias", "attn.proj.bias"),
    row(copy, "mlp.linear_fc1.layer_norm_weight", "norm2.weight"),
)
"""A layer of Qwen2.5-VL's and Qwen3-VL's vision towers, without its MLP."""

_TOWER_MLP = tuple(
    row(copy, name, name) for name in (f"linear_fc{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias"))
)
_DEEPSTACK_LAYER = (
    *TOWER_LAYER,
    row(copy, "self_attention.linear_qkv.layer_norm_bias", "norm1.bias"),
    row(copy, "mlp.linear_fc1.layer_norm_bias", "norm2.bias"),
    *prefixed(_TOWER_MLP, "mlp.", "mlp."),
)
_MERGER = (
    *(row(copy, f"norm.{kind}", f"norm.{kind}") for kind in ("weight", "bias")),
    *prefixed(_TOWER_MLP, "mlp.", ""),
)
DEEPSTACK_TOWER = prefixed(
    (
        row(copy, "patch_embed.weight", "patch_embed.proj.weight"),
        row(copy, "patch_embed.bias", "patch_embed.proj.bias"),
        row(copy, "pos_embed.weight", "pos_embed.weight"),
        *prefixed(_DEEPSTACK_LAYER, "layers.{layer}.", "blocks.{layer}."),
        *prefixed(_MERGER, "merger.", "merger."),
        *prefixed(_MERGER, "deepstack_layers.{layer}.", "deepstack_merger_list.{layer}."),
    ),
    "vision_model.",
    "model.visual.",
)
"""Qwen3-VL's vision tower."""
