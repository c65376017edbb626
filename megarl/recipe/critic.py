"""The critic's section: the recipe as the critic's processes read it, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from megarl.recipe.schema import Recipe
from megarl.recipe.training import LoraConfig


def critic_view(recipe: Recipe) -> Recipe:
    """`recipe` with the critic's model, layout, micro batches and optimizer where the actor's stand.

    So what plans micro batches, lays processes out and trains is one for both. The value loss is a mean over
    tokens, whatever the policy's aggregation is.
    """
    critic = recipe.critic
    return replace(
        recipe,
        model=replace(recipe.model, path=critic.model_path or recipe.model.path),
        megatron=critic.megatron,
        actor=replace(
            recipe.actor,
            mini_batches=critic.mini_batches,
            max_tokens_per_micro_batch=critic.max_tokens_per_micro_batch,
            optimizer=critic.optimizer,
        ),
        algorithm=replace(recipe.algorithm, aggregation="token_mean"),
        cluster=replace(recipe.cluster, trainers=critic.trainers),
        lora=LoraConfig(),  # adapters are the policy's: all of the critic learns
    )
