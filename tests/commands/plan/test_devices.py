"""Memory users of a device in each phase, the rest for an engine's cache, and the refusal of a plan that does not fit."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megarl.commands.plan.count import engines as engines_module
from megarl.commands.plan.count.devices import Occupants, places, too_large, weight_sync_buffers
from megarl.commands.plan.count.engines import Engine, not_counted, policy_engines, rank_of, too_small
from megarl.commands.plan.count.rank_client import RankClient
from megarl.commands.plan.count.types import Activations, DeviceUses, EngineRank, PipelineStage, RankMemory, Use
from megarl.commands.plan.show.console import _places, show
from megarl.commands.plan.show.units import Unit
from megarl.engines.base import EngineLimits, EngineSpec
from megarl.engines.specs import policy_spec
from megarl.errors import InputError
from megarl.recipe.schema import Recipe
from tests.support import plans

GIB = 2**30
HELD = RankMemory(parameters=1, trained=1, weights=20, buffers=1, gradients=40, masters=30, moments=60, reference=20)
BEYOND = Activations(forward=3, update=9, kept=5, optimizer=7, forward_logits=1, update_logits=2)
SGLANG = {"share_key": "mem_fraction_static", "covers_step": False}
ENGINE = EngineRank(10, 20, 2.0, 5, cache=100, sequences=3.0, devices=4, largest=6)


def recipe(**cluster: Any) -> Recipe:
    recipe = Recipe()
    recipe.cluster.device, recipe.cluster.trainers, recipe.weight_sync.bucket_mb = "npu", 4, 1
    recipe.weight_sync.route = "full"
    for name, value in cluster.items():
        setattr(recipe.cluster, name, value)
    return recipe


def stage(role: str = "actor", number: int = 0) -> PipelineStage:
    return PipelineStage(role, number, 0, HELD, BEYOND, None)


def of(recipe: Recipe, stages: list[PipelineStage], engine: EngineRank | None = ENGINE) -> dict[str, DeviceUses]:
    engines = {} if engine is None else {"rollout": engine}
    uses = places(Occupants(recipe, stages, engines, {}, 0, keeps_weights=False))
    return {place.name: place for place in uses}


def totals(place: DeviceUses) -> dict[str, int]:
    return {use.phase: use.total for use in place.uses}


def test_offloaded_trainers_use_no_device_memory_during_sampling() -> None:
    run_recipe = recipe()
    run_recipe.megatron.offload = True
    uses = of(run_recipe, [stage()])["actor 0 + engine"]
    sending, loading, resident = 2**20, ENGINE.largest, 21 + 40 + 90
    assert totals(uses) == {
        "gen": 20 + 100 + 5 + HELD.buffers,
        "old_log_prob": resident + 3,
        "update_actor": resident + 9,
        "update_actor, Adam": resident + 7,
        "weight_sync": 21 + 20 + sending + loading,
    }
    assert next(use.parts["logits"] for use in uses.uses if use.phase == "update_actor") == 2


def test_trainers_without_offload_stay_on_the_device() -> None:
    run_recipe = recipe()
    run_recipe.megatron.offload = False
    memory = totals(of(run_recipe, [stage()])["actor 0 + engine"])
    assert memory["gen"] == 20 + 100 + 5 + 151
    assert memory["update_actor"] == 151 + 9, "engines sleep in any case"


def test_swapped_states_come_to_the_device_in_parts() -> None:
    occupants = Occupants(recipe(placement="disaggregated"), [stage()], {}, {"actor": 3}, 0, keeps_weights=False)
    (place,) = places(occupants)
    assert totals(place)["update_actor"] == 61 + 9
    assert totals(place)["update_actor, Adam"] == 61 + 30, "a third of the states at a time"


def test_without_activations_only_resident_memory_is_counted() -> None:
    uncounted = replace(stage(), activations=None)
    run_recipe = recipe(placement="disaggregated")
    run_recipe.megatron.offload = False
    sending = weight_sync_buffers(run_recipe, 0)
    (place,) = places(Occupants(run_recipe, [uncounted], {}, {}, 0, keeps_weights=False))
    assert totals(place) == {"update_actor": 151, "weight_sync": 151 + sending}


def test_on_a_cpu_nothing_is_offloaded() -> None:
    run_recipe = recipe(device="cpu")
    run_recipe.megatron.offload = True
    assert totals(of(run_recipe, [stage()])["actor 0 + engine"])["update_actor"] == 151 + 9 + 20 + 100


def test_unset_offload_follows_the_placement() -> None:
    run_recipe = recipe()
    assert run_recipe.megatron.offload is None
    offloaded = totals(of(run_recipe, [stage()])["actor 0 + engine"])
    run_recipe.megatron.offload = True
    assert offloaded == totals(of(run_recipe, [stage()])["actor 0 + engine"])


def test_disaggregated_trainers_and_engines_have_separate_devices() -> None:
    devices = of(recipe(placement="disaggregated"), [stage(number=0), stage(number=1)])
    assert {name: place.devices for name, place in devices.items()} == {"actor 0": 2, "actor 1": 2, "engine": 4}
    assert totals(devices["engine"]) == {"gen": 125, "weight_sync": 120 + ENGINE.largest}


def test_buffers_follow_the_route() -> None:
    """A bucket is 1 MiB and the model's largest tensor is 3 MiB. A full update gathers twice that, and so does a verified
    sharded update. On a CPU the pack buffers of the buckets count as well."""
    run_recipe, mib = recipe(), 2**20
    assert weight_sync_buffers(run_recipe, 3 * mib) == (1 + 6) * mib
    run_recipe.cluster.device = "cpu"
    assert weight_sync_buffers(run_recipe, 3 * mib) == (1 + 6 + 2 * 3) * mib
    run_recipe.weight_sync.route = "sharded"
    assert weight_sync_buffers(run_recipe, 3 * mib) == (6 + 4) * mib
    run_recipe = recipe(placement="disaggregated")
    run_recipe.weight_sync.route = "sharded"
    assert totals(of(run_recipe, [stage()])["engine"])["weight_sync"] == 120 + ENGINE.largest + mib
    run_recipe.megatron.pipeline_parallel = 3
    assert totals(of(run_recipe, [stage()])["engine"])["weight_sync"] == 120 + 3 * ENGINE.largest + mib
    run_recipe.weight_sync.transport = "device"
    assert weight_sync_buffers(run_recipe, 3 * mib) == (6 + 4) * mib
    assert totals(of(run_recipe, [stage()])["engine"])["weight_sync"] == 120 + 3 * ENGINE.largest + (2 + 4) * mib


def test_bucket_slots_on_devices_count_in_every_phase() -> None:
    """A trainer's four, and the four of an engine rank that passes buckets on."""
    run_recipe, mib = recipe(), 2**20
    before = totals(of(run_recipe, [stage()])["actor 0 + engine"])
    run_recipe.weight_sync.route, run_recipe.weight_sync.transport = "sharded", "ipc"
    assert weight_sync_buffers(run_recipe, 3 * mib) == (6 + 4 + 32) * mib, "and sums of words"
    after = totals(of(run_recipe, [stage()])["actor 0 + engine"])
    phases = before.keys() - {"weight_sync"}
    assert phases and {phase: after[phase] - before[phase] for phase in phases} == dict.fromkeys(phases, 8 * mib)
    run_recipe = recipe(placement="disaggregated")
    run_recipe.weight_sync.route, run_recipe.weight_sync.transport = "sharded", "ipc"
    apart = of(run_recipe, [stage()])
    assert totals(apart["engine"]) == {
        "gen": 125 + 4 * mib,
        "weight_sync": 120 + ENGINE.largest + (4 + 32) * mib,
    }


