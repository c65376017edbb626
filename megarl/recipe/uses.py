"""Predicates over a recipe: which optional parts its samples and rewards use."""

from __future__ import annotations

from megarl.recipe.agent import AgentConfig
from megarl.recipe.judge import JUDGE
from megarl.recipe.schema import RewardConfig


def uses_tools(agent: AgentConfig) -> bool:
    """Return whether an agent loop with tools makes the samples."""
    return bool(agent.tools or agent.mcp)


def uses_judge(reward: RewardConfig) -> bool:
    """Return whether the judge is a term of the reward."""
    return reward.function == JUDGE or JUDGE in reward.functions


def uses_remote(reward: RewardConfig) -> bool:
    """Return whether the scorer `remote` is a term of the reward."""
    return reward.function == "remote" or "remote" in reward.functions
