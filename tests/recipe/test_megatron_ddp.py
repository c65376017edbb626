"""`megatron.ddp`: names and values that Megatron declares, combinations that would fail in a trainer process, defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megarl.errors import RecipeError
from megarl.megatron.extra_settings import check_extra, check_extra_names
from megarl.platform import transformer_engine
from megarl.platform.device_kind import DeviceKind
from megarl.preflight.recipe.general import validate
from megarl.recipe.derived.megatron_ddp import _FSDP, DRIVEN, ddp_notice, ddp_settings, refusal_of_ddp
from megarl.recipe.schema import Recipe

DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 12, "vocab_size": 1000}
VISION = {**DENSE, "text_config": DENSE, "vision_config": {}}
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def recipe_of(ddp: dict[str, Any], device: str = "cpu", **megatron: Any) -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.cluster.device, recipe.megatron.ddp = "m", device, ddp  # type: ignore[assignment]
    recipe.algorithm.advantage = "grpo"
    for name, value in megatron.items():
        setattr(recipe.megatron, name, value)
    return recipe


def check(recipe: Recipe, model: dict[str, Any] | None = None) -> None:
    validate(recipe)
    check_extra(recipe, model or DENSE, "megatron")


@pytest.mark.parametrize(
    ("ddp", "megatron", "words"),
    [
        ({"overlap_grad_reduces": True}, {}, r"ddp\.overlap_grad_reduces"),
        ({"overlap_grad_reduce": 1}, {}, "expects true or false"),
        ({"average_in_collective": True}, {}, "would depend on the split"),
        ({"use_distributed_optimizer": True}, {}, r"megatron\.distributed_optimizer decides it"),
        ({"use_megatron_fsdp": True}, {}, "FSDP"),
        ({"overlap_param_gather": True}, {"distributed_optimizer": False}, "which is off"),
        ({"overlap_param_gather": True}, {}, "without overlap_grad_reduce"),
        ({**BOTH, "overlap_grad_reduce": False}, {}, "divides weights into buckets"),
        ({"align_param_gather": True}, {}, "without overlap_param_gather"),
        ({"bucket_size": 1000}, {}, "without overlap_grad_reduce"),
        ({**BOTH, "bucket_size": 0}, {}, "integer of at least 1"),
        ({**BOTH, "bucket_size": "40M"}, {}, "integer of at least 1"),
        ({**BOTH, "bucket_size": True}, {}, "integer of at least 1"),
        (
            {"pad_buckets_for_high_nccl_busbw": True},
            {"distributed_optimizer": False},
            "only for the distributed optimizer",
        ),
    ],
)
def test_invalid_ddp_settings_are_refused(ddp: dict[str, Any], megatron: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=rf"megatron\.ddp\.[\s\S]*{words}|{words}"):
        check(recipe_of(ddp, **megatron))


def test_overlap_is_refused_with_adapters_and_images() -> None:
    with pytest.raises(RecipeError, match=r"image encoder without gradients"):
        check(recipe_of(BOTH), VISION)
    recipe = recipe_of(BOTH)
    recipe.lora.rank = 8
    with pytest.raises(RecipeError, match=r"only adapters have gradients"):
        check(recipe)


def test_supported_fields_are_accepted() -> None:
    check(recipe_of({**BOTH, "align_param_gather": True, "bucket_size": 1000, "pad_buckets_for_high_nccl_busbw": True}))


def test_the_critics_ddp_fields_are_checked() -> None:
    recipe = recipe_of({})
    recipe.algorithm.advantage = "gae"
    recipe.critic.megatron.ddp = {"nccl_ub": True}
    with pytest.raises(RecipeError, match=r"critic\.megatron\.ddp\.nccl_ub"):
        validate(recipe)
    with pytest.raises(RecipeError, match=r"critic\.megatron\.ddp\.bucket_sise[\s\S]*bucket_size"):
        check_extra_names(recipe_of({"bucket_sise": 2}), "critic.megatron")


def test_every_field_of_megatron_is_supported_or_refused_with_a_reason() -> None:
    """A new field of Megatron fails here until megarl supports or refuses it."""
    from megatron.core.distributed import DistributedDataParallelConfig

    names = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert set(DRIVEN) <= names
    assert {name for name in names if "no such field" in (refusal_of_ddp(name) or ("",))[0]} == set()
    assert {name for name in names if (refusal_of_ddp(name) or ("",))[0] == _FSDP} == {
        "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy", "gradient_reduce_div_fusion",
        "suggested_communication_unit_size", "preserve_fp32_weights", "fsdp_double_buffer", "outer_dp_sharding_strategy",
        "fsdp_manual_registration",
    }  # fmt: skip


def test_misspelled_field_gets_a_suggestion() -> None:
    with pytest.raises(RecipeError, match=r"no such field[\s\S]*did you mean overlap_grad_reduce\?"):
        validate(recipe_of({"overlap_grad_reduse": True}))
    assert "overlap_param_gather" in (refusal_of_ddp("zzz") or ("", ""))[1]


def test_defaults_follow_the_device() -> None:
    assert ddp_settings(recipe_of({}, "cuda"), with_images=False) == BOTH
    assert (
        ddp_settings(recipe_of({}, "cpu"), with_images=False)
        == ddp_settings(recipe_of({}, "npu"), with_images=False)
        == {}
    )
    without = ddp_settings(recipe_of({}, "cuda", distributed_optimizer=False), with_images=False)
    assert without == {"overlap_grad_reduce": True}
    assert ddp_settings(recipe_of({"overlap_grad_reduce": False}, "cuda"), with_images=False) == {
        "overlap_grad_reduce": False
    }
    assert ddp_settings(recipe_of({}, "cuda"), with_images=True) == {}
    adapters = recipe_of({}, "cuda")
    adapters.lora.rank = 8
    assert ddp_settings(adapters, with_images=False) == {}


def test_a_plan_notes_overlap() -> None:
    assert ddp_notice(recipe_of({}, "npu"), with_images=False) is None
    message = (
        "Trainers overlap communication and computation: megatron.ddp overlap_grad_reduce and overlap_param_gather"
    )
    assert ddp_notice(recipe_of({}, "cuda"), with_images=False) == f"{message} (the default on cuda)"
    assert ddp_notice(recipe_of(BOTH, "npu"), with_images=False) == f"{message} (set by the recipe)"


FUSED = ("moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion")


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_are_refused_without_transformer_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this check, Megatron raises the error in every trainer process."""

    def check_on(device: str, value: bool = True) -> None:
        recipe = recipe_of({}, device)
        recipe.megatron.extra = {name: value}
        check_extra_names(recipe, "megatron")

    check_on("cpu", value=False)
    check_on("cuda")  # no GPU here: the trainers' machine may have the package
    check_on("npu")  # MindSpeed replaces the kernels
    with pytest.raises(RecipeError, match=rf"megatron\.extra\.{name}[\s\S]*which CPU cores are not"):
        check_on("cpu")
    monkeypatch.setattr(DeviceKind, "is_here", lambda self: True)
    with pytest.raises(RecipeError, match=rf"megatron\.extra\.{name}[\s\S]*here it is not installed"):
        check_on("cuda")
    monkeypatch.setattr(transformer_engine, "version_of_whole", lambda: "1.3")
    with pytest.raises(RecipeError, match=r"here it is 1\.3"):
        check_on("cuda")
    monkeypatch.setattr(transformer_engine, "version_of_whole", lambda: "2.7")
    check_on("cuda")
