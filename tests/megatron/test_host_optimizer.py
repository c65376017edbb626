"""`actor.optimizer.extra.optimizer_cpu_offload`: rejected recipes, and Megatron's HybridDeviceOptimizer in real trainer processes
with bfloat16 CPU tensors in the device's role: updates, clipping, checkpoints and resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.commands.plan.count.devices import Occupants, places
from megarl.commands.plan.count.host import host_copies
from megarl.commands.plan.count.types import PipelineStage, RankMemory
from megarl.commands.plan.search.lower_bound import largest_parts, min_held_bytes, parameters
from megarl.errors import RecipeError
from megarl.hf import published
from megarl.hf.shape import model_shape
from megarl.megatron.extra_settings import check_extra_names
from megarl.megatron.optimizer import _create_moments
from megarl.platform.device_kind import DeviceKind
from megarl.preflight.recipe.general import validate
from megarl.preflight.recipe.optimizer_extra import optimizer_notices
from megarl.recipe.derived.optimizer_extra import DRIVEN, host_share, optimizer_settings
from megarl.recipe.schema import Recipe
from tests.support.megatron_checkpoints import assembled, assert_same
from tests.support.megatron_models import write_model
from tests.support.trainer_processes import run_cases

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def recipe_of(extra: dict[str, Any], device: str = "cuda") -> Recipe:
    recipe = Recipe()
    recipe.model.path, recipe.cluster.device, recipe.actor.optimizer.extra = "m", device, extra  # type: ignore[assignment]
    return recipe


def test_moments_are_created_by_the_kind_of_optimizer() -> None:
    """HybridDeviceOptimizer has `sub_optimizers`; a missing `init_state_fn` alone does not make an optimizer one."""
    created: list[Any] = []
    device = SimpleNamespace(optimizer="AdamW", init_state_fn=created.append)
    _create_moments(device)
    assert created == ["AdamW"]
    host = SimpleNamespace(sub_optimizers=[], _sync_sub_optimizers_state_to_hdo=lambda: created.append("synced"))
    _create_moments(SimpleNamespace(optimizer=host, init_state_fn=None))
    assert created == ["AdamW", "synced"]
    other = SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(1)]), init_state_fn=None)
    with pytest.raises(ValueError, match=r"Megatron built SGD, .*Leave out settings that replace"):
        _create_moments(other)


@pytest.mark.parametrize(
    ("extra", "device", "words"),
    [
        ({"lr": 1.0}, "cuda", r"actor\.optimizer\.lr decides it"),
        ({"use_precision_aware_optimizer": True}, "cuda", "checkpoints do not read or write"),
        ({"exp_avg_dtype": "bfloat16"}, "cuda", "checkpoints do not read or write"),
        ({"optimizer": "sgd"}, "cuda", "do not use it"),
        ({"optimizer_offload_fraction": 0.5}, "cuda", "no effect without optimizer_cpu_offload"),
        ({"optimizer_cpu_offload": True}, "cuda", r"unset or outside \(0, 1\]"),
        ({**OFFLOAD, "optimizer_offload_fraction": 2}, "cuda", r"unset or outside \(0, 1\]"),
        ({**OFFLOAD, "optimizer_offload_fraction": True}, "cuda", "must be a number"),
        ({**OFFLOAD, "optimizer_offload_fraction": "1.0"}, "cuda", "must be a number"),
        ({"optimizer_cpu_offload": "no"}, "npu", "true or false"),  # the type check comes before the device check
        ({**OFFLOAD, "pin_cpu_grads": 1}, "cuda", "true or false"),
        (OFFLOAD, "cpu", "already in host memory"),
        (OFFLOAD, "npu", r"megatron\.extra\.swap_optimizer: true"),
    ],
)
def test_invalid_optimizer_settings_are_refused(extra: dict[str, Any], device: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        validate(recipe_of(extra, device))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("megatron.distributed_optimizer", False, r"set megatron\.distributed_optimizer=true"),
        ("model.dtype", "float32", r"set model\.dtype=bfloat16"),
        ("lora.rank", 8, "only the adapters have optimizer states"),
    ],
)
def test_conflicting_keys_are_refused(key: str, value: Any, words: str) -> None:
    recipe = recipe_of(OFFLOAD)
    section, name = key.split(".")
    setattr(getattr(recipe, section), name, value)
    with pytest.raises(RecipeError, match=words):
        validate(recipe)


def test_each_used_optimizer_on_the_host_has_a_notice() -> None:
    """The optimizer of an unused critic gives no notice."""
    recipe = recipe_of(OFFLOAD)
    recipe.critic.optimizer.extra = {**OFFLOAD, "optimizer_offload_fraction": 0.5}
    assert [notice.partition(" of master")[0] for notice in optimizer_notices(recipe)] == [
        "actor.optimizer.extra: 100%"
    ]
    recipe.algorithm.advantage = "gae"
    assert [notice.partition(" of master")[0] for notice in optimizer_notices(recipe)] == [
        "actor.optimizer.extra: 100%",
        "critic.optimizer.extra: 50%",
    ]


def test_names_and_values_follow_megatrons_declaration() -> None:
    from megatron.core.optimizer import OptimizerConfig

    assert set(DRIVEN) <= {field.name for field in dataclasses.fields(OptimizerConfig)}
    for name, value, words in (("pin_cpu_grad", True, "write pin_cpu_grads"), ("pin_cpu_grads", 1, "true or false")):
        with pytest.raises(RecipeError, match=rf"actor\.optimizer\.extra\.{name}[\s\S]*{words}"):
            check_extra_names(recipe_of({name: value}), "megatron")
    validate(
        recipe_of({**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False, "pin_cpu_params": True})
    )


def test_a_machine_with_gpus_needs_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extra_names(recipe_of(OFFLOAD), "megatron")  # this machine has no GPU: the trainers' may have the package
    monkeypatch.setattr(DeviceKind, "is_here", lambda self: True)
    with pytest.raises(
        RecipeError,
        match=r"optimizer_cpu_offload[\s\S]*needs Transformer Engine 1\.0 or later for it, and here it is not installed",
    ):
        check_extra_names(recipe_of(OFFLOAD), "megatron")


def test_settings_for_megatron() -> None:
    assert optimizer_settings(recipe_of({"optimizer_cpu_offload": False}).actor.optimizer) == {}
    settings = optimizer_settings(recipe_of(OFFLOAD).actor.optimizer)
    assert settings == {**OFFLOAD, "use_precision_aware_optimizer": True}
    assert host_share(recipe_of({}).actor.optimizer) == 0 and host_share(recipe_of(OFFLOAD).actor.optimizer) == 1


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "megatron", [{}, {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}}]
)
def test_checkpoints_move_between_host_and_device_optimizers(tmp_path: Path, megatron: dict[str, Any]) -> None:
    """Checkpoints equal those with states on the device up to rounding, and each run continues from the other's."""
    write_model("qwen3_moe", tmp_path / "models")
    model = {"model": str(tmp_path / "models" / "qwen3_moe"), "dtype": "bfloat16", "megatron": megatron}
    on_device = {**model, "name": "device", "optimizer": {}}
    on_host = {**model, "name": "host", "optimizer": {**OFFLOAD, "pin_cpu_grads": False}, "continues": "device"}
    back = {**model, "name": "back", "optimizer": {}, "continues": "host"}
    run_cases("tests.support.host_optimizer_worker", 2, [on_device, on_host, back], tmp_path)
    assert_same(tmp_path / "device.start.checkpoint", tmp_path / "host.start.checkpoint")
    left, right = (assembled(tmp_path / f"{name}.checkpoint") for name in ("device", "host"))
    assert left.keys() == right.keys() and any(name.startswith("master.") for name in left)
    for name, tensor in left.items():
        if not name.startswith("weight."):
            torch.testing.assert_close(
                tensor, right[name], rtol=2e-4, atol=1e-6, msg=lambda words, n=name: f"{n}: {words}"
            )
    for copy, source in (("host", "device"), ("back", "host")):
        assert_same(tmp_path / f"{copy}.copied.checkpoint", tmp_path / f"{source}.checkpoint")
    device, host, back = (torch.load(tmp_path / f"{name}.pt") for name in ("device", "host", "back"))
    for actual, other in (
        (device["metrics"], host["metrics"]),
        (device["went_on"], host["crossed"]),
        (host["went_on"], back["crossed"]),
    ):
        for line, like in zip(actual, other, strict=True):
            assert line["loss"] == pytest.approx(like["loss"], rel=1e-2)
            assert (
                line["actor/grad_norm"] == pytest.approx(like["actor/grad_norm"], rel=2e-2)
                and line["actor/grad_norm"] > 0.5
            )


