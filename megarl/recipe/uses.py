"""Predicates over a recipe: which optional parts its samples and rewards use."""

from __future__ import annotations

from megarl.recipe.judge import JUDGE
from megarl.recipe.schema import Recipe, RewardConfig


def uses_tools(recipe: Recipe) -> bool:
    """Return whether an agent loop with tools makes the samples."""
    return bool(recipe.agent.tools or recipe.agent.mcp)


def uses_judge(recipe: Recipe) -> bool:
    """Return whether the judge is a term of the reward."""
    return recipe.reward.function == JUDGE or JUDGE in recipe.reward.functions


def uses_remote(reward: RewardConfig) -> bool:
    """Return whether the scorer `remote` is a term of the reward."""
    return reward.function == "remote" or "remote" in reward.functions
