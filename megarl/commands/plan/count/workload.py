"""Largest work of a trainer rank, first ranks of pipeline stages, and time-sharing of devices. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.batching.limits import largest_micro_batch
from megarl.platform.kinds import is_accelerator
from megarl.recipe.data import DataConfig
from megarl.recipe.derived.lengths import longest_sample
from megarl.recipe.derived.offload import offloads
from megarl.recipe.schema import ClusterConfig, Recipe
from megarl.recipe.trainers import MegatronConfig


@dataclass(frozen=True)
class Workload:
    lengths: list[int]  # sequences of a micro batch, over all context-parallel parts
    micro_batches: int  # micro batches to run
    backwards: int | None  # backward passes to observe; None: all


def peak_workload(recipe: Recipe, stage: int) -> Workload:
    """Return a full micro batch, and as many of them as a pipeline stage ever has in flight.

    Sequences have the longest length, or equal lengths that fill the micro batch: attention memory does not depend on the
    split. A sequence longer than a micro batch runs alone, and so does a group that must stay together.
    """
    longest, tokens = longest_sample(recipe), largest_micro_batch(recipe)
    if recipe.megatron.packing:
        count = math.ceil(tokens / longest)
        lengths = [tokens * (i + 1) // count - tokens * i // count for i in range(count)]
    else:  # padded: each sequence is computed with the longest length
        lengths = [longest] * (tokens // longest)
    return Workload(lengths, *_in_flight(recipe.megatron, stage))


def _in_flight(megatron: MegatronConfig, stage: int) -> tuple[int, int | None]:
    """Return the micro batches that fill the pipeline for `stage`, and the backward passes until its peak.

    1F1B has one micro batch in flight per stage from this one on. Its peak comes at the second backward pass (a mixture of
    experts leaves memory that lives until its next forward pass). Interleaving has more in flight, at most two rounds of
    the pipeline over different chunks.
    """
    if megatron.virtual_pipeline:
        return 2 * megatron.pipeline_parallel, None
    return max(2, megatron.pipeline_parallel - stage), 2


def first_ranks(megatron: MegatronConfig, world_size: int) -> list[int]:
    """Return the first rank of each pipeline stage."""
    each = world_size // megatron.pipeline_parallel
    return [stage * each for stage in range(megatron.pipeline_parallel)]


def image_tokens(data: DataConfig, pixels: int) -> int:
    """Return the tokens of the largest image: `data.max_pixels` at `pixels` per token, or the longest prompt."""
    longest = data.max_prompt_length
    return longest if data.max_pixels is None else min(longest, max(1, data.max_pixels // pixels))


def image_grid(tokens: int, merge: int) -> tuple[int, int]:
    """Return rows and columns of patches, `merge` x `merge` per token, of a nearly square image of at most `tokens` tokens."""
    rows = math.isqrt(tokens)
    return rows * merge, tokens // rows * merge


def is_time_shared(cluster: ClusterConfig) -> bool:
    """Return True if colocated processes can leave a shared device (a CPU has host memory only)."""
    return cluster.placement == "colocated" and is_accelerator(cluster.device)


def trainers_offload(recipe: Recipe) -> bool:
    """Return True if the actor's trainers offload while others use the device. For the critic: with `critic_view`."""
    return is_time_shared(recipe.cluster) and offloads(recipe)
