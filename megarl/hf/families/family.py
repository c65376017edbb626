"""A model family: how its checkpoints are stored, how Megatron builds it, and its unsupported config.json settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.hf.families.rows import TableRow
from megarl.hf.families.slices import Config
from megarl.hf.families.stacks import STACKS

Refusals = Iterator[tuple[bool, str]]
"""(is present, description) of each config.json setting that the trainer does not support."""


def never(config: Config, layer: int) -> bool:
    """Return False: every layer is dense."""
    return False


def after_the_first(config: Config, layer: int) -> bool:
    """Return whether a layer follows the leading dense layers."""
    return layer >= config.get("first_k_dense_replace", 0)


def no_refusals(config: Config) -> Refusals:
    """Yield nothing: every setting is supported."""
    return iter(())


_NUMBER = re.compile(r"(layers\.|\.(?:weight|bias)(?=\d+$))(\d+)")


@dataclass(frozen=True)
class Family:
    """Models of one architecture. All functions take a configuration from `text_fields`."""

    rows: tuple[TableRow, ...]
    settings: Callable[[Config], dict[str, Any]]
    """Fields of Megatron's TransformerConfig that differ from its defaults, beyond the sizes that every model has."""

    sparse: Callable[[Config, int], bool] = never
    """Whether a layer, counted from 0, is a mixture of experts."""

    unsupported: Callable[[Config], Refusals] = no_refusals
    rotary: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Kinds of rotary scaling (`rope_type`) that the trainer supports."""

    prefix: str = ""  # of the text model's parameters in Megatron
    ties: bool = True  # the output layer may share the embedding's weights
    biased: bool = False  # attention_bias in config.json is supported, or part of the architecture
    latent: bool = False  # multi-head latent attention
    indexer: str = ""  # sparse attention: "halves" or "interleaved", the rotated elements of its indexer's heads
    sinks: bool = False  # each head has a learned logit that only the softmax's denominator has
    windows: bool = False  # sliding windows in some layers are part of the architecture
    whole_experts: bool = False  # vLLM loads experts without its weight loaders: engine ranks collect whole tensors
    post_norms: bool = False  # norms of the outputs of attention and of the MLP, before they are added
    scaled_embeddings: bool = False  # embeddings are multiplied by the square root of the hidden size
    rotary_kinds: bool = (
        False  # layers with a sliding window have other rotary frequencies than those with full attention
    )
    biased_softmax: bool = False  # experts are scored by a softmax over all and chosen with a bias
    wide_norms: bool = False  # norms of queries and keys over all heads together, not of each head
    carried: tuple[str, ...] = ("mtp.",)
    """Prefixes of tensors that are not trained and are exported unchanged; so are layers beyond the last."""

    numbered_prediction: bool = True  # layers of multi-token prediction are numbered after the last layer (DeepSeek-V3)

    alone: tuple[str, str] | None = None
    """`model_type` and class of the language model without a tower that is not trained: tiny copies are of this model."""

    tower: bool = False  # has a vision tower, which is trained
    deepstack: bool = False  # the tower also feeds the first layers of the text model
    delta_nets: bool = False  # gated delta nets in the layers that `layer_types` calls linear_attention
    adapters: bool = False  # LoRA is tested for this family
    no_cpu_engine: str = ""
    """What vLLM's CPU build lacks, so that it cannot sample from the family; "" if it can."""

    origin: str = ""  # for errors: where the table is, if not in a module of this folder
    reads_as: str = ""  # model_type under which transformers loads config.json, if it lacks this one

    @cached_property
    def by_parameter(self) -> dict[str, TableRow]:
        """The rows by Megatron's name, with placeholders for numbers."""
        return {row.parameter: row for row in self.rows}

    @property
    def stacks_experts(self) -> bool:
        """True if a checkpoint stores all experts of a layer as one tensor."""
        return any(row.kind in STACKS for row in self.rows)

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
            raise ValueError(
                f"{self.origin or f'the table in {self.settings.__module__}'} has no row for Megatron's parameter {parameter}: add one "
                "(docs/add_a_model.md)"
            )
        return TableRow(row.kind, parameter, tuple(name.format(**numbers) for name in row.tensors))


def sparse_layers(family: Family, config: Config) -> list[int]:
    """Return Megatron's `moe_layer_freq`: 1 for each layer that is a mixture of experts, else 0."""
    return [int(family.sparse(config, layer)) for layer in range(config["num_hidden_layers"])]
