"""The recipe of a training API: its callers give losses, data and settings of each update, so these sections do not count."""

from __future__ import annotations

from copy import deepcopy

from megarl.errors import RecipeError
from megarl.recipe.agent import AgentConfig
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.judge import JudgeConfig, TeacherConfig
from megarl.recipe.schema import EvaluationConfig, Recipe, RewardConfig


def served_recipe(recipe: Recipe) -> Recipe:
    """Return a copy with defaults in the sections that only a training run reads: algorithm, reward, agent, teacher, judge,
    evaluation. Raises RecipeError for settings that a training API cannot follow."""
    _check(recipe)
    served = deepcopy(recipe)
    served.algorithm, served.reward, served.agent = AlgorithmConfig(), RewardConfig(), AgentConfig()
    served.teacher, served.judge, served.evaluation = TeacherConfig(), JudgeConfig(), EvaluationConfig()
    served.rollout.seeded = True  # a caller may seed each request
    served.rollout.max_staleness, served.rollout.at_update = 0, "drain"
    served.rollout.temperature, served.rollout.top_p, served.rollout.top_k = 1.0, 1.0, -1  # a request sets its own
    return served


def _check(recipe: Recipe) -> None:
    megatron = recipe.megatron
    for name in ("moe_aux_loss_coef", "moe_z_loss_coef"):
        if value := getattr(megatron, name):
            problem = "`megarl serve` trains on the caller's loss alone"
            raise RecipeError(f"megatron.{name}", problem, "set it to 0", value=value)
    if megatron.routing_replay != "none":
        problem = "a caller's data has no recorded expert choices"
        raise RecipeError("megatron.routing_replay", problem, "set it to none", value=megatron.routing_replay)
    if recipe.rollout.min_engines is not None:
        problem = "`megarl serve` ends when an engine dies"
        raise RecipeError("rollout.min_engines", problem, "leave it out", value=recipe.rollout.min_engines)
    if recipe.cluster.elastic:
        problem = "`megarl serve` ends when a machine leaves, and its callers decide how it goes on"
        raise RecipeError("cluster.elastic", problem, "leave it out", value=True)
    if recipe.train.resume != "never":
        problem = "`megarl serve` starts from model.path, and resumes no run"
        remedy = (
            "set it to never. A client loads a saved state by its path; `megarl export` writes a run's checkpoint as a model for "
            "model.path"
        )
        raise RecipeError("train.resume", problem, remedy, value=recipe.train.resume)
    if recipe.train.source != "rollout":
        problem = f"the recipe has no engines (train.source={recipe.train.source}), so no caller could sample"
        raise RecipeError(
            "train.source", problem, "serve a recipe with train.source=rollout", value=recipe.train.source
        )
