"""`critic_view`: the recipe with the critic's model, layout and optimizer in place of the actor's.

Planning, training, checkpoints and export of both then share their code.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import LoraConfig


def critic_view(recipe: Recipe) -> Recipe:
    """Return `recipe` with the critic's model, layout, micro batches and optimizer in place of the actor's.

    A critic of the policy's model type also has the policy's `model.table`. The code that plans micro batches, lays out processes and
    trains then serves both. The value loss is always a mean over the tokens of a mini batch, so the policy's aggregation and
    `actor.mini_batch_order` do not apply: mini batches of similarly long samples would change the weights of tokens.
    """
    critic = recipe.critic
    return replace(
        recipe,
        model=replace(recipe.model, path=critic.model_path) if critic.model_path else recipe.model,
        megatron=critic.megatron,
        actor=replace(
            recipe.actor,
            mini_batches=critic.mini_batches,
            mini_batch_order="as_sampled",
            epochs=critic.epochs,
            max_tokens_per_micro_batch=critic.max_tokens_per_micro_batch,
            optimizer=critic.optimizer,
        ),
        algorithm=replace(recipe.algorithm, aggregation="token_mean"),
        cluster=replace(recipe.cluster, trainers=critic.trainers),
        lora=LoraConfig(),  # only the policy has adapters; all of the critic's weights are trained
    )
