"""Lower bound of a layout's memory by arithmetic: layouts above the device's memory need not be counted. Pure.

Held memory: matrices only, as if tensor parallelism cut all of them, without padding. Activations: the part that layers
certainly keep per micro batch in flight. Everything else is left out, so the bound is below the counted memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.commands.plan.count.workload import peak_workload
from megarl.hf.shape import ModelShape
from megarl.megatron.layout import layers_of_chunks, uses_sequence_parallel
from megarl.platform.adaptor import swapped_parts
from megarl.recipe.derived.optimizer_extra import host_share
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig


@dataclass(frozen=True)
class StagePart:
    """Layers of the model in one pipeline stage."""

    number: int
    dense: int  # layers
    sparse: int  # layers that are mixtures of experts
    first: bool  # has the embedding
    last: bool  # has the output layer

    @property
    def layers(self) -> int:
        return self.dense + self.sparse

    def covers(self, later: StagePart) -> bool:
        """Return True if this stage needs at least as much memory as a later stage: it has all its layers, and no fewer
        micro batches in flight."""
        return (
            self.dense >= later.dense
            and self.sparse >= later.sparse
            and self.first >= later.first
            and self.last >= later.last
        )


def parts(megatron: MegatronConfig, shape: ModelShape) -> list[StagePart]:
    """Return the part of each pipeline stage."""
    stages = megatron.pipeline_parallel
    chunks = layers_of_chunks(shape.layers, megatron)
    result = []
    for stage in range(stages):
        layers = [shape.sparse[layer] for chunk in chunks[stage::stages] for layer in chunk]
        result.append(StagePart(stage, layers.count(False), layers.count(True), stage == 0, stage == stages - 1))
    return result


def largest_parts(megatron: MegatronConfig, shape: ModelShape) -> list[StagePart]:
    """Return the pipeline stages that could hold the memory peak (covered by no earlier stage)."""
    result: list[StagePart] = []
    for part in parts(megatron, shape):
        if not any(earlier.covers(part) for earlier in result):
            result.append(part)
    return result


def chunks_in_flight(megatron: MegatronConfig, stage: int) -> tuple[int, int]:
    """Return (n, v): at the peak, n chunks of layers keep activations, each 1 / v of the stage's layers.

    1F1B: a micro batch for each stage from this one on. Interleaved: Megatron's warm-up, 2 (p - s - 1) + (v - 1) p
    chunks, and one more.
    """
    stages, chunks = megatron.pipeline_parallel, megatron.virtual_pipeline
    if chunks is None:
        return stages - stage, 1
    return 2 * (stages - stage - 1) + (chunks - 1) * stages + 1, chunks


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank, by number of replicas."""

    every: float  # shared by all data-parallel ranks
    routed: float  # experts


def parameters(megatron: MegatronConfig, shape: ModelShape, part: StagePart) -> Parameters:
    plain = part.layers * shape.attention.least + part.dense * shape.dense + part.sparse * shape.shared
    plain += shape.output * (part.first + (part.last and not (part.first and shape.tied)))
    cut = megatron.expert_parallel * (megatron.expert_tensor_parallel or 1)
    return Parameters(plain / megatron.tensor_parallel, part.sparse * shape.experts * shape.expert / cut)


def min_held_bytes(recipe: Recipe, shape: ModelShape, part: StagePart) -> float:
    """Return bytes of weights and, without adapters, of float32 gradients and of optimizer states on the device."""
    megatron, narrow = recipe.megatron, recipe.model.dtype == "bfloat16"
    counts = parameters(recipe.megatron, shape, part)
    weights = (counts.every + counts.routed) * (2 if narrow else 4)
    if recipe.lora.rank:
        return weights
    gradients = 4 * (counts.every + counts.routed)
    if swapped_parts(megatron.extra):
        return weights + gradients
    stage = recipe.cluster.trainers // megatron.pipeline_parallel
    cut = megatron.expert_parallel * (megatron.expert_tensor_parallel or 1)
    copies, copies_of_experts = stage // megatron.tensor_parallel, stage // cut
    if not megatron.distributed_optimizer:
        copies = copies_of_experts = 1
    states = (12 if narrow else 8) * (counts.every / copies + counts.routed / copies_of_experts)
    return weights + gradients + states * (1 - host_share(recipe.actor.optimizer))


def min_kept_bytes(recipe: Recipe, shape: ModelShape, part: StagePart) -> float:
    """Return bytes that layers keep for the backward pass.

    With full recomputation, or adapters (frozen linears keep nothing): the layers' inputs. Else also the inputs of norms
    and linears, keys and values, and the intermediate values of MLPs.
    """
    megatron = recipe.megatron
    pieces = megatron.tensor_parallel if uses_sequence_parallel(megatron) else 1
    inputs = part.layers * shape.hidden / pieces
    if megatron.recompute != "full" and not recipe.lora.rank:
        inputs += 3 * part.layers * shape.hidden / pieces
        intermediate = part.layers * shape.attention.keys_and_values + part.dense * shape.dense / shape.hidden
        intermediate += part.sparse * shape.chosen * (shape.hidden + shape.expert / shape.hidden)
        inputs += intermediate / megatron.tensor_parallel
    tokens = sum(peak_workload(recipe, part.number).lengths) / megatron.context_parallel
    times, chunks = chunks_in_flight(recipe.megatron, part.number)
    return times / chunks * tokens * inputs * (2 if recipe.model.dtype == "bfloat16" else 4)


def min_peak_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Return the bytes of the fullest rank's device."""
    return max(
        min_held_bytes(recipe, shape, part) + min_kept_bytes(recipe, shape, part)
        for part in largest_parts(recipe.megatron, shape)
    )