def test_a_critic_shares_the_devices_of_actor_stages() -> None:
    run_recipe = recipe()
    run_recipe.megatron.offload, run_recipe.critic.megatron.offload = False, True
    run_recipe.algorithm.advantage, run_recipe.critic.trainers = "gae", 3
    engine = EngineRank(10, 20, 2.0, 5, cache=100, sequences=3.0, devices=2)
    devices = of(run_recipe, [stage(number=0), stage(number=1), stage("critic")], engine)
    assert {name: place.devices for name, place in devices.items()} == {
        "actor 0 + critic 0 + engine": 2,
        "actor 1 + critic 0": 1,
        "actor 1": 1,
    }
    assert totals(devices["actor 1 + critic 0"])["update_critic"] == 151 + 9 + 151, "the actor does not offload"
    assert totals(devices["actor 1 + critic 0"])["update_actor"] == 151 + 9 + 1, "the critic does"


def test_uncounted_engines_make_the_remaining_memory_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {"rollout": "rollout: vLLM is not installed here", "judge": "judge: neither"}

    def with_unknown(run_recipe: Recipe, engines: dict[str, EngineRank]) -> list[DeviceUses]:
        return places(Occupants(run_recipe, [stage()], engines, {}, 0, keeps_weights=False), unknown=unknown)

    (shared,) = with_unknown(recipe(), {})
    assert shared.not_counted == unknown["rollout"]
    (apart,) = with_unknown(recipe(placement="disaggregated"), {})
    assert apart.not_counted is None
    half = replace(ENGINE, cache=None, devices=2)
    colocated, alone = with_unknown(recipe(), {"rollout": half})
    assert (colocated.name, colocated.not_counted, alone.not_counted) == ("actor 0 + engine", unknown["rollout"], None)
    show(replace(plans.BARE, places=[colocated, alone], memory=1.0))
    rows = [line for line in capsys.readouterr().out.splitlines() if "actor 0" in line]
    assert ["not known" in row for row in rows] == [True, False] and "1.0 left" in rows[1]


