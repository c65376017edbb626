"""The token limit of a micro batch, and the samples that stay together in one. Pure functions of a recipe."""

from __future__ import annotations

from megarl.algorithms.catalogue import LOSSES
from megarl.recipe.derived.lengths import longest_sample, samples_per_group
from megarl.recipe.schema import Recipe


def token_limit(recipe: Recipe) -> int:
    """Return the token limit of a micro batch: per rank, times the context-parallel ranks that share its sequences."""
    return recipe.actor.max_tokens_per_micro_batch * recipe.megatron.context_parallel


def samples_together(recipe: Recipe) -> int:
    """Return the number of samples that stay in one micro batch: a group if the loss compares its samples, else 1."""
    return samples_per_group(recipe) if LOSSES[recipe.algorithm.loss].whole_groups else 1


def largest_micro_batch(recipe: Recipe) -> int:
    """Return the most tokens of a micro batch: the limit, or samples of the longest length that stay together."""
    return max(token_limit(recipe), samples_together(recipe) * longest_sample(recipe))


def group_size_notice(recipe: Recipe) -> str | None:
    """Return a notice if samples that stay together may exceed the token limit; None if they fit."""
    count, longest, limit = samples_together(recipe), longest_sample(recipe), token_limit(recipe)
    if count == 1 or count * longest <= limit:
        return None
    return (
        f"algorithm.loss={recipe.algorithm.loss} compares the samples of a group, so a micro batch has a whole group: up to "
        f"{count} x {longest:,} = {count * longest:,} tokens, and {limit:,} are its limit (actor.max_tokens_per_micro_batch x "
        f"megatron.context_parallel). Its activations and logits take up to {count * longest / limit:.1f} times the memory of "
        "a full micro batch; `megarl plan` counts that"
    )
