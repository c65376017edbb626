"""Checks of `rollout`: sampling, and groups of engines."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.schema import Recipe, RolloutConfig

Errors = Iterator[RecipeError]


def sampling_errors(rollout: RolloutConfig) -> Errors:
    if rollout.top_k == 0:
        yield RecipeError("rollout.top_k", "0 would keep no token", "use -1 for the whole distribution", value=0)
    if (rollout.top_p < 1 or rollout.top_k > 0) and rollout.temperature != 1:
        yield RecipeError(
            "rollout.temperature",
            "with top_p or top_k the engine returns unfiltered log-probs only at temperature 1; filtered ones would add "
            "their renormalization to the importance ratio",
            "set rollout.temperature=1, or rollout.top_p=1 and rollout.top_k=-1",
            value=rollout.temperature,
        )


def engine_group_errors(rollout: RolloutConfig) -> Errors:
    if rollout.engines % rollout.data_parallel:
        yield RecipeError(
            "rollout.data_parallel",
            f"rollout.engines = {rollout.engines} do not divide into groups of {rollout.data_parallel}",
            "choose a divisor of rollout.engines, or change rollout.engines",
            value=rollout.data_parallel,
        )
    if rollout.data_parallel > 1 and not rollout.spreads_experts:
        yield RecipeError(
            "rollout.expert_parallel",
            f"groups of engines (rollout.data_parallel = {rollout.data_parallel}) exist only to spread experts",
            "leave it out, or set rollout.data_parallel=1",
            value=False,
        )


def quantization_errors(recipe: Recipe) -> Errors:
    rollout, key = recipe.rollout, "rollout.quantization"
    if rollout.quantization is None:
        return
    if rollout.engine != "vllm":
        problem = f"megarl quantizes the weights of vLLM alone, and rollout.engine is {rollout.engine}"
        yield RecipeError(key, problem, "set rollout.engine=vllm, or leave it out", value=rollout.quantization)
    if (rollout.dtype or recipe.model.dtype) == "float32":
        problem = "vLLM's FP8 layers compute in bfloat16 or float16, and the engines' data type is float32"
        yield RecipeError(key, problem, "set rollout.dtype=bfloat16, or leave it out", value=rollout.quantization)
