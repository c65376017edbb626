"""The policy's engines, as a recipe asks for them."""

from __future__ import annotations

from megarl.config.schema import Recipe
from megarl.engines.base import EngineSpec


def policy_spec(recipe: Recipe, name: str, *, load_weights: bool) -> EngineSpec:
    """`load_weights`: those of `model.path`, which no exchange replaces."""
    rollout = recipe.rollout
    return EngineSpec(
        name=name,
        model_path=recipe.model.path,
        dtype=rollout.dtype or recipe.model.dtype,
        max_model_len=longest_sample(recipe),
        tensor_parallel=rollout.tensor_parallel,
        seed=recipe.train.seed,
        engine_args=rollout.engine_args,
        load_weights=load_weights,
        sleep_mode=recipe.cluster.placement == "colocated" and not load_weights,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        return_routed_experts=recipe.megatron.routing_replay == "rollout" and not load_weights,
    )


def longest_sample(recipe: Recipe) -> int:
    return recipe.data.max_prompt_length + recipe.rollout.max_response_length