def test_a_plan_counts_states_on_the_host() -> None:
    """Masters and moments leave the device; the host also has the gradients that the update there reads."""
    held = RankMemory(10, 10, weights=20, buffers=1, gradients=40, masters=40, moments=80, reference=20)
    moved = held.with_states_on_host(0.5)
    assert (moved.masters, moved.moments, moved.on_host) == (20, 40, 20 + 20 + 40)
    before, after = (
        places(Occupants(Recipe(), [PipelineStage("actor", 0, 0, memory, None, None)], {}, {}, 0, keeps_weights=False))
        for memory in (held, moved)
    )
    assert before[0].uses[0].total - after[0].uses[0].total == 60
    copies = host_copies("actor", moved, offloads=False, swaps=None, reference=False)
    assert copies == {"optimizer": 80}
    assert held.with_states_on_host(0.0) == held


def test_the_planners_lower_bound_excludes_host_states() -> None:
    recipe = recipe_of(OFFLOAD)
    shape = model_shape(published.read("Qwen3-8B"))
    (part,) = largest_parts(recipe.megatron, shape)
    owned = parameters(recipe.megatron, shape, part)
    assert min_held_bytes(recipe, shape, part) == pytest.approx(6 * (owned.every + owned.routed)), (
        "weights and gradients"
    )
    recipe.actor.optimizer.extra = {}
    assert min_held_bytes(recipe, shape, part) == pytest.approx(18 * (owned.every + owned.routed))
