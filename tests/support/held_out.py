"""The cases of tests/trainer/test_held_out.py, shared with its worker processes."""

from __future__ import annotations

from typing import Any

from megarl.data import SFTDataset, load_tokenizer
from megarl.data.preferences import PreferenceDataset
from megarl.recipe.schema import Recipe

STEPS = 2  # of training, where a case has "steps"
ROWS = 7  # an odd number, in pieces of 3 and 4 for two data-parallel ranks
SFT: list[dict[str, Any]] = [
    {"name": "sft", "source": "sft", "processes": 1},
    {"name": "sft-DP2-EP2", "source": "sft", "reference": "sft", "steps": True, "megatron": {"expert_parallel": 2}},
    {"name": "sft-DP2-one-row", "source": "sft", "limit": 1},
    {"name": "sft-TP2", "source": "sft", "reference": "sft", "megatron": {"tensor_parallel": 2}},
    {"name": "sft-CP2-LoRA", "source": "sft", "reference": "sft", "megatron": {"context_parallel": 2}, "lora": 4},
]
DPO: list[dict[str, Any]] = [
    {"name": "dpo-DP2", "source": "preferences", "steps": True},
    {"name": "dpo-LoRA", "source": "preferences", "steps": True, "lora": 4, "slow": True},
    {"name": "dpo-PP2", "source": "preferences", "megatron": {"pipeline_parallel": 2}, "slow": True},
    {"name": "dpo-padded", "source": "preferences", "megatron": {"packing": False}, "slow": True},
]


def recipe_of(case: dict[str, Any]) -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = case["model"], "float32"
    recipe.cluster.device, recipe.data.chat_template = "cpu", False
    recipe.train.source, recipe.algorithm.advantage = case["source"], "none"
    recipe.algorithm.loss = {"sft": "sft", "preferences": "dpo"}[case["source"]]
    recipe.algorithm.aggregation = "seq_mean_token_mean"  # does not change SFT's eval/loss, a mean over tokens
    recipe.data.prompts_per_step, recipe.actor.max_tokens_per_micro_batch = 4, 80
    recipe.actor.optimizer.lr = 1e-2
    recipe.evaluation.limit, recipe.lora.rank = case.get("limit"), case.get("lora", 0)
    for key, value in case.get("megatron", {}).items():
        setattr(recipe.megatron, key, value)
    return recipe


def rows(case: dict[str, Any]) -> SFTDataset | PreferenceDataset:
    kind = SFTDataset if case["source"] == "sft" else PreferenceDataset
    recipe = recipe_of(case)
    return kind([case["rows"]], load_tokenizer(recipe.model.path), recipe.data, limit=128)
