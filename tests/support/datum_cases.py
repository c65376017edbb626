"""The cases and data of tests/trainer/test_datums.py, shared with its worker processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.batching.datums import AdamParams, Datum
from megarl.recipe.schema import Recipe

ADAM = AdamParams(learning_rate=2e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
AGAIN = AdamParams(learning_rate=1e-3, eps=1e-6)
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
PASSES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", CLIPS),
    ("cispo", CLIPS),
    ("dro", {"beta": 0.05}),
    ("gspo", CLIPS),
]
"""Passes before the first update; their gradients accumulate."""
CASES: list[dict[str, Any]] = [
    {"name": "one", "processes": 1},
    {"name": "DP2-EP2", "megatron": {"expert_parallel": 2}},
    {"name": "DP2-plain-optimizer", "megatron": {"distributed_optimizer": False}},
    {"name": "TP2", "megatron": {"tensor_parallel": 2}},
    {"name": "PP2", "megatron": {"pipeline_parallel": 2}},
    {"name": "CP2-padded", "megatron": {"context_parallel": 2, "packing": False}, "slow": True},
    {"name": "LoRA", "processes": 1, "lora": 4, "slow": True},
]


def recipe_of(case: dict[str, Any]) -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = case["model"], "float32"
    recipe.cluster.device = "cpu"
    recipe.train.source, recipe.algorithm.advantage, recipe.algorithm.loss = "sft", "none", "sft"
    recipe.actor.max_tokens_per_micro_batch, recipe.lora.rank = 40, case.get("lora", 0)
    recipe.megatron.moe_aux_loss_coef = 0.0
    for key, value in case.get("megatron", {}).items():
        setattr(recipe.megatron, key, value)
    return recipe


def data_of(loss: str, seed: int) -> list[Datum]:
    """Return data of several lengths, one of a single token. Some targets are not the tokens that follow."""
    rng = np.random.default_rng(seed)
    return [_datum(loss, length, rng) for length in (9, 17, 1, 26)]


def _datum(loss: str, length: int, rng: np.random.Generator) -> Datum:
    whole = rng.integers(3, 250, length + 1)
    targets = whole[1:].copy()
    targets[: length // 3] = 0  # as loops write the targets of a prompt
    answer = (np.arange(length) >= length // 3).astype(np.float32)
    if loss == "cross_entropy":
        return Datum(whole[:-1], targets, {"weights": answer * rng.uniform(0.5, 2.0, length).astype(np.float32)})
    vectors = {
        "advantages": answer * rng.normal(size=length).astype(np.float32),
        "logprobs": answer * rng.uniform(-8.0, -4.0, length).astype(np.float32),
    }
    if loss == "gspo":
        vectors["sequence_ratio_mask"] = answer
    return Datum(whole[:-1], targets, vectors)
