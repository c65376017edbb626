"""A model family: how its checkpoints are stored, how Megatron builds it, and what of its config.json is not supported. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.hf.config import number_of_experts
from megarl.hf.families.slices import Config, Kind, copy, gate_up, qkv, vocabulary

Refusals = Iterator[tuple[bool, str]]
"""(whether config.json has it, setting) for each setting that the trainer does not support."""


@dataclass(frozen=True)
class TableRow:
    """Tensors of a checkpoint that hold one Megatron parameter.

    `{layer}` and `{expert}` stand for numbers that count over all pipeline stages and ranks.
    """

    kind: Kind
    parameter: str
    tensors: tuple[str, ...]


def row(kind: Kind, parameter: str, *tensors: str) -> TableRow:
    """Return a row of a family's table."""
    return TableRow(kind, parameter, tensors)


def prefixed(rows: Iterable[TableRow], parameter: str, tensor: str) -> tuple[TableRow, ...]:
    """Return `rows` with prefixes for Megatron's and the checkpoint's names."""
    return tuple(
        TableRow(row.kind, parameter + row.parameter, tuple(tensor + name for name in row.tensors)) for row in rows
    )


def in_layers(*rows: TableRow) -> tuple[TableRow, ...]:
    """Return `rows` of a decoder layer with the names that they have in the model."""
    return prefixed(rows, "decoder.layers.{layer}.", "model.layers.{layer}.")


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


def never(config: Config, layer: int) -> bool:
    """Return that no layer is a mixture of experts."""
    return False


def after_the_first(config: Config, layer: int) -> bool:
    """Return whether a layer follows the leading dense layers."""
    return layer >= config.get("first_k_dense_replace", 0)


def supports_all(config: Config) -> Refusals:
    """Refuse nothing."""
    return iter(())


@dataclass(frozen=True)
class Family:
    """Models of one architecture. All functions take a configuration from `text_fields`."""

    rows: tuple[TableRow, ...]
    settings: Callable[[Config], dict[str, Any]]
    """Fields of Megatron's TransformerConfig that differ from its defaults, beyond the sizes that every model has."""

    sparse: Callable[[Config, int], bool] = never
    """Whether a layer, counted from 0, is a mixture of experts."""

    unsupported: Callable[[Config], Refusals] = supports_all
    rotary: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Kinds of rotary scaling (`rope_type`) that are carried over."""

    prefix: str = ""  # of the text model's parameters in Megatron
    ties: bool = True  # the output layer may share the embedding's weights
    biased: bool = False  # attention_bias in config.json is part of the architecture, or carried over
    latent: bool = False  # multi-head latent attention
    wide_norms: bool = False  # norms of queries and keys over all heads together, not of each head
    tower: bool = False  # has a vision tower, which is trained
    delta_nets: bool = False  # gated delta nets in the layers that `layer_types` calls linear_attention
    adapters: bool = False  # adapters are proven
    reads_as: str = ""  # model_type that transformers reads config.json as, where it does not know the family's

    @cached_property
    def by_parameter(self) -> dict[str, TableRow]:
        """The rows by Megatron's name, with placeholders for numbers."""
        return {row.parameter: row for row in self.rows}

    def row_of(self, parameter: str) -> TableRow:
        """Return the row of a Megatron parameter, with its numbers filled in. Raises ValueError if there is none."""
        numbers: dict[str, str] = {}

        def name_number(match: re.Match[str]) -> str:
            key = "layer" if match[1] == "layers." else "expert"
            numbers[key] = match[2]
            return f"{match[1]}{{{key}}}"

        generic = _NUMBER.sub(name_number, parameter)
        row = self.by_parameter.get(generic)
        if row is None:
            raise ValueError(f"the model's table has no row for Megatron's parameter {parameter}")
        return TableRow(row.kind, parameter, tuple(name.format(**numbers) for name in row.tensors))


_NUMBER = re.compile(r"(layers\.|\.weight(?=\d+$))(\d+)")


def rotary_scaling(config: Config) -> dict[str, Any]:
    """Return the rotary scaling in config.json: `rope_parameters` since transformers 5, `rope_scaling` before."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**scaling, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}


def rotary_base(config: Config) -> float:
    """Return the base of the rotary frequencies."""
    return rotary_scaling(config).get("rope_theta") or config.get("rope_theta") or 10000.0


def sparse_layers(family: Family, config: Config) -> list[int]:
    """Return Megatron's `moe_layer_freq`: 1 for each layer that is a mixture of experts, else 0."""
    return [int(family.sparse(config, layer)) for layer in range(config["num_hidden_layers"])]


def mixture(config: Config) -> dict[str, Any]:
    """Return Megatron's fields that all mixtures of experts share."""
    return {
        "num_moe_experts": number_of_experts(config),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "moe_grouped_gemm": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "persist_layer_norm": True,
        # megarl computes its own balancing losses: megatron/moe/router_losses.py.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
    }
