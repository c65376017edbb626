"""The longest sample of a recipe, and the number of samples of a group. Pure."""

from __future__ import annotations

from megarl.recipe.schema import Recipe


def longest_sample(recipe: Recipe) -> int:
    """Return the tokens of the longest prompt with the longest response."""
    return recipe.data.max_prompt_length + recipe.rollout.max_response_length


def longest_scored_sample(recipe: Recipe) -> int:
    """Return the tokens that a teacher's context must have: an engine samples at least one token after the sample that it scores."""
    return longest_sample(recipe) + 1


def samples_per_group(recipe: Recipe) -> int:
    """Return the number of samples that a step trains on for each prompt or row."""
    return {"rollout": recipe.rollout.samples_per_prompt, "preferences": 2, "sft": 1}[recipe.train.source]
