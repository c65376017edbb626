"""Cases of tests/commands/plan/test_activations.py and its worker: published models, scaled down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.hf import published
from megarl.recipe.schema import Recipe

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {**SMALL, "num_key_value_heads": 2, "head_dim": 64},
    "Qwen2.5-7B-Instruct": {**SMALL, "num_key_value_heads": 2},
    "Qwen3-30B-A3B": {**SMALL, **EXPERTS, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16},
    "DeepSeek-V3": {  # equal head widths of values and keys, which the CPU's fused attention needs
        **SMALL,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "Qwen2.5-VL-7B-Instruct": {
        **SMALL,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {
            **published.read("Qwen2.5-VL-7B-Instruct")["vision_config"],
            "depth": 4,
            "hidden_size": 256,
            "num_heads": 4,
            "intermediate_size": 512,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [1, 3],
        },
    },
}


def config_of(model: str) -> dict[str, Any]:
    return {**published.read(model), **MODELS[model]}


def recipe_of(case: dict[str, Any]) -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = str(Path(case["directory"]) / case["model"]), "float32"
    recipe.cluster.trainers = case["processes"]
    if "Qwen3-30B" in case["model"] or "DeepSeek" in case["model"]:
        recipe.megatron.routing_replay = "rollout"  # also in a real run, so that the experts are balanced in both
    recipe.data.max_prompt_length = 256  # an image of up to 256 tokens starts each sequence
    for name, value in case["megatron"].items():
        setattr(recipe.megatron, name, value)
    return recipe


def case(
    model: str, processes: int = 1, *, micro_batches: int = 2, rank: int = 0, slow: bool = False, **megatron: Any
) -> dict[str, Any]:
    name = "-".join([model, *(f"{key}={value}" for key, value in megatron.items()), f"rank={rank}"])
    return {
        "name": name,
        "model": model,
        "processes": processes,
        "rank": rank,
        "slow": slow,
        "megatron": megatron,
        "work": {"lengths": [512, 512], "micro_batches": micro_batches, "backwards": None},
    }


CASES = [
    *[case(model, recompute=how) for model in MODELS for how in ("none", "selective", "full")],
    case("Qwen2.5-VL-7B-Instruct", 2, tensor_parallel=2),
    case("Qwen2.5-VL-7B-Instruct", 2, context_parallel=2),
    *[case("Qwen2.5-VL-7B-Instruct", 2, rank=rank, micro_batches=4, pipeline_parallel=2) for rank in (0, 1)],
    case("Qwen3-8B", keep_logits=True),
    case("Qwen3-8B", packing=False),
    case("Qwen3-8B", 2, tensor_parallel=2),
    case("Qwen3-8B", 2, tensor_parallel=2, sequence_parallel=False),
    case("Qwen3-8B", 2, context_parallel=2),
    case("Qwen3-30B-A3B", 2, tensor_parallel=2),
    case("Qwen3-30B-A3B", 2, expert_parallel=2),
    case("Qwen3-30B-A3B", 4, tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=2, recompute="full"),
    case("DeepSeek-V3", 4, expert_parallel=4, recompute="selective"),
    *[case("Qwen3-8B", 2, rank=rank, micro_batches=4, pipeline_parallel=2) for rank in (0, 1)],
    *[case("Qwen3-8B", 2, rank=rank, micro_batches=4, pipeline_parallel=2, virtual_pipeline=2) for rank in (0, 1)],
    *[case("Qwen3-30B-A3B", 2, rank=rank, micro_batches=4, pipeline_parallel=2, recompute="full") for rank in (0, 1)],
    case("DeepSeek-V3", 8, rank=4, micro_batches=4, pipeline_parallel=2, tensor_parallel=2, expert_parallel=2),
]
