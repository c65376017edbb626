"""Bytes that a layout needs at least, by arithmetic: what does not fit by these is not worth counting. Pure.

Of what a rank holds: matrices alone, as if tensor parallel cut all of them, without padding. Of activations: what layers
keep of each micro batch under way, as far as it is certain. Everything else is left out, so it is less than what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.commands.plan.count.workload import largest
from megarl.hf.shape import ModelShape
from megarl.megatron.layout import layers_of_chunks, uses_sequence_parallel
from megarl.platform.adaptor import swapped_parts
from megarl.recipe.optimizer_extra import host_share
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class Part:
    """What a pipeline stage has of the model."""

    number: int
    dense: int  # layers
    sparse: int  # layers that are mixtures of experts
    first: bool  # has the embedding
    last: bool  # has the output layer

    @property
    def layers(self) -> int:
        return self.dense + self.sparse

    def covers(self, later: Part) -> bool:
        """Whether it needs as much as a later stage at least: it has all that the later one has, and no fewer micro
        batches under way."""
        return (
            self.dense >= later.dense
            and self.sparse >= later.sparse
            and self.first >= later.first
            and self.last >= later.last
        )


def parts(recipe: Recipe, shape: ModelShape) -> list[Part]:
    """Of each pipeline stage."""
    stages = recipe.megatron.pipeline_parallel
    chunks = layers_of_chunks(shape.layers, recipe.megatron)
    found = []
    for stage in range(stages):
        own = [shape.sparse[layer] for chunk in chunks[stage::stages] for layer in chunk]
        found.append(Part(stage, own.count(False), own.count(True), stage == 0, stage == stages - 1))
    return found


def largest_parts(recipe: Recipe, shape: ModelShape) -> list[Part]:
    """Those of which one has the peak: no earlier one covers them."""
    found: list[Part] = []
    for part in parts(recipe, shape):
        if not any(earlier.covers(part) for earlier in found):
            found.append(part)
    return found


def chunks_under_way(recipe: Recipe, stage: int) -> tuple[int, int]:
    """(n, v): n times the v-th part of a stage's layers keep their activations, when most do.

    1F1B: a micro batch for each stage from this one on. Interleaved: Megatron's warm-up, 2 (p - s - 1) + (v - 1) p
    chunks, and one more.
    """
    stages, chunks = recipe.megatron.pipeline_parallel, recipe.megatron.virtual_pipeline
    if chunks is None:
        return stages - stage, 1
    return 2 * (stages - stage - 1) + (chunks - 1) * stages + 1, chunks


@dataclass(frozen=True)
class Parameters:
    """Of one rank."""

    every: float  # of what every data-parallel rank holds
    routed: float  # of its experts


def parameters(recipe: Recipe, shape: ModelShape, part: Part) -> Parameters:
    megatron = recipe.megatron
    plain = part.layers * shape.attention.weights + part.dense * shape.dense + part.sparse * shape.shared
    plain += shape.output * (part.first + (part.last and not (part.first and shape.tied)))
    cut = megatron.expert_parallel * (megatron.expert_tensor_parallel or 1)
    return Parameters(plain / megatron.tensor_parallel, part.sparse * shape.experts * shape.expert / cut)


def held_at_least(recipe: Recipe, shape: ModelShape, part: Part) -> float:
    """Weights; and, but for adapters, gradients in float32, and the optimizer's states where they are not on the host."""
    megatron, narrow = recipe.megatron, recipe.model.dtype == "bfloat16"
    own = parameters(recipe, shape, part)
    weights = (own.every + own.routed) * (2 if narrow else 4)
    if recipe.lora.rank:
        return weights
    gradients = 4 * (own.every + own.routed)
    if swapped_parts(megatron.extra):
        return weights + gradients
    stage = recipe.cluster.trainers // megatron.pipeline_parallel
    cut = megatron.expert_parallel * (megatron.expert_tensor_parallel or 1)
    copies, copies_of_experts = stage // megatron.tensor_parallel, stage // cut
    if not megatron.distributed_optimizer:
        copies = copies_of_experts = 1
    states = (12 if narrow else 8) * (own.every / copies + own.routed / copies_of_experts)
    return weights + gradients + states * (1 - host_share(recipe.actor.optimizer))


def kept_at_least(recipe: Recipe, shape: ModelShape, part: Part) -> float:
    """What layers keep for the backward pass: with full recomputation, and with adapters, whose frozen linears keep
    nothing, their inputs; else the inputs of norms and linears, keys and values, and what the MLPs are made of."""
    megatron = recipe.megatron
    pieces = megatron.tensor_parallel if uses_sequence_parallel(megatron) else 1
    inputs = part.layers * shape.hidden / pieces
    if megatron.recompute != "full" and not recipe.lora.rank:
        inputs += 3 * part.layers * shape.hidden / pieces
        made = part.layers * shape.attention.keys_and_values + part.dense * shape.dense / shape.hidden
        made += part.sparse * shape.chosen * (shape.hidden + shape.expert / shape.hidden)
        inputs += made / megatron.tensor_parallel
    tokens = sum(largest(recipe, part.number).lengths) / megatron.context_parallel
    times, chunks = chunks_under_way(recipe, part.number)
    return times / chunks * tokens * inputs * (2 if recipe.model.dtype == "bfloat16" else 4)


def at_least(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes of the device of the rank that needs the most."""
    return max(
        held_at_least(recipe, shape, part) + kept_at_least(recipe, shape, part) for part in largest_parts(recipe, shape)
    )
