"""Checks of the section `critic`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.algorithms.advantages import uses_critic
from megarl.errors import RecipeError
from megarl.preflight.recipe.shared import (
    mini_batch_errors,
    optimizer_errors,
    parallel_size_errors,
    unused_section_errors,
)
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig

ONE_LAYOUT = (
    "under torchrun every process is an actor trainer in a single Megatron layout; the critic needs additional processes, "
    "which only Ray can start"
)


def critic_errors(recipe: Recipe) -> Iterator[RecipeError]:
    algorithm, critic = recipe.algorithm, recipe.critic
    if not uses_critic(algorithm):
        cause = f"algorithm.advantage is '{algorithm.advantage}', which uses no critic"
        yield from unused_section_errors("critic", critic, cause, "set algorithm.advantage=gae")
        return
    if recipe.train.source != "rollout":
        problem = f"train.source={recipe.train.source} has no rewards to learn values from"
        yield RecipeError("algorithm.advantage", problem, "set algorithm.advantage=none", value="gae")
        return
    if recipe.cluster.transport == "torchrun":
        yield RecipeError("cluster.transport", ONE_LAYOUT, "set cluster.transport=ray", value="torchrun")
    if recipe.train.epochs is None and critic.warmup_steps >= recipe.train.steps:
        yield RecipeError(
            "critic.warmup_steps",
            f"the run has {recipe.train.steps} steps (train.steps), so the policy would never be updated",
            "warm up for fewer steps, or train for more",
            value=critic.warmup_steps,
        )
    yield from optimizer_errors("critic", critic.optimizer)
    yield from mini_batch_errors("critic", critic.mini_batches, recipe.data.prompts_per_step)
    yield from parallel_size_errors("critic.trainers", critic.trainers, "critic.megatron", critic.megatron)
    yield from _megatron_errors(recipe)


def _megatron_errors(recipe: Recipe) -> Iterator[RecipeError]:
    megatron, default = recipe.critic.megatron, MegatronConfig()
    for name in ("keep_logits", "fp32_head", "routing_replay"):
        value = getattr(megatron, name)
        if value != getattr(default, name):
            yield RecipeError(f"critic.megatron.{name}", "a critic computes no log-probs", "leave it out", value=value)
    if megatron.offload and recipe.cluster.placement == "disaggregated":
        yield RecipeError(
            "critic.megatron.offload",
            "the critic shares its devices with no engine, so nothing would be offloaded",
            "set critic.megatron.offload=false, or cluster.placement=colocated",
            value=True,
        )
