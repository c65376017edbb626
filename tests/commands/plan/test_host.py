"""Host memory of each machine, worked out by hand."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megarl.commands.plan.count.devices import Occupants, whole_expert_bytes
from megarl.commands.plan.count.host import host_copies, host_refusals, hosts_of
from megarl.commands.plan.count.types import EngineRank, HostUse, PipelineStage, RankMemory
from megarl.commands.plan.show.console import host_table
from megarl.hf import published
from megarl.platform.adaptor import asleep, pinned
from megarl.platform.device_table import device_named
from megarl.recipe.schema import Recipe

GIB, MIB = 2**30, 2**20
DEVICE = replace(device_named("910B"), per_node=4, host_memory=100.0, process_memory=1.0)
HELD = RankMemory(1, 1, 20, 0, 40, 30, 60, 20, weights_pinned=2 * GIB, states_pinned=8 * GIB, reference_pinned=3 * GIB)
ENGINE = EngineRank(10, 20, 2.0, 5, cache=100, sequences=3.0, devices=4, asleep=4 * GIB)


def recipe(**settings: Any) -> Recipe:
    """8 trainers and 2 engines of TP 2, colocated; the samples of a step take 2 x 1 x 1 x 1,024 x 64 bytes."""
    recipe = Recipe()
    recipe.cluster.device, recipe.cluster.trainers = "npu", 8
    recipe.rollout.engines, recipe.rollout.tensor_parallel, recipe.rollout.samples_per_prompt = 2, 2, 1
    recipe.data.prompts_per_step, recipe.data.max_prompt_length, recipe.rollout.max_response_length = 1, 512, 512
    recipe.weight_sync.bucket_mb, recipe.megatron.offload = 64, True
    for name, value in settings.items():
        section, _, key = name.partition("__")
        setattr(getattr(recipe, section), key, value)
    return recipe


def stage(number: int, held: RankMemory = HELD, role: str = "actor") -> PipelineStage:
    return PipelineStage(role, number, number, held, None, None)


def uses(recipe: Recipe, *, swaps: int | None = None, keeps_weights: bool = True) -> list[HostUse]:
    stages = [stage(0), stage(1, replace(HELD, weights_pinned=4 * GIB))]
    engines = {"rollout": ENGINE} if recipe.train.source == "rollout" else {}
    return hosts_of(Occupants(recipe, stages, engines, {"actor": swaps}, 1 * GIB, keeps_weights), DEVICE)


def gib(host: HostUse) -> dict[str, float]:
    return {name: size / GIB for name, size in host.parts.items() if name != "samples"}


@pytest.mark.parametrize(("size", "allocated"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (3 * GIB, 4 * GIB)])
def test_page_locked_memory_is_allocated_in_powers_of_two(size: int, allocated: int) -> None:
    assert pinned(size) == allocated


def test_a_sleeping_rank_copies_torchs_segments() -> None:
    """Five tensors of 0.5 MiB: two segments of 2. Three of 8 MiB: two segments of 20, of which each takes 32. One of 33 MiB: a
    segment of 34, which takes 64. One of 16 MiB: 16."""
    sizes = [MIB // 2] * 5 + [8 * MIB] * 3 + [33 * MIB, 16 * MIB]
    assert asleep(sizes) == (2 * 2 + 2 * 32 + 64 + 16) * MIB


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"reference": True}, {"reference": 3 * GIB}),
        ({"offloads": True}, {"offloaded": 10 * GIB}),
        ({"swaps": 3}, {"swapped": 8 * GIB}),
        ({"offloads": True, "swaps": 3, "reference": True}, {"offloaded": 2, "swapped": 8, "reference": 3}),
    ],
)
def test_copies_of_a_rank_on_the_host(settings: dict[str, Any], copies: dict[str, int]) -> None:
    options: dict[str, Any] = {"offloads": False, "swaps": None, "reference": False, **settings}
    unit = 1 if max(copies.values()) > 100 else GIB
    assert host_copies("actor", HELD, **options) == {part: size * unit for part, size in copies.items()}
    options["reference"] = False
    assert "reference" not in host_copies("critic", HELD, **options)


def test_host_memory_of_two_machines_by_hand() -> None:
    """Stage 0 on the first, stage 1 on the second machine. Engines sleep on the first alone. Each trainer has 4 buckets of 64
    MiB, each engine rank as many to pass on; the controller is a process more."""
    first, second = uses(recipe())
    assert (first.name, first.nodes, second.name) == ("node 0", 1, "node 1")
    assert gib(first) == {
        "offloaded": 4 * (2 + 8),
        "processes": 4 + 4 + 1,
        "/dev/shm": 4 * 0.25 + 4 * 0.25,
        "asleep": 16,
    }
    assert gib(second) == {"offloaded": 4 * (4 + 8), "processes": 4, "/dev/shm": 1.0}
    assert first.parts["samples"] == 2 * 1024 * 64


@pytest.mark.parametrize(
    ("settings", "swaps", "keeps_weights", "first"),
    [
        ({"megatron__offload": False}, None, True, {"offloaded": None}),
        ({}, 16, True, {"offloaded": 4 * 2, "swapped": 4 * 8}),
        ({"algorithm__kl_coef": 0.1}, None, True, {"reference": 4 * 3}),
        ({}, None, False, {"asleep": None}),
        ({"rollout__engine_args": {"speculative_config": {"method": "mtp"}}}, None, False, {"asleep": 4 * 4}),
        (
            {"weight_sync__route": "full"},
            None,
            True,
            {"/dev/shm": 2 * 1.0},
        ),  # of rank 0: each tensor has a separate bucket
        ({"weight_sync__transport": "collective"}, None, True, {"/dev/shm": None}),
        ({"train__source": "sft"}, None, True, {"offloaded": 40, "asleep": None, "/dev/shm": None, "processes": 5}),
    ],
)
def test_parts_of_host_memory_follow_the_settings(
    settings: dict[str, Any], swaps: int | None, keeps_weights: bool, first: dict[str, float | None]
) -> None:
    memory = gib(uses(recipe(**settings), swaps=swaps, keeps_weights=keeps_weights)[0])
    assert {name: memory.get(name) for name in first} == first


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_states_of_an_optimizer_on_the_host_name_its_setting(role: str) -> None:
    run_recipe = recipe(algorithm__advantage="gae", critic__trainers=8, megatron__offload=False)
    kept = [stage(0, replace(HELD, on_host=50 * GIB if name == role else 0), name) for name in ("actor", "critic")]
    (refusal,) = host_refusals(hosts_of(Occupants(run_recipe, kept, {"rollout": ENGINE}, {}, GIB, True), DEVICE), 100.0)
    assert refusal.key == f"{role}.optimizer.extra.optimizer_cpu_offload" and "200.0" in refusal.problem


def test_weights_that_wait_for_requests_to_finish_are_on_the_host() -> None:
    """Four engine ranks on the second machine; each holds what an update brings."""
    apart = {"cluster__placement": "disaggregated", "megatron__offload": False, "rollout__max_staleness": 1.0}
    engine = replace(ENGINE, received=5 * GIB)
    for rule, expected in (("finish", 4 * 5.0), ("refresh", None)):
        settings = recipe(**apart, rollout__at_update=rule)
        stages = [stage(0, HELD), stage(1, HELD)]
        hosts = hosts_of(Occupants(settings, stages, {"rollout": engine}, {}, GIB, False), DEVICE)
        assert gib(hosts[-1]).get("next weights") == expected


def test_disaggregated_engines_have_separate_machines_and_do_not_sleep() -> None:
    hosts = uses(recipe(cluster__placement="disaggregated", megatron__offload=False))
    assert [host.name for host in hosts] == ["node 0", "nodes 1-2"], "trainers and engines take as much"
    assert gib(hosts[1]) == {"processes": 4, "/dev/shm": 1.0}


def test_equal_machines_are_one_entry() -> None:
    run_recipe = recipe(cluster__trainers=16, rollout__engines=8)
    stages = [stage(0)]
    hosts = hosts_of(Occupants(run_recipe, stages, {"rollout": ENGINE}, {}, GIB, True), DEVICE)
    assert [(host.name, host.nodes) for host in hosts] == [("node 0", 1), ("nodes 1-3", 3)]


SAVES = replace(HELD, saved=5 * GIB)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 0),
        ({"train__save_in_background": True}, 4),
        ({"train__save_in_background": True, "train__save_at_end": False}, 0),
        ({"train__save_in_background": True, "train__save_at_end": False, "train__save_every": 9}, 4),
        ({"train__save_in_background": True, "megatron__distributed_optimizer": False}, 2),  # of TP 2, one replica
    ],
)
def test_a_checkpoint_copy_uses_host_memory(settings: dict[str, Any], copies: int) -> None:
    """The copy adds to the states that swapping or offloading keeps on the host."""
    run_recipe = recipe(megatron__tensor_parallel=2, **settings)
    occupants = Occupants(run_recipe, [stage(0, SAVES)], {"rollout": ENGINE}, {"actor": 16}, GIB, True)
    memory = gib(hosts_of(occupants, DEVICE)[0])
    assert memory.get("checkpoint", 0) == copies * 5 and memory["swapped"] == 4 * 8


def test_time_shared_actor_and_critic_copy_their_checkpoints() -> None:
    """Actor and critic share four devices; the host keeps a copy of each until both are written, unless they stay."""
    run_recipe = recipe(algorithm__advantage="gae", cluster__trainers=4, rollout__engines=2)
    run_recipe.critic.trainers, run_recipe.critic.megatron.offload = 4, True
    occupants = Occupants(run_recipe, [stage(0, SAVES), stage(0, SAVES, "critic")], {"rollout": ENGINE}, {}, GIB, True)
    assert gib(hosts_of(occupants, DEVICE)[0])["checkpoint"] == 4 * (5 + 5)
    run_recipe.megatron.offload = run_recipe.critic.megatron.offload = False
    assert "checkpoint" not in gib(hosts_of(occupants, DEVICE)[0])


def test_a_host_too_small_only_for_checkpoint_copies_names_save_in_background() -> None:
    hosts = [HostUse("node 0", 1, {"swapped": 40 * GIB, "checkpoint": 20 * GIB})]
    (refusal,) = host_refusals(hosts, 50.0)
    assert refusal.key == "train.save_in_background" and "checkpoint 20.0" in refusal.problem
    (refusal,) = host_refusals(hosts, 30.0)
    assert refusal.key == "megatron.extra.swap_optimizer", "without the copies there is too little as well"


def test_a_host_with_too_little_memory_is_refused_with_the_key() -> None:
    hosts = [HostUse("node 0", 1, {"offloaded": 40 * GIB, "asleep": 50 * GIB, "processes": 9 * GIB})]
    assert host_refusals(hosts, 99.0) == [] == host_refusals([], 1.0)
    (refusal,) = host_refusals(hosts, 98.0)
    assert refusal.key == "rollout.tensor_parallel" and "--host-memory" in refusal.remedy
    assert refusal.problem == (
        "the host of node 0 needs 99.0 GiB: asleep 50.0 + offloaded 40.0 + processes 9.0; there are 98"
    )
    (refusal,) = host_refusals([HostUse("node 0", 1, {"offloaded": 40 * GIB})], 8.0)
    assert refusal.key == "megatron.offload"


def printed(hosts: list[HostUse], memory: float, width: int) -> list[list[str]]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(host_table(hosts, memory, width))
    return [line.split() for line in console.export_text().splitlines()]


def test_the_console_shows_each_machine() -> None:
    hosts = [
        HostUse("node 0", 1, {"offloaded": 40 * GIB, "asleep": 50 * GIB}),
        HostUse("nodes 1-2", 2, {"offloaded": GIB}),
    ]
    lines = printed(hosts, 80.0, 100)
    assert ["node", "0", "40.0", "50.0", "90.0", "10.0", "short"] in lines, lines
    assert ["nodes", "1-2", "1.0", "0.0", "1.0", "79.0", "left"] in lines, lines


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_table_of_hosts_is_never_clipped(width: int) -> None:
    """Every heading and number is complete at any width of the console."""
    names = ("offloaded", "swapped", "reference", "/dev/shm", "processes", "asleep", "samples", "checkpoint")
    hosts = [
        HostUse(f"nodes {number}-{number + 9}", 10, {name: (1000 + number) * GIB for name in names})
        for number in (0, 10, 20)
    ]
    words = {word for line in printed(hosts, 2048.0, width) for word in line}
    assert {*names, "1,020.0", "8,160.0", "2,048", "6,112.0"} <= words
    assert not any("…" in word for word in words)


def test_each_engine_rank_of_gpt_oss_collects_all_experts() -> None:
    """38 GB on each of 8 ranks, and 230 GB for gpt-oss-120b, on top of everything else."""
    small, large = (whole_expert_bytes("bfloat16", published.read(f"gpt-oss-{size}")) for size in ("20b", "120b"))
    of_expert = 3 * 2880 * 2880 + 3 * 2880  # gate, up and down projection with their biases
    assert (small, large) == (2 * 24 * 32 * of_expert, 2 * 36 * 128 * of_expert)
    assert whole_expert_bytes("bfloat16", published.read("Qwen3.5-35B-A3B")) == 0
    settings = recipe(weight_sync__route="sharded")
    occupants = Occupants(settings, [stage(0)], {"rollout": ENGINE}, {}, GIB, False, small)
    hosts = hosts_of(occupants, DEVICE)
    assert [host.parts.get("whole experts") for host in hosts] == [4 * small, None]  # engines fill the first machine
    (refusal,) = host_refusals(hosts, 100.0)
    assert refusal.key == "cluster.placement" and "whole experts" in refusal.problem
    full = replace(occupants, recipe=recipe(weight_sync__route="full"))
    assert all("whole experts" not in host.parts for host in hosts_of(full, DEVICE))
