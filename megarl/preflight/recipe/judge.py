"""Checks of the section `judge`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megarl.errors import RecipeError

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
from megarl.recipe.judge import JudgeConfig, uses_judge


def check_judge(recipe: Recipe) -> None:
    """Raise RecipeError for a judge that cannot be had as asked, and for one that nobody asks."""
    from megarl.algorithms.catalogue import ADVANTAGES

    judge = recipe.judge
    if not uses_judge(recipe):
        if judge != JudgeConfig():
            what = "no term of the reward is the judge's: this section would change nothing"
            raise RecipeError(
                "judge", what, "name judge in reward.function or reward.functions, or leave the section out"
            )
        return
    if recipe.train.source != "rollout":
        what = f"a judge reads what the policy samples, and train.source is '{recipe.train.source}'"
        raise RecipeError("reward", what, "set train.source=rollout, or leave judge out of the reward")
    if not judge.path:
        what = "the reward names a judge, and there is no model for it"
        raise RecipeError("judge.path", what, "give the judge's Hugging Face directory", value=judge.path)
    if not judge.prompt:
        what = "the judge is asked nothing"
        raise RecipeError(
            "judge.prompt", what, "write a question (recipes/base/judge.yaml has one)", value=judge.prompt
        )
    _check_pattern(judge.pattern)
    if judge.temperature == 0 and judge.attempts > 1:
        what = (
            "greedy verdicts of one sample are all the same (judge.temperature = 0), however often they are asked for"
        )
        raise RecipeError("judge.attempts", what, "set it to 1, or judge.temperature above 0", value=judge.attempts)
    if ADVANTAGES[recipe.algorithm.advantage].needs_greedy:
        what = "its baseline is the reward of a greedy sample, whose text is not kept: no judge can read it"
        remedy = "choose another advantage (rloo, grpo), or leave judge out of the reward"
        raise RecipeError("algorithm.advantage", what, remedy, value=recipe.algorithm.advantage)


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        what = f"it is no regular expression: {error}"
        raise RecipeError("judge.pattern", what, "mend it", value=pattern) from error
    if not groups:
        what = "it has no group, so that nothing in a match is the number"
        raise RecipeError("judge.pattern", what, r"put the number into brackets, as in 'Score: *(\d+)'", value=pattern)
