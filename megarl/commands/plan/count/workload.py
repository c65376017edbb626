"""The largest work that a recipe gives a rank at a time, and where pipeline stages begin. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.recipe.schema import Recipe
from megarl.recipe.training import MegatronConfig


@dataclass(frozen=True)
class Workload:
    lengths: list[int]  # sequences of a micro batch, all context-parallel parts together
    micro_batches: int  # of a mini batch
    backwards: int | None  # backward passes to look at; None: all


def largest(recipe: Recipe, stage: int) -> Workload:
    """A full micro batch, and as many of them as a pipeline stage ever has under way.

    Sequences are as long as they may be, or all equally long where that fills the micro batch: attention's memory does
    not depend on it. A sequence that is longer than a micro batch goes alone.
    """
    longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    tokens = max(recipe.actor.max_tokens_per_micro_batch * recipe.megatron.context_parallel, longest)
    if recipe.megatron.packing:
        count = math.ceil(tokens / longest)
        lengths = [tokens * (i + 1) // count - tokens * i // count for i in range(count)]
    else:  # each is computed as the longest
        lengths = [longest] * (tokens // longest)
    return Workload(lengths, *_under_way(recipe.megatron, stage))


def _under_way(megatron: MegatronConfig, stage: int) -> tuple[int, int | None]:
    """Micro batches that fill the pipeline for `stage`, and how many backward passes show its peak.

    1F1B has one under way for each stage from this one on. Its peak comes where a second backward pass follows the first
    (what a mixture of experts leaves behind lives until its next forward pass). Interleaving has more under way, at most
    two rounds of the pipeline, of chunks that differ.
    """
    if megatron.virtual_pipeline:
        return 2 * megatron.pipeline_parallel, None
    return max(2, megatron.pipeline_parallel - stage), 2


def first_ranks(megatron: MegatronConfig, world_size: int) -> list[int]:
    """The first rank of each pipeline stage."""
    each = world_size // megatron.pipeline_parallel
    return [stage * each for stage in range(megatron.pipeline_parallel)]


def image_tokens(recipe: Recipe, pixels: int) -> int:
    """Of the largest image: `data.max_pixels`, of which `pixels` make a token, or a whole prompt of the longest length."""
    longest = recipe.data.max_prompt_length
    return longest if recipe.data.max_pixels is None else min(longest, max(1, recipe.data.max_pixels // pixels))


def image_grid(tokens: int, merge: int) -> tuple[int, int]:
    """Rows and columns of patches, `merge` x `merge` a token, of an image of at most `tokens` tokens, about square."""
    rows = math.isqrt(tokens)
    return rows * merge, tokens // rows * merge