def test_an_engine_that_determines_its_share_at_run_time_is_not_counted() -> None:
    finds_out = engine(spec(40), share=None, share_key="mem_fraction_static")
    assert "rollout.engine_args.mem_fraction_static is not set" in str(not_counted(finds_out, 20))
    assert not_counted(finds_out, None) is None, "without a device no engine is examined"
    assert not_counted(engine(spec(40)), 20) is None
    absent = replace(finds_out, counts=None, not_counted="vLLM is not installed here")
    assert "vLLM is not installed here" in str(not_counted(absent, 20))


def engine(spec: EngineSpec, **limits: Any) -> Engine:
    defaults = {"tokens": 1, "sequences": 1, "share": 0.5, "share_key": "gpu_memory_utilization", "covers_step": True}
    counts = EngineRank(1, 4 * GIB, GIB / 10, 2 * GIB, largest=1, asleep=1, tables=GIB)
    return Engine(
        "rollout",
        "vllm",
        2,
        spec,
        EngineLimits(**{**defaults, **limits}),
        counts,
    )


def spec(longest: int) -> EngineSpec:
    recipe = Recipe()
    recipe.data.max_prompt_length, recipe.rollout.max_response_length = longest // 2, longest - longest // 2
    recipe.rollout.tensor_parallel = 4
    return policy_spec(recipe, "engine0", updated=True)


def test_the_cache_is_the_rest_of_the_engines_share() -> None:
    rank = rank_of(engine(spec(40)), memory=20)
    assert rank is not None and rank.cache == (10 - 4 - 2) * GIB and rank.sequences == 1 and rank.devices == 8
    outside = rank_of(engine(spec(40), covers_step=False), memory=20)
    assert outside is not None and outside.cache == 6 * GIB
    fixed = rank_of(engine(spec(40), cache=7), memory=20)
    assert fixed is not None and fixed.cache == 7


@pytest.mark.parametrize(
    ("longest", "limits", "words"),
    [
        (
            80,
            {},
            ["0.5 x 20 GiB = 10.0, less weights 4.0 and the largest step 2.0, leaves 4.0", "set it to 0.7 or more"],
        ),
        (400, {}, ["room for 0.10 sequences", "raise rollout.tensor_parallel above 4"]),
        (80, {"cache": GIB}, ["room for 0.12 sequences", f"set it to {8 * GIB} or more"]),
    ],
)
def test_a_cache_without_room_for_one_sequence_is_refused(longest: int, limits: Any, words: list[str]) -> None:
    kind = engine(spec(longest), **limits)
    rank = rank_of(kind, memory=20)
    assert rank is not None
    refusal = too_small(kind, rank, 20)
    assert refusal is not None and all(word in f"{refusal.problem}. {refusal.remedy}" for word in words), refusal


def test_a_cache_with_room_for_one_sequence_is_accepted() -> None:
    kind = engine(spec(40))
    rank = rank_of(kind, memory=20)
    assert rank is not None and too_small(kind, rank, 20) is None


def large(recipe: Recipe, memory: float) -> list[tuple[str, str]]:
    held = RankMemory(1, 1, 20 * GIB, 0, 40 * GIB, 30 * GIB, 60 * GIB, 0)
    beyond = Activations(3 * GIB, 200 * GIB, 5 * GIB, 7 * GIB, update_logits=2 * GIB)
    rank = EngineRank(10, 20 * GIB, 2.0, 5 * GIB, cache=100 * GIB, sequences=3.0, devices=4)
    stages = [PipelineStage("actor", 0, 0, held, beyond, None)]
    uses = places(Occupants(recipe, stages, {"rollout": rank}, {}, 0, keeps_weights=False))
    return [(refusal.key, refusal.problem) for refusal in too_large(uses, memory, [])]


def test_a_phase_above_the_devices_memory_is_refused_with_its_arithmetic() -> None:
    ((key, message),) = large(recipe(), 300)
    assert key == "actor.max_tokens_per_micro_batch"
    assert message == (
        "actor 0 + engine needs 350.0 GiB in update_actor: activations 198.0 + optimizer 90.0 + gradients 40.0 + weights "
        "20.0 + logits 2.0; there are 300"
    )
    assert large(recipe(), 350) == []


