"""Checks of the section `judge`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.errors import RecipeError
from megarl.preflight.recipe.shared import unused_section_errors
from megarl.recipe.schema import Recipe


def judge_errors(recipe: Recipe) -> Iterator[RecipeError]:
    judge = recipe.judge
    if not recipe.reward.uses_judge:
        remedy = "name judge in reward.function or reward.functions"
        yield from unused_section_errors("judge", judge, "the reward does not use the judge", remedy)
        return
    if recipe.train.source != "rollout":
        problem = f"a judge scores samples of the policy, and train.source is '{recipe.train.source}'"
        yield RecipeError("reward", problem, "set train.source=rollout, or leave judge out of the reward")
        return
    if not judge.path:
        problem = "the reward uses the judge, but its model is unset"
        yield RecipeError("judge.path", problem, "give the judge's Hugging Face directory", value=judge.path)
    if not judge.prompt:
        problem = "the reward uses the judge, but its question is unset"
        yield RecipeError(
            "judge.prompt", problem, "write a question (recipes/base/judge.yaml has one)", value=judge.prompt
        )
    yield from _pattern_errors(judge.pattern)
    if judge.temperature == 0 and judge.attempts > 1:
        problem = "with judge.temperature = 0 every attempt returns the same verdict"
        yield RecipeError("judge.attempts", problem, "set it to 1, or judge.temperature above 0", value=judge.attempts)
    if ADVANTAGES[recipe.algorithm.advantage].needs_greedy:
        problem = "its baseline is the reward of a greedy sample, and the judge cannot read the text of greedy samples"
        remedy = "choose another advantage (rloo, grpo), or leave judge out of the reward"
        yield RecipeError("algorithm.advantage", problem, remedy, value=recipe.algorithm.advantage)


def _pattern_errors(pattern: str) -> Iterator[RecipeError]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        problem = f"it is not a regular expression: {error}"
        yield RecipeError("judge.pattern", problem, "correct it", value=pattern)
        return
    if not groups:
        problem = "it has no group to match the number"
        yield RecipeError(
            "judge.pattern", problem, r"put the number into brackets, as in 'Score: *(\d+)'", value=pattern
        )
