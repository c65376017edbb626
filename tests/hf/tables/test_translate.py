"""Tables from Megatron-Bridge's mappings: rows, settings, and a reason for everything that is neither."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from megarl.hf.families import FAMILIES
from megarl.hf.families.sizes import parameters, tensors
from megarl.hf.families.tables.contents import check_table
from megarl.hf.families.tables.family_table import family_of_table
from megarl.hf.families.tables.megatron_bridge import translate
from tests.support.megatron_bridge_dump import CONFIG, dense_dump, mapping


def test_a_dense_model_has_the_rows_and_settings_of_qwen3() -> None:
    translation = translate(dense_dump(), CONFIG)
    assert translation.reasons == []
    table = asdict(translation.table)
    check_table(table)
    family, own = family_of_table(table), FAMILIES["qwen3"]
    assert family.settings(CONFIG) == own.settings(CONFIG) == {"qk_layernorm": True}
    assert [*parameters(family, CONFIG)] == [*parameters(own, CONFIG)]
    assert [*tensors(family, CONFIG)] == [*tensors(own, CONFIG)]
    assert table["unread"] == ["logit_scale"] and table["config"]["logit_scale"] == 2.0
    assert table["source"] == "Megatron-Bridge 9.9 (NewestBridge)"


def test_experts_have_two_numbers() -> None:
    """Rows of Megatron's other experts and of layers for multi-token prediction are left out."""
    dump = dense_dump()
    experts = "decoder.layers.*.mlp.experts."
    of = {part: f"model.layers.*.mlp.experts.*.{part}_proj.weight" for part in ("gate", "up")}
    dump["mappings"] = [
        mapping("GatedMLPMapping", f"{experts}linear_fc1.weight*", of),
        mapping("GatedMLPMapping", f"{experts}local_experts.*.linear_fc1.weight", of),
        mapping("AutoMapping", "mtp.layers.0.eh_proj.weight", "model.layers.2.eh_proj.weight"),
    ]
    rows = translate(dump, CONFIG).table.rows
    assert rows == [
        [
            "gate_up",
            "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
            [f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")],
        ]
    ]


PROJ = "decoder.layers.*.self_attention.linear_proj.weight"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (mapping("MambaInProjMapping", PROJ, "x.*"), "MambaInProjMapping cannot be expressed as slices"),
        (mapping("AutoMapping", PROJ, "x.layers.*.y", module="other"), "AutoMapping cannot be expressed as slices"),
        (mapping("AutoMapping", PROJ, "x.layers.*.y", options={"permute_dims": [1, 0]}), "reorders the tensor"),
        (mapping("AutoMapping", PROJ, "x.*.y"), "its wildcards are not the numbers of a layer and an expert"),
        (mapping("AutoMapping", PROJ, "x.weight"), "its wildcards are not the numbers of a layer and an expert"),
        (
            mapping("AutoMapping", "decoder.layers.*.mlp.linear_fc1.weight", "model.layers.*.mlp.fc1"),
            "stores projections as one tensor",
        ),
    ],
)
def test_a_mapping_that_is_no_row(changed: dict[str, Any], reason: str) -> None:
    dump = dense_dump()
    dump["mappings"] = [each for each in dump["mappings"] if each["parameter"] != changed["parameter"]] + [changed]
    translation = translate(dump, CONFIG)
    assert any(changed["parameter"] in text and reason in text for text in translation.reasons), translation.reasons
    # Without its row the parameter is named, too.
    missing = changed["parameter"].replace("*", "0")
    assert any(f"no row for Megatron's parameter {missing}" in text for text in translation.reasons)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("normalization", "LayerNorm", "normalization is 'LayerNorm'"),
        ("activation_func", "megatron.core.activations.squared_relu", "activation_func is 'megatron.core"),
        ("window_size", [4096, 0], "window_size is [4096, 0], which megarl's tables do not have"),
        ("rotary_percent", 0.5, "rotary_percent is 0.5, and megarl reads 1.0"),
        ("ffn_hidden_size", 97, "ffn_hidden_size is 97, and megarl reads 96"),
        ("vocab_size", 257, "vocab_size is 257, and megarl reads 256"),
        ("moe_router_num_groups", 8, "moe_router_num_groups is 8"),
        ("transformer_layer_spec", "other.layers", "uses a custom layer spec (other.layers)"),
        ("new_field", 1, "new_field is 1, which megarl's tables do not have"),
    ],
)
def test_a_field_of_the_provider_that_megarl_does_not_build(field: str, value: Any, reason: str) -> None:
    dump = dense_dump()
    dump["provider"]["fields"][field] = value
    reasons = translate(dump, CONFIG).reasons
    assert any(reason in text for text in reasons), reasons


def test_a_table_that_is_not_valid() -> None:
    dump = dense_dump()
    dump["mappings"].append(dump["mappings"][0])
    assert any("has two rows" in text for text in translate(dump, CONFIG).reasons)
    dump = dense_dump()
    dump["provider"]["fields"]["moe_router_score_function"] = "newest"
    assert any("is 'newest', and must be sigmoid or softmax" in text for text in translate(dump, CONFIG).reasons)


def test_code_that_changes_tensors_or_builds_the_model() -> None:
    dump = dense_dump()
    dump["hooks"] = ["maybe_modify_loaded_hf_weight"]
    dump["provider"]["provide"] = "other.NewestProvider"
    first, second = translate(dump, CONFIG).reasons
    assert first == "NewestBridge.maybe_modify_loaded_hf_weight changes tensors in code"
    assert "builds the model in code (other.NewestProvider.provide)" in second


def test_which_layers_are_mixtures() -> None:
    """`moe_layer_freq` may be a list or an interval; a pattern that no name describes is a reason."""
    dump, config = dense_dump(), {**CONFIG, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    dump["provider"]["fields"] |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}

    def layers_of(pattern: Any, **more: Any) -> tuple[str, bool]:
        dump["provider"]["fields"]["moe_layer_freq"] = pattern
        translation = translate(dump, {**config, **more})
        return translation.table.layers, any("moe_layer_freq" in text for text in translation.reasons)

    assert layers_of(1) == layers_of([1, 1]) == ("always", False)
    assert layers_of([0, 1], first_k_dense_replace=1) == ("after_the_first", False)
    assert layers_of(1, first_k_dense_replace=0) == ("after_the_first", False)  # another size may have dense layers
    assert layers_of([1, 0])[1] and layers_of(2)[1]


def test_an_absent_rank_of_queries() -> None:
    """Megatron-Bridge 0.3.1 leaves Megatron's default of 512 where config.json has null; any other difference is a reason."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    dump = dense_dump()
    sizes = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
    dump["provider"]["fields"] |= {"multi_latent_attention": True, "q_lora_rank": 512, **sizes}
    dump["provider"]["defaults"]["q_lora_rank"] = 512
    assert not any("q_lora_rank" in text for text in translate(dump, {**CONFIG, **latent}).reasons)
    dump["provider"]["fields"]["q_lora_rank"] = 256
    assert any("q_lora_rank is 256" in text for text in translate(dump, {**CONFIG, **latent}).reasons)
