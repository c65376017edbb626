"""Adapter-only weight sync: recipe checks, vLLM's limits, and each rank's shard of an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.engines import arguments_of
from megarl.engines.base import AdapterSpec, EngineSpec
from megarl.engines.specs import policy_spec
from megarl.engines.vllm.adapters import _shard
from megarl.engines.vllm.args import build_engine_args
from megarl.errors import RecipeError
from megarl.hf.linears import adapter_sizes, linears_of
from megarl.preflight.engines_and_devices import check_device
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

DENSE = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
DENSE |= {"num_key_value_heads": 2, "intermediate_size": 96}


def engine(directory: Path, config: dict[str, Any], **changes: Any) -> EngineSpec:
    (directory / "config.json").write_text(json.dumps(config))
    adapters = changes.pop("adapters", AdapterSpec(rank=12, targets=("all-linear",)))
    return EngineSpec("e0", str(directory), "float32", 64, **changes, adapters=adapters)


@pytest.mark.parametrize(
    ("config", "changes", "device", "words"),
    [
        ({}, {}, "cpu", None),
        ({}, {}, "cuda", None),
        ({}, {}, "npu", "vllm-ascend"),
        ({"num_experts": 8}, {}, "cuda", "vLLM uses other expert kernels"),
        ({"quantization_config": {}}, {}, "cuda", "quantized"),
        ({}, {"engine_args": {"quantization": "fp8"}}, "cuda", "quantized"),
        ({}, {"quantization": "fp8"}, "cuda", "quantized"),
        ({}, {"data_parallel": 2}, "cuda", "engines in a group"),
        ({}, {"adapters": AdapterSpec(rank=513, targets=("q_proj",))}, "cuda", "up to rank 512, and lora.rank is 513"),
    ],
)
def test_vllm_holds_adapters_of_supported_models(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], device: str, words: str | None
) -> None:
    reason = arguments_of("vllm").merged_because(engine(tmp_path, DENSE | config, **changes), device)
    assert reason is None if words is None else words in str(reason)


def test_sglang_holds_no_adapters(tmp_path: Path) -> None:
    assert "SGLang" in str(arguments_of("sglang").merged_because(engine(tmp_path, DENSE), "cuda"))


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (("all-linear",), ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),
        (("self_attn.v_proj", "up_proj"), ["gate_up_proj", "qkv_proj"]),
    ],
)
def test_vllm_allocates_one_adapter_only_on_its_linears(
    tmp_path: Path, targets: tuple[str, ...], modules: list[str]
) -> None:
    arguments = build_engine_args(engine(tmp_path, DENSE, adapters=AdapterSpec(12, targets)), "cuda")
    expected = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": modules}
    assert arguments.items() >= expected.items()
    plain = build_engine_args(engine(tmp_path, DENSE, adapters=None), "cuda")
    assert not expected.keys() & plain.keys()


def test_vllms_lora_arguments_are_refused_in_recipes() -> None:
    with pytest.raises(ValueError, match=r"rollout.engine_args.max_lora_rank cannot be set: set lora and weight_sync"):
        arguments_of("vllm").check_engine_args({"max_lora_rank": 64}, "rollout")


def test_adapters_of_an_engine_follow_the_recipe() -> None:
    recipe = Recipe()
    assert policy_spec(recipe, "e0", updated=True).adapters is None
    recipe.lora.rank, recipe.lora.targets = 8, ["o_proj"]
    assert policy_spec(recipe, "e0", updated=True).adapters == AdapterSpec(8, ("o_proj",))
    assert policy_spec(recipe, "e0", updated=False).adapters is None, "no update brings any"
    recipe.weight_sync.adapters = "merged"
    assert policy_spec(recipe, "e0", updated=True).adapters is None


@pytest.mark.parametrize("choice", ["only", "merged"])
def test_a_choice_without_adapters_is_refused(choice: str) -> None:
    with pytest.raises(RecipeError, match="no adapters are trained"):
        load_recipe("recipes/quickstart.yaml", [f"weight_sync.adapters={choice}"])


def test_unsupported_adapter_updates_are_refused_before_the_start(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.lora.rank, recipe.weight_sync.adapters, recipe.model.path = 8, "only", str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    check_device(recipe, "cpu")
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"num_experts": 8}))
    with pytest.raises(RecipeError, match=r"(?s)weight_sync\.adapters.*vLLM uses other expert kernels"):
        check_device(recipe, "cpu")


def test_sizes_of_adapters() -> None:
    sizes = adapter_sizes(DENSE, 2, ["k_proj", "down_proj"])
    assert sizes == {
        f"model.layers.{layer}.{name}": 2 * (64 + width)
        for layer in range(2)
        for name, width in (("self_attn.k_proj", 64), ("mlp.down_proj", 96))
    }
    assert len(adapter_sizes(DENSE, 2, ["all-linear"])) == 2 * len(linears_of(DENSE))


def test_each_rank_holds_its_shard_of_an_adapter() -> None:
    """Four ranks shard 8 rows; two key/value heads go to two ranks each; an unsharded tensor goes to all."""
    rows = torch.arange(8)[:, None]
    assert [_shard(rows, 0, 2, rank, 4)[:, 0].tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [_shard(rows, 0, 4, rank, 4)[0, 0].item() for rank in range(4)] == [0, 0, 4, 4]
    assert all(_shard(rows, 0, 8, rank, 4).equal(rows) for rank in range(4))
    assert _shard(rows.T, 1, 2, 3, 4).tolist() == [[6, 7]]
