"""Seconds of trainers, engines and links, worked out by hand for round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.commands.plan.count.types import Links
from megarl.commands.plan.time import trainers as training
from megarl.commands.plan.time.cost import Cost, all_to_all_seconds, host_seconds, ring_seconds, send_seconds
from megarl.commands.plan.time.engines import Engines, generate, read, room
from megarl.commands.plan.time.estimate import estimate
from megarl.commands.plan.time.lengths import Lengths, MicroBatches, micro_batches
from megarl.commands.plan.time.trainers import Passes, Trainers, update_passes
from megarl.commands.plan.time.weight_sync import export_host_seconds, moved, uncounted, weight_sync_cost
from megarl.engines.base import EngineLimits
from megarl.platform.device_table import device_named
from megarl.recipe.schema import Recipe
from tests.support.estimate_cases import DENSE, DEVICE, QWEN, SPARSE, rank, recipe

BATCH = MicroBatches(count=3, tokens=1000, pairs=50_000)
WEIGHTS, PAIRS, OUTPUT = (
    2 * 1600 * 1000,
    2 * 4 * 4 * 50_000,
    2 * 1000 * 1000,
)  # FLOPs of a forward pass over a micro batch


def trainers(count: int = 1, shape: Any = DENSE, output: bool = True, **settings: Any) -> Trainers:
    return Trainers(recipe(cluster__trainers=count, **settings), shape, DEVICE, output)


# --- lengths -------------------------------------------------------------------------------------------------------


def test_responses_are_spread_around_their_mean() -> None:
    lengths = Lengths.around(prompt=5, mean=30, limit=40, assumed="")
    assert (lengths.shortest, lengths.longest, lengths.response, lengths.tokens) == (20, 40, 30, 35)
    assert Lengths.around(5, 3, 40, "").longest == 5, "as far below as above, down to one token"
    drawn = np.linspace(20, 40, 100_001)
    assert lengths.age == pytest.approx(float((drawn**2).mean() / 2 / drawn.mean()), rel=1e-4)
    assert [lengths.longer(tokens) for tokens in (0, 20, 35, 40)] == [1, 1, 0.25, 0]
    assert lengths.samples(4).tolist() == [28, 32, 38, 42] and lengths.samples(4).mean() == 35


def test_an_impossible_mean_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a mean response of 2000 tokens is not between 1 and rollout.max_response_l"):
        Lengths.of(Recipe(), 2000)


def test_micro_batches_equal_the_schedulers() -> None:
    equal = Lengths(prompt=100, shortest=300, longest=300, assumed="")
    run_recipe = recipe(actor__max_tokens_per_micro_batch=1000)
    result = micro_batches(
        run_recipe, DENSE, equal, samples=20, data_parallel=2
    )  # 10 of 400 tokens each, two to a micro batch
    assert result == MicroBatches(5, 800, 2 * 400 * 401 / 2)
    run_recipe.megatron.virtual_pipeline, run_recipe.megatron.pipeline_parallel = 2, 4
    assert micro_batches(run_recipe, DENSE, equal, 20, 2).count == 8, "a multiple of the stages"
    many = micro_batches(recipe(actor__max_tokens_per_micro_batch=1000), DENSE, equal, 6000, 2)
    assert (many.count, many.tokens) == (1500, 800), "3,000 samples as 256 are laid out"


def test_padding_is_computed_and_groups_stay_together() -> None:
    spread = Lengths(prompt=0, shortest=1, longest=399, assumed="")
    padded = recipe(actor__max_tokens_per_micro_batch=800, megatron__packing=False)
    packed = recipe(actor__max_tokens_per_micro_batch=800)
    assert (
        micro_batches(packed, DENSE, spread, 32, 1).tokens * micro_batches(packed, DENSE, spread, 32, 1).count == 6400
    )
    result = micro_batches(padded, DENSE, spread, 32, 1)
    assert result.tokens * result.count > 6500
    pairs = recipe(train__source="preferences", algorithm__loss="dpo", algorithm__advantage="none")
    pairs.actor.max_tokens_per_micro_batch, equal = 300, Lengths(0, 200, 200, "")
    assert micro_batches(pairs, DENSE, equal, 8, 1) == MicroBatches(4, 400, 2 * 200 * 201 / 2)
    result = estimate(pairs, {"rollout": QWEN}, device_named("H100"), lengths=equal)
    assert (result.micro_batches, result.tokens_per_micro_batch, result.tokens) == (32, 400, 64 * 200)


# --- links ---------------------------------------------------------------------------------------------------------


def test_seconds_of_rings_all_to_alls_and_sends() -> None:
    assert ring_seconds(DEVICE, 1e9, 1) == 0
    assert ring_seconds(DEVICE, 1e9, 4) == pytest.approx(0.75), "three quarters of it, at 1e9"
    assert ring_seconds(DEVICE, 1e9, 4, stride=4) == pytest.approx(7.5), "one member a node: one port"
    assert ring_seconds(DEVICE, 1e9, 4, stride=2) == pytest.approx(3.75), "two members a node: two ports"
    assert all_to_all_seconds(DEVICE, 1e9, 4) == pytest.approx(0.75)
    assert all_to_all_seconds(DEVICE, 1e9, 8) == pytest.approx(5.0), "half of it to the other node, at 1e8"
    assert send_seconds(DEVICE, 1e9, 1) == 1 and send_seconds(DEVICE, 1e9, 4) == 10 and host_seconds(DEVICE, 1e9) == 1


def test_a_group_in_a_full_mesh_has_its_links_only() -> None:
    """Atlas A2: n devices have (n - 1) / 7 of 196 GB/s; 70 % of it is reached."""
    a2 = device_named("910B")
    rings = [1e3 * ring_seconds(a2, 1e9, members) for members in (2, 4, 8)]
    assert rings == pytest.approx([25.51, 12.76, 6.378], rel=1e-3), "ms a GB"
    assert ring_seconds(a2, 1e9, 4, stride=2) == ring_seconds(a2, 1e9, 4)
    assert all_to_all_seconds(a2, 1e9, 4) == pytest.approx(1e9 / 4 / 19.6e9), "a quarter to each over its link"
    assert send_seconds(a2, 1e9, 1) == send_seconds(a2, 1e9, 7) == pytest.approx(1e9 / 19.6e9)
    between = ring_seconds(a2, 1e9, 16)
    assert between == pytest.approx(15 / 16 * 1e9 / (196e9 * 0.7)), "8 ports of 25 GB/s, 7 links of 28"
    assert ring_seconds(a2, 1e9, 4, stride=4) == pytest.approx(3 / 4 * 1e9 / 19.6e9), "2 ports, 1 link"
    assert ring_seconds(a2, 1e9, 2, stride=8) == pytest.approx(1e9 / 2 / 17.5e9), "1 port"


def test_the_meshes_of_a_machine_are_joined_by_pcie() -> None:
    box16 = replace(device_named("910B"), per_node=16)
    pcie = 64e9 * 0.7
    assert ring_seconds(box16, 1e9, 8) == ring_seconds(device_named("910B"), 1e9, 8)
    assert ring_seconds(box16, 1e9, 16) == pytest.approx(15 / 16 * 1e9 / pcie)
    assert all_to_all_seconds(box16, 1e9, 16) == pytest.approx(8 / 16 * 1e9 / pcie), "half to the other mesh"
    assert send_seconds(box16, 1e9, 8) == pytest.approx(1e9 / pcie)


@pytest.mark.parametrize("name", ["910C", "H100"])
def test_groups_behind_a_switch_have_the_whole_link(name: str) -> None:
    device = device_named(name)
    rate = device.link * device.link_share
    for members in (2, 4, 8):
        assert ring_seconds(device, 1e9, members) == pytest.approx((members - 1) / members * 1e9 / rate)
        assert all_to_all_seconds(device, 1e9, members) == pytest.approx((members - 1) / members * 1e9 / rate)
    assert send_seconds(device, 1e9, 1) == pytest.approx(1e9 / rate)


def test_the_bound_is_the_largest_part() -> None:
    cost = Cost(compute=1, links=2) * 2 + Cost(host=3)
    assert (cost.seconds, cost.bound, cost.parts) == (9, "links between devices", {"compute": 2, "links": 4, "host": 3})


# --- trainers ------------------------------------------------------------------------------------------------------


def test_a_forward_pass() -> None:
    phase = training.forward(trainers(), BATCH, mini_batches=2)
    assert phase == Cost(compute=pytest.approx(6 * (WEIGHTS + PAIRS + OUTPUT) / 1e12))
    critic = training.forward(trainers(output=False), BATCH, mini_batches=2)
    assert critic.compute == pytest.approx(6 * (WEIGHTS + PAIRS) / 1e12), "a critic has no output layer"


def test_a_pipeline_waits_while_it_fills_and_drains() -> None:
    piped = trainers(2, megatron__pipeline_parallel=2)
    each = (WEIGHTS / 2 + PAIRS / 2 + OUTPUT) / 1e12  # the last stage, which has the output layer
    transfer = 1000 * 10 * 2 / 1e9
    phase = training.forward(piped, BATCH, mini_batches=1)
    assert phase.parts == pytest.approx({"compute": 3 * each, "links": 3 * transfer, "bubble": each + transfer})
    assert training.bubble(piped, BATCH) == pytest.approx(1 / 4)
    chunks = trainers(2, megatron__pipeline_parallel=2, megatron__virtual_pipeline=2)
    assert training.bubble(chunks, BATCH) == pytest.approx(1 / 7)
    assert training.forward(chunks, BATCH, 1).bubble == pytest.approx((each + 2 * transfer) / 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"megatron__keep_logits": True}, Passes(3, 3, 3, 2, 3, 2)),
        ({}, Passes(3, 3, 4, 2, 3, 2)),
        ({"megatron__recompute": "selective"}, Passes(3, 4, 4, 2, 3, 2)),
        ({"megatron__recompute": "full"}, Passes(4, 4, 4, 3, 4, 2)),
        ({"lora__rank": 8, "megatron__keep_logits": True}, Passes(2, 3, 2, 2, 3, 2)),
    ],
)
def test_passes_of_an_update(settings: dict[str, Any], expected: Passes) -> None:
    assert update_passes(recipe(**settings)) == expected


def test_an_update_includes_its_optimizer_step() -> None:
    alone = training.update(trainers(), BATCH, mini_batches=2)
    assert alone.compute == pytest.approx(6 * (3 * WEIGHTS + 3 * PAIRS + 4 * OUTPUT) / 1e12)
    parameters = 4 * 400 + 2 * 1000
    assert alone.memory == pytest.approx(2 * parameters * (4 + 24 + 2) / 1e9), "Adam reads and writes 30 bytes each"
    shared = training.update(trainers(4), BATCH, mini_batches=1)
    assert shared.memory == pytest.approx(parameters / 4 * 30 / 1e9), "each of four updates its share"
    assert shared.links == pytest.approx(parameters * (4 + 2) * 3 / 4 / 1e9), "gradients are summed, weights gathered"
    swapped = training.update(trainers(megatron__extra={"swap_optimizer": True}), BATCH, 1)
    assert swapped.host == pytest.approx(2 * 12 * parameters / 1e9)


def test_tensor_parallel_ranks_exchange_activations() -> None:
    cut = training.forward(trainers(2, megatron__tensor_parallel=2), BATCH, 1)
    assert cut.compute == pytest.approx(3 * (WEIGHTS + PAIRS + OUTPUT) / 2 / 1e12)
    assert cut.links == pytest.approx(3 * 4 * 4 * (1000 * 10 * 2 / 2) / 1e9), "four halves a layer, of 20,000 bytes"


def test_tokens_are_sent_to_their_experts_and_back() -> None:
    spread = training.forward(trainers(4, SPARSE, megatron__expert_parallel=4), BATCH, 1)
    sent = 1000 * 10 * 2 * 2  # to two experts each
    assert spread.links == pytest.approx(3 * 4 * 2 * sent * 3 / 4 / 1e9)
    assert spread.compute == pytest.approx(3 * (2 * 1000 * (4 * (100 + 20 + 100) + 1000) + PAIRS) / 1e12)


def test_sparse_layers_exchange_activations_only_around_attention() -> None:
    cut = training.forward(trainers(2, SPARSE, megatron__tensor_parallel=2), BATCH, 1)
    assert cut.links == pytest.approx(3 * 4 * 2 * (1000 * 10 * 2 / 2) / 1e9)
    within = training.forward(trainers(2, SPARSE, megatron__expert_tensor_parallel=2), BATCH, 1)
    assert within.links == pytest.approx(3 * 4 * 2 * (1000 * 10 * 2 * 2 * 2 / 2) / 1e9), (
        "gathered and summed in experts"
    )


def test_context_parallel_ranks_exchange_keys_and_values() -> None:
    cut = training.forward(trainers(2, megatron__context_parallel=2), BATCH, 1)
    assert cut.links == pytest.approx(3 * 4 * (1000 * 8 * 2 / 2) / 1e9)
    assert cut.compute == pytest.approx(3 * (WEIGHTS + PAIRS + OUTPUT) / 2 / 1e12)


def test_without_a_distributed_optimizer_every_rank_updates_all_parameters() -> None:
    parameters = 4 * 400 + 2 * 1000
    phase = training.update(trainers(2, megatron__distributed_optimizer=False), BATCH, 1)
    assert phase.memory == pytest.approx(parameters * 30 / 1e9)
    assert phase.links == pytest.approx(parameters * (4 + 4) / 2 / 1e9), "an all-reduce of gradients in float32"


def test_the_reference_pass_swaps_weights_through_the_host() -> None:
    assert training.reference_swap(trainers()).host == pytest.approx(4 * 2 * (4 * 400 + 2 * 1000) / 1e9)
    assert training.reference_swap(trainers(lora__rank=8)) == Cost()


# --- engines -------------------------------------------------------------------------------------------------------


def engines(shape: Any = DENSE, **fields: Any) -> Engines:
    return Engines(shape, DEVICE, **{"count": 1, "tensor": 1, **fields})


SAME = Lengths(prompt=10, shortest=100, longest=100, assumed="")


def test_decoding_reads_weights_and_cache_in_every_step() -> None:
    """All sequences begin and end together: 100 steps of 5 sequences with caches of 10 to 110 tokens."""
    phase = generate(engines(), SAME, prompts=1, samples=5)
    step = 2 * (4 * 400 + 1000) + 5 * 60 * (4 * 8 * 2)  # weights but the embedding; caches of 60 tokens in the mean
    assert phase.memory == pytest.approx(100 * step / 1e9)
    assert phase.compute == pytest.approx((2 * 1600 * 10 + 2 * 4 * 4 * 55) / 1e12), (
        "the prompt once, without an output layer"
    )
    apart = generate(engines(prefix=False), SAME, 1, 5)
    assert apart.compute == pytest.approx(5 * phase.compute)


def test_sequences_above_the_engines_limit_run_in_waves() -> None:
    single, three = (generate(engines(sequences=5), SAME, 1, count) for count in (5, 15))
    assert three.memory == pytest.approx(3 * single.memory)


def test_the_longest_response_determines_the_end() -> None:
    """With the same total of tokens and one response of twice the mean length, weights are read for twice as many steps
    and caches are longer."""
    spread = Lengths(10, 1, 199, "")
    same, longer = (generate(engines(), lengths, 1, 5) for lengths in (SAME, spread))
    weights, cached = 99 * 2 * (4 * 400 + 1000), 5 * (spread.age - SAME.age) * 100 * 64
    assert longer.memory - same.memory == pytest.approx((weights + cached) / 1e9, rel=0.01)


def test_experts_without_tokens_are_not_read() -> None:
    single, many = (generate(engines(SPARSE), SAME, 1, count) for count in (1, 60))
    cache = 100 * 60 * 4 * 8 * 2
    rest = 2 * (4 * 120 + 1000)
    assert single.memory == pytest.approx((100 * (rest + 2 * 4 * 8 * 50 * (1 - 0.75)) + cache) / 1e9), (
        "a quarter of them"
    )
    assert many.memory == pytest.approx((100 * (rest + 2 * 4 * 8 * 50) + 60 * cache) / 1e9, rel=1e-4), "all of them"


def test_experts_of_an_engine_group_serve_the_tokens_of_all_its_engines() -> None:
    alone, group = (generate(engines(SPARSE, count=4, group=n, spread=n > 1), SAME, 4, 1) for n in (1, 4))
    saved = alone.memory - group.memory
    assert saved == pytest.approx(100 * 2 * 1600 * (0.25 - (1 - 0.75**4) / 4) / 1e9)
    assert group.links == pytest.approx(2 * 4 * (10 * 2 * 2) * 3 / 4 / 1e9 * (100 + 10))


def test_tensor_parallel_engines_sum_after_attention_and_mlp() -> None:
    phase = generate(engines(tensor=2), SAME, 1, 5)
    assert phase.links == pytest.approx(4 * 4 * (10 * 2 / 2) / 1e9 * (5 * 100 + 10))


def test_a_wide_batch_is_bound_by_compute() -> None:
    slow = engines(sequences=1e9)
    slow = replace(slow, device=replace(DEVICE, flops=2e9))
    assert generate(slow, SAME, 1, 100).bound == "compute"


def test_the_cache_limits_concurrent_sequences() -> None:
    small = engines()
    memory = 1.0 * 2**30 * 64  # of a device with 64 GiB
    big = replace(small, device=replace(DEVICE, memory=64))
    left = memory * 0.5 - 2 * (1600 + 2000) - 4 * 2**30
    token = 4 * 8 * 2
    wide = EngineLimits(1, 10**9, 0.5, "", True)
    assert room(big, SAME, wide) == pytest.approx(left / token / 110)
    assert room(big, SAME, replace(wide, sequences=64)) == 64
    assert room(small, SAME, wide) == 1, "an engine without room for one sequence is refused by another check"
    assert room(small, SAME, replace(wide, sequences=256), rank(cache=10**9)) == 256, "the counted cache has precedence"
    assert room(small, SAME, wide, rank(cache=110 * 1000 * 7)) == 7
    assert room(small, SAME, replace(wide, cache=110 * token * 7)) == 7, "as given outright"
    assert room(small, SAME, replace(wide, share=None, sequences=9)) == 9, (
        "an engine that determines its share at run time"
    )


@pytest.mark.parametrize(
    ("engine", "arguments", "sequences"),
    [
        ("vllm", {}, 128),
        ("vllm", {"max_num_seqs": 3}, 3),
        ("sglang", {}, 256),
        ("sglang", {"max_running_requests": 5, "max_num_seqs": 7}, 5),
    ],
)
def test_the_limit_of_sequences_follows_each_engines_argument_and_default(
    engine: str, arguments: dict[str, Any], sequences: int
) -> None:
    run_recipe = recipe(rollout__engine=engine, rollout__engine_args=arguments)
    phase = estimate(run_recipe, {"rollout": QWEN}, device_named("H100")).phases[0]
    assert f"; {sequences} sequences at a time" in phase.assumed


def test_a_teacher_reads_whole_samples() -> None:
    assert read(engines(count=2), 100, 6).compute == pytest.approx(6 / 2 * (2 * 1600 * 100 + 32 * 5050) / 1e12)


# --- weights -------------------------------------------------------------------------------------------------------


def test_weight_sync_sends_the_planned_bytes() -> None:
    sharded = Links("sharded", sent=1_000_000, received=4_000_000, total=16_000_000, between_nodes=4_000_000)
    phase = weight_sync_cost(trainers(), engines(), sharded)
    assert phase.parts == pytest.approx({"links": 4e6 / 5e7, "host": 5e6 / 1e9}), (
        "4 MB over the host's interface, 5 through the host"
    )
    two_nodes = weight_sync_cost(trainers(8, rollout__engines=8), engines(count=8), sharded)
    assert two_nodes.parts["links"] == pytest.approx(2e6 / 5e7), "two interfaces carry half each"
    apart = weight_sync_cost(trainers(weight_sync__transport="device"), engines(), sharded)
    assert apart.parts == pytest.approx({"links": 1e6 / 1e8 + 3e6 / 1e9}), (
        "the rest over links, and fingerprints meanwhile"
    )
    mapped = weight_sync_cost(trainers(weight_sync__transport="ipc"), engines(), sharded)
    assert mapped.parts == pytest.approx({"links": 4e6 / 5e7 + 3e6 / 1e9, "host": 1.25e6 / 1e9}), (
        "data within the node uses its links; a quarter goes to another node through the host"
    )
    meshed = replace(trainers(weight_sync__transport="ipc"), device=replace(DEVICE, mesh=4))
    assert weight_sync_cost(meshed, engines(), sharded).links == pytest.approx(4e6 / 5e7 + 3 * 3e6 / 1e9), (
        "a bucket goes over one of a mesh's three links"
    )
    whole = weight_sync_cost(trainers(2), engines(), None)
    size = 2 * (1600 + 2000)
    assert whole.parts == pytest.approx({"links": size / 2 / 1e9, "host": 2 * size / 1e9})


def test_without_a_plan_an_engine_rank_receives_its_share() -> None:
    """Two engines of two devices: each device has half of the dense weights; a node has four devices."""
    size = 2 * (1600 + 2000)
    near = uncounted(trainers(4), engines(count=2, tensor=2))
    assert (near.sent, near.received, near.total, near.between_nodes) == (size // 4, size // 2, 2 * size, 0)
    layout = trainers(2, cluster__placement="disaggregated", rollout__engines=2, rollout__tensor_parallel=2)
    assert uncounted(layout, engines(count=2, tensor=2)).between_nodes == 2 * size


def exported(**settings: Any) -> float:
    """Seconds over links, of 2 engines."""
    layout = trainers(2, rollout__engines=2, **settings)
    return weight_sync_cost(layout, engines(count=2), None).links


def test_disaggregated_engines_can_be_on_another_node() -> None:
    """A node has four devices. Its host receives a model once, however many engine ranks it has."""
    size = 2 * (1600 + 2000)
    near = exported(cluster__placement="disaggregated")
    assert exported(rollout__tensor_parallel=2) == near, "colocated, on the trainers' own devices"
    two_of_four = exported(cluster__placement="disaggregated", rollout__tensor_parallel=2)
    assert two_of_four == pytest.approx(near + size / 5e7)
    over_gloo = {"rollout__tensor_parallel": 2, "weight_sync__transport": "collective"}
    assert exported(cluster__placement="disaggregated", **over_gloo) == pytest.approx(near + 2 * size / 5e7)
    beside_critic = {"algorithm__advantage": "gae", "critic__trainers": 1}
    assert exported(cluster__placement="disaggregated", **beside_critic) == pytest.approx(near + size / 5e7)
    recipe = trainers(2, weight_sync__bucket_mb=1).recipe
    assert export_host_seconds(recipe.weight_sync, DEVICE, 1e6, first=0, count=4) == 0.0
    two_nodes = export_host_seconds(recipe.weight_sync, DEVICE, 1e6, first=0, count=12)
    assert two_nodes == pytest.approx((1e6 + 2**20) / 5e7), "the second begins a bucket later"


def test_on_a_cpu_offloading_takes_no_time() -> None:
    assert moved(trainers(2, megatron__offload=True, cluster__device="cpu")) == Cost()


def test_offloading_moves_weights_and_states() -> None:
    assert moved(trainers(megatron__offload=False)) == Cost()
    parameters = 1600 + 2000
    assert moved(trainers(2)) == moved(trainers(2, megatron__offload=True)), "unset, of colocated engines"
    assert moved(trainers(2, megatron__offload=True)).host == pytest.approx(parameters * (2 + 12 / 2) / 1e9)
