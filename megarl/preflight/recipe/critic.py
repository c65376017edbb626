"""Checks of the section `critic`."""

from __future__ import annotations

from megarl.errors import RecipeError
from megarl.preflight.recipe.general import check_mini_batches, check_optimizer, check_parallel_sizes
from megarl.recipe.schema import Recipe
from megarl.recipe.training import CriticConfig, MegatronConfig


def check_critic(recipe: Recipe) -> None:
    """Raise RecipeError for a critic that cannot be had as asked, and for one that nothing asks for."""
    from megarl.algorithms.advantages import uses_critic

    if not uses_critic(recipe.algorithm):
        _check_unused(recipe)
        return
    critic = recipe.critic
    if recipe.train.source != "rollout":
        raise RecipeError(
            "algorithm.advantage",
            f"with train.source={recipe.train.source} there are no rewards to learn values from",
            "set algorithm.advantage=none",
            value="gae",
        )
    if recipe.cluster.transport == "torchrun":
        raise RecipeError("cluster.transport", ONE_LAYOUT, "set cluster.transport=ray", value="torchrun")
    if critic.warmup_steps >= recipe.train.steps:
        raise RecipeError(
            "critic.warmup_steps",
            f"the run has {recipe.train.steps} steps (train.steps), so the policy would never learn",
            "warm up for fewer steps, or train for more",
            value=critic.warmup_steps,
        )
    check_optimizer("critic", critic.optimizer)
    check_mini_batches("critic", critic.mini_batches, recipe)
    check_parallel_sizes("critic.trainers", critic.trainers, "critic.megatron", critic.megatron)
    _check_megatron(recipe)


ONE_LAYOUT = (
    "under torchrun every process is one of the actor's, in the one layout that Megatron has there; the critic needs "
    "processes of its own, which Ray starts"
)


def _check_unused(recipe: Recipe) -> None:
    algorithm = recipe.algorithm
    if recipe.critic != CriticConfig():
        raise RecipeError(
            "critic",
            f"algorithm.advantage is '{algorithm.advantage}', which uses no critic: this section would change nothing",
            "set algorithm.advantage=gae, or leave the section out",
        )


def _check_megatron(recipe: Recipe) -> None:
    megatron, default = recipe.critic.megatron, MegatronConfig()
    for name in ("keep_logits", "routing_replay"):
        value = getattr(megatron, name)
        if value != getattr(default, name):
            raise RecipeError(f"critic.megatron.{name}", "a critic computes no log-probs", "leave it out", value=value)
    if megatron.offload and recipe.cluster.placement == "disaggregated":
        raise RecipeError(
            "critic.megatron.offload",
            "the critic has its devices to itself, so nothing would ever be offloaded",
            "set critic.megatron.offload=false, or cluster.placement=colocated",
            value=True,
        )
