"""Qwen3-VL: settings of config.json and layouts that are refused. tests/megatron/test_vl.py compares the models with transformers."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.hf import published
from megarl.hf.families.check import check_model
from megarl.megatron.layout import check_layout
from megarl.recipe.trainers import MegatronConfig

DENSE, SPARSE = (published.read(f"Qwen3-VL-{size}-Instruct") for size in ("8B", "30B-A3B"))
YARN = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 262144}
SECTIONS = {"mrope_section": [24, 20, 20]}


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("text_config", {"rope_scaling": None}, "rotary scaling without mrope_interleaved: true"),
        ("text_config", {"rope_scaling": SECTIONS}, "rotary scaling without mrope_interleaved: true"),
        ("text_config", {"rope_scaling": YARN}, "rotary scaling 'yarn'"),
        ("text_config", {"attention_bias": True}, "attention_bias"),
        ("text_config", {"num_hidden_layers": 2}, "3 layers of DeepStack .* in 2 text layers"),
        ("vision_config", {"hidden_act": "gelu"}, "vision_config.hidden_act: gelu"),
        ("vision_config", {"out_hidden_size": 8}, "vision_config.out_hidden_size: 8, not hidden_size"),
        ("vision_config", {"rope_parameters": {"rope_theta": 100.0}}, "rope_theta: 100, where engines have 10000"),
        ("vision_config", {"deepstack_visual_indexes": [8, 4]}, "not layers in ascending order"),
        ("vision_config", {"deepstack_visual_indexes": [27]}, "not layers in ascending order"),
    ],
)
@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_unsupported_settings_are_refused(
    model: dict[str, Any], section: str, fields: dict[str, Any], words: str
) -> None:
    check_model(model)
    with pytest.raises(ValueError, match=words):
        check_model({**model, section: {**model[section], **fields}})


@pytest.mark.parametrize(("field", "value"), [("norm_topk_prob", False), ("num_experts_per_tok", 1)])
def test_unsupported_routing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}: {str(value).lower()}"):
        check_model({**SPARSE, "text_config": {**SPARSE["text_config"], field: value}})


def test_a_text_model_at_the_top_level_is_refused() -> None:
    with pytest.raises(ValueError, match="the text model outside text_config"):
        check_model({**DENSE, **DENSE["text_config"], "model_type": "qwen3_vl", "text_config": None})


@pytest.mark.parametrize("settings", [{"pipeline_parallel": 2, "first_stage_layers": 2}, {"pipeline_parallel": 18}])
def test_the_first_stage_has_the_layers_that_the_tower_feeds(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"has 2 layers, .* feeds the first 3 \(DeepStack\).*first_stage_layers"):
        check_layout(DENSE, MegatronConfig(**settings), settings["pipeline_parallel"])
    check_layout(DENSE, MegatronConfig(pipeline_parallel=12), 12)
