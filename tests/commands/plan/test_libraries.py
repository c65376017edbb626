"""Device memory of communicators, contexts and graphs, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.commands.plan.count.devices import Occupants, places, too_large
from megarl.commands.plan.count.engines import Engine, rank_of
from megarl.commands.plan.count.libraries import Libraries, counted_libraries, trainer_groups
from megarl.commands.plan.count.types import EngineRank, PipelineStage, RankMemory, Variable
from megarl.engines.base import EngineLimits
from megarl.engines.specs import policy_spec
from megarl.platform.device_table import device_named
from megarl.preflight.load import load_recipe
from tests.commands.plan.test_devices import ENGINE, HELD, recipe

RECIPES = Path(__file__).parents[3] / "recipes"
GIB, MIB = 2**30, 2**20
NPU = device_named("910C")


@pytest.mark.parametrize(
    ("layout", "world", "groups"),
    [
        ({}, 1, 0),
        ({}, 8, 2),  # everyone, data parallel
        ({"tensor_parallel": 2}, 8, 4),  # and tensor, model parallel
        (
            {"tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2},
            8,
            6,
        ),  # data parallel with context is one
        ({"pipeline_parallel": 8, "expert_parallel": 32}, 256, 6),  # everyone, PP, DP, model; EP, and model of experts
        (
            {"expert_parallel": 2, "expert_tensor_parallel": 2},
            8,
            6,
        ),  # everyone, DP; EP, ETP, expert DP, model of experts
    ],
)
def test_groups_of_a_layout(layout: dict[str, int], world: int, groups: int) -> None:
    settings = recipe().megatron
    for name, value in layout.items():
        setattr(settings, name, value)
    assert trainer_groups(settings, world) == groups


def test_deepseek_v3_on_256_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines: everyone, TP 2, DP 128 and the experts' 256 ranks have 2 x 200 MiB, their dispatch 2 x 240."""
    run_recipe = load_recipe(RECIPES / "grpo_deepseek_v3.yaml", [])
    variables = [Variable("engines", "HCCL_BUFFSIZE", "240", "computed")]
    monkeypatch.setattr("megarl.commands.plan.count.libraries.environment_of", lambda *_: variables)
    buffers = counted_libraries(run_recipe, {}, NPU)
    assert buffers.communicators["actor"] == 6 * 400 * MIB
    assert buffers.communicators["rollout"] == (4 * 400 + 480) * MIB
    assert (buffers.context, buffers.graphs) == (GIB // 2, GIB)
    variables = [Variable("trainers", "HCCL_BUFFSIZE", "300", "cluster.environment")]
    assert counted_libraries(run_recipe, {}, NPU).communicators["actor"] == 6 * 600 * MIB
    run_recipe.rollout.engine_args["enforce_eager"] = True
    assert counted_libraries(run_recipe, {}, NPU).graphs == 0
    assert counted_libraries(run_recipe, {}, None) == Libraries()


def test_libraries_count_in_every_phase() -> None:
    """A trainer and an engine rank share a device: two contexts, the groups of both, graphs, and allocated weights."""
    libraries = Libraries({"actor": 7, "rollout": 5}, context=3, graphs=11)
    engine = replace(ENGINE, recomputed=2)
    stage = PipelineStage("actor", 0, 0, HELD, None, None)
    occupants = Occupants(recipe(), [stage], {"rollout": engine}, {}, 0, keeps_weights=False)
    (before,), (after,) = places(occupants), places(occupants, libraries=libraries)
    for old, new in zip(before.uses, after.uses, strict=True):
        assert new.parts == old.parts | {"communicators": 12, "contexts": 6, "graphs": 11, "recomputed weights": 2}
    (alone, *_) = places(replace(occupants, recipe=recipe(placement="disaggregated")), libraries=libraries)
    assert (
        alone.uses[0].parts.items() >= {"communicators": 7, "contexts": 3}.items()
        and "graphs" not in alone.uses[0].parts
    )


def test_communicators_of_an_engine_reduce_its_cache() -> None:
    run_recipe = load_recipe(RECIPES / "grpo_qwen3_8b.yaml", [])
    spec = policy_spec(run_recipe, "engine0", updated=True)
    counts = EngineRank(1, GIB, 1.0, GIB, largest=1, asleep=1)
    limits = EngineLimits(tokens=1, sequences=1, share=0.5, share_key="x", covers_step=True)
    engine = Engine("rollout", "vllm", 1, spec, limits, counts)
    plain, less = rank_of(engine, 64.0), rank_of(engine, 64.0, communicators=GIB)
    assert plain is not None and less is not None
    assert (plain.cache, less.cache) == (30 * GIB, 29 * GIB)


def test_communicators_of_a_trainer_can_exceed_the_device() -> None:
    held = RankMemory(1, 1, 20 * GIB, 0, 40 * GIB, 0, 0, 0)
    stage = PipelineStage("actor", 0, 0, held, None, None)
    libraries = Libraries({"actor": 5 * GIB})
    occupants = Occupants(recipe(placement="disaggregated"), [stage], {}, {}, 0, keeps_weights=False)
    (place,) = places(occupants, libraries=libraries)
    (refusal,) = too_large([place], 64.0, [])
    assert "communicators 5.0" in refusal.problem
