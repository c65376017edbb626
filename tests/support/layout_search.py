"""A small search for layouts, and a fit checker that counts nothing."""

from __future__ import annotations

import time
from typing import Any

from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import Choice, EngineLayout, apply_choice
from megarl.platform.device_table import devices
from megarl.recipe.schema import Recipe

H100 = devices()["H100"]
NO_CLIENT: Any = None  # never called
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 96,
}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def recipe(trainers: int, **megatron: Any) -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.cluster.trainers, recipe.rollout.engines = "models/x", trainers, trainers
    for name, value in megatron.items():
        setattr(recipe.megatron, name, value)
    return recipe


def subject(trainers: int = 4, model: dict[str, Any] = SPARSE, **megatron: Any) -> Subject:
    run_recipe = recipe(trainers, **megatron)
    run_recipe.data.max_prompt_length, run_recipe.rollout.max_response_length = 32, 32
    run_recipe.actor.max_tokens_per_micro_batch = 64
    return Subject(run_recipe, {**model, "head_dim": 8, "max_position_embeddings": 512}, None, H100)


class FakeFitChecker:
    """A replacement of `FitChecker`: layouts without recomputation are too large, one shape is refused, and one is
    forecast to be too large."""

    def __init__(
        self, *_: Any, refuses: tuple[int, ...] = (), doubts: tuple[int, ...] = (), waits: float = 0.0
    ) -> None:
        self.refuses, self.doubts, self.waits, self.counted = refuses, doubts, waits, []  # type: ignore[var-annotated]
        self.engines = EngineLayout(4, 1, 1, None)
        self.not_counted = "rollout: nothing is known"

    def too_large(self, choice: Choice) -> bool:
        return choice.layout.pipeline_parallel == 4

    def is_forecast(self, choice: Choice) -> bool:
        return choice.recompute == "none"  # only layouts without recomputation

    def excess(self, choice: Choice, near: float = 1.01) -> float:
        return float(choice.layout.shape == self.doubts)

    def refused(self, choice: Choice) -> str | None:
        return "not this one" if choice.layout.shape == self.refuses else None

    def peak(self, choice: Choice) -> int:
        time.sleep(self.waits)
        self.counted.append(choice)
        return 2**30 if choice.recompute == "full" else 2**40

    def with_chosen_engines(self, recipe: Recipe, choice: Choice) -> Recipe:
        return apply_choice(recipe, choice)