def test_an_engine_next_to_resident_trainers_is_refused_with_the_key_offload() -> None:
    run_recipe = recipe()
    run_recipe.actor.max_tokens_per_micro_batch, run_recipe.megatron.offload = 1, False
    held = RankMemory(1, 1, 20 * GIB, 0, 40 * GIB, 30 * GIB, 60 * GIB, 0)
    rank = EngineRank(10, 20 * GIB, 2.0, 5 * GIB, cache=100 * GIB, sequences=3.0, devices=4)
    lying = [PipelineStage("actor", 0, 0, held, Activations(1, 1, 1, 1), None)]
    uses = places(Occupants(run_recipe, lying, {"rollout": rank}, {}, 0, keeps_weights=False))
    (refusal,) = too_large(uses, 200, [])
    assert refusal.key == "megatron.offload" and "in gen: KV cache 100.0" in refusal.problem


@pytest.mark.parametrize(
    ("section", "limits", "largest", "key", "remedy"),
    [
        ("rollout", {}, 1, "gpu_memory_utilization", "set it to 0.99 or less"),
        ("rollout", {}, 30 * GIB, "gpu_memory_utilization", "set it to 0.78 or less"),
        ("rollout", SGLANG, 1, "mem_fraction_static", "set it to 0.96 or less"),
        ("rollout", {"cache": 1}, 1, "kv_cache_memory_bytes", f"set it to {120 * GIB} or less"),
        ("rollout", {"cache": 1}, 30 * GIB, "kv_cache_memory_bytes", f"set it to {95 * GIB} or less"),
        ("teacher", {"cache": 1}, 1, "kv_cache_memory_bytes", f"set it to {120 * GIB} or less"),
    ],
)
def test_an_engine_with_a_large_cache_is_refused_with_the_argument_of_its_cache(
    section: str, limits: dict[str, Any], largest: int, key: str, remedy: str
) -> None:
    """With a largest layer of 30 GiB the weight sync is the largest phase, else sampling."""
    kind = replace(engine(spec(40), **limits), section=section)
    rank = EngineRank(10, 20 * GIB, 2.0, 5 * GIB, cache=200 * GIB, devices=4, largest=largest)
    occupants = Occupants(recipe(placement="disaggregated"), [stage()], {section: rank}, {}, 0, keeps_weights=False)
    (refusal,) = too_large(places(occupants), 145, [kind])
    assert (refusal.key, refusal.remedy) == (f"{section}.engine_args.{key}", remedy)


def test_an_engine_with_large_weights_is_refused_with_the_key_tensor_parallel() -> None:
    rank = EngineRank(10, 200 * GIB, 2.0, 5 * GIB, cache=GIB, devices=4)
    occupants = Occupants(recipe(placement="disaggregated"), [stage()], {"rollout": rank}, {}, 0, keeps_weights=False)
    (refusal,) = too_large(places(occupants), 100, [engine(spec(40))])
    assert refusal.key == "rollout.tensor_parallel" and "raise it above 4" in refusal.remedy
    resident = recipe()
    resident.megatron.offload = False
    large_trainers = replace(stage(), held=replace(HELD, weights=99 * GIB), activations=None)
    occupants = Occupants(resident, [large_trainers], {"rollout": rank}, {}, 0, keeps_weights=False)
    (refusal,) = too_large(places(occupants), 100, [engine(spec(40))])
    assert refusal.key == "megatron.offload"


def test_engines_that_are_not_counted_in_time_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class FutureTimeout(Exception):
        """`concurrent.futures.TimeoutError` of Python 3.10, which is not the built-in TimeoutError."""

    class Unfinished(RankClient):
        def submit(self, question: object) -> Future[dict[str, Any]]:
            future: Future[dict[str, Any]] = Future()
            future.set_exception(FutureTimeout())
            return future

    monkeypatch.setattr(engines_module, "FutureTimeout", FutureTimeout)
    monkeypatch.setattr(engines_module, "RankClient", Unfinished)
    monkeypatch.setattr(engines_module.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match="not counted in time"):
        policy_engines([recipe()], {}, deadline=0.0)


def test_many_phases_are_printed_as_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """The console's table keeps within 100 columns without truncated numbers."""
    phases = ["gen", "values", "update_critic", "update_critic, Adam", "old_log_prob", "reference", "update_actor"]
    uses = [Use(phase, {"weights": (number + 50) << 30}) for number, phase in enumerate(phases)]
    few = [DeviceUses("actor 0 + engine", 8, uses[:2])]
    many = [DeviceUses(f"actor {number} + critic 0 + engine", 8, uses) for number in range(2)]
    for device_uses, memory in ((few, 64.0), (many, 64.0), (many, None)):
        Console(width=100).print(_places(device_uses, memory, Unit.of(2**33), 100, counted=True))
        printed = capsys.readouterr().out
        assert "…" not in printed and max(map(len, printed.splitlines())) <= 100
        for use in device_uses[0].uses:
            assert f"{use.total >> 30}.0" in printed
        assert memory is None or f"{64 - 49 - len(device_uses[0].uses)}.0 left" in printed
