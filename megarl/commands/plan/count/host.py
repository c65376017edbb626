"""Host memory of each machine: page-locked copies, sleeping engines, weight-sync buckets, processes. Pure.

Copies are allocated once and stay, so each machine has one number for the whole step; copies of a checkpoint being written
are included. Not counted: page cache, images of multi-modal samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import runs_reference_pass
from megarl.cluster.device_map import Demand
from megarl.commands.plan.count.devices import ROLLOUT, Occupants, TimeSharing, slots, sum_of_parts
from megarl.commands.plan.count.types import HostUse, PipelineStage, RankMemory, Refusal
from megarl.commands.plan.environment import device_kind
from megarl.commands.plan.show.units import GIB, Unit
from megarl.engines.specs import fixed_models
from megarl.engines.vllm.changing_weights import has_draft_weights
from megarl.errors import pluralize
from megarl.platform.device_table import Device
from megarl.platform.kinds import is_accelerator, kind_of
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.derived.lengths import longest_sample, samples_per_group
from megarl.recipe.derived.offload import copies_checkpoints
from megarl.recipe.derived.weight_sync_route import is_sharded, wants_adapters
from megarl.recipe.schema import ClusterConfig, Recipe
from megarl.weight_sync.session import HOST_MEMORY_TRANSPORTS, SHARDED_SLOTS

OFFLOADED, SWAPPED, REFERENCE = "offloaded", "swapped", "reference"
STAGED, EXPERTS = "next weights", "whole experts"
ASLEEP, SHARED_MEMORY, PROCESSES, SAMPLES = "asleep", "/dev/shm", "processes", "samples"
CHECKPOINT, OPTIMIZER, CRITIC_OPTIMIZER = "checkpoint", "optimizer", "critic's optimizer"
LEGEND = (
    "Host memory: offloaded (weights and optimizer states of trainers that leave their devices), swapped (optimizer states "
    "of swap_optimizer), reference (weights of the reference policy) and asleep (weights of sleeping engines) are "
    "page-locked, and page-locked memory comes in powers of two; optimizer (states and gradients of optimizer_cpu_offload); "
    "next weights (weights that wait for an engine's requests to finish, rollout.at_update=finish); whole experts (that each "
    "engine rank collects in an update, since vLLM's loader of the model needs whole tensors); "
    "/dev/shm (buckets of the weight sync); processes (assumed: device.process_memory each); samples of two steps; checkpoint (copies of what trainers "
    "write, if training continues meanwhile or actor and critic time-share devices)."
)
_BYTES_A_TOKEN = 64  # of a sample: token, log-probs, mask, advantages, positions; two copies (trainers, store)
_HOST_OPTIMIZER = "set it to false or lower optimizer_offload_fraction if the devices have room, or use more machines"
_REMEDIES = {
    OFFLOADED: ("megatron.offload", "set it to false if the devices have room, or spread the model over more machines"),
    SWAPPED: ("megatron.extra.swap_optimizer", "leave it out if the devices have room, or use more machines"),
    OPTIMIZER: ("actor.optimizer.extra.optimizer_cpu_offload", _HOST_OPTIMIZER),
    CRITIC_OPTIMIZER: ("critic.optimizer.extra.optimizer_cpu_offload", _HOST_OPTIMIZER),
    REFERENCE: (
        "algorithm.kl_coef",
        "set it to 0, which needs no reference policy, or spread the model over more machines",
    ),
    ASLEEP: (
        "rollout.tensor_parallel",
        "raise it, so that a machine has fewer copies of the model, or set cluster.placement=disaggregated",
    ),
    STAGED: ("rollout.at_update", "set drain, or refresh or keep where requests can continue, or use more machines"),
    EXPERTS: (
        "cluster.placement",
        "each engine rank collects the experts of all layers in an update: set disaggregated, so that the machines of engines "
        "hold no trainers, or use machines with fewer devices",
    ),
    SHARED_MEMORY: ("weight_sync.bucket_mb", "lower it"),
    SAMPLES: ("data.prompts_per_step", "lower it"),
    PROCESSES: ("cluster.trainers", "use fewer devices of each machine"),
    CHECKPOINT: (
        "train.save_in_background",
        "set it to false, use more machines, or, with a critic, set megatron.offload and critic.megatron.offload to false if the devices have room",
    ),
}


def hosts_of(occupants: Occupants, device: Device | None) -> list[HostUse]:
    """Return the host memory of each machine (`device.per_node` devices); equal neighbours are one entry. Empty without a
    device, and on a CPU, which has host memory only."""
    if device is None or not is_accelerator(occupants.recipe.cluster.device) or not occupants.stages:
        return []
    devices = _devices(occupants, round(device.process_memory * GIB))
    nodes = [_sum(devices[first : first + device.per_node]) for first in range(0, len(devices), device.per_node)]
    controller = {PROCESSES: round(device.process_memory * GIB), SAMPLES: _samples(occupants.recipe)}
    nodes[0] = _sum([nodes[0], controller])
    result, number = [], 0
    for parts, equal in groupby(nodes):
        count = len(list(equal))
        name = f"node {number}" if count == 1 else f"nodes {number}-{number + count - 1}"
        result.append(HostUse(name, count, {part: size for part, size in parts.items() if size}))
        number += count
    return result


def keeps_weights(cluster: ClusterConfig, device: Device | None) -> bool:
    """Return True if sleeping engines copy their weights to the host."""
    name = device_kind(cluster, device)
    return name is not None and kind_of(name).sleep_keeps_weights


def host_refusals(hosts: list[HostUse], memory: float) -> list[Refusal]:
    """A refusal for the fullest machine, if it needs more than `memory` GiB."""
    fullest = max(hosts, key=lambda host: host.total, default=None)
    if fullest is None or fullest.total <= memory * GIB:
        return []
    unit = Unit.of(fullest.total)
    largest = max(fullest.parts, key=lambda name: fullest.parts[name])
    copies = fullest.parts.get(CHECKPOINT, 0)
    key, remedy = _REMEDIES[CHECKPOINT if fullest.total - copies <= memory * GIB else largest]
    explanation = (
        f"the host of {fullest.name} needs {unit.tenths(fullest.total)} {unit.name}: {sum_of_parts(fullest.parts, unit)}; there are "
        f"{unit.whole(memory * GIB)}"
    )
    return [Refusal(key, explanation, f"{remedy}; --host-memory sets the memory of a machine")]


def _devices(occupants: Occupants, process: int) -> list[dict[str, int]]:
    """Return host memory by device. Trainers come first, then critic and engines, unless they share devices."""
    recipe, sharing = occupants.recipe, TimeSharing.of(occupants.recipe)
    samples, critic = recipe.train.source == "rollout", uses_critic(recipe.algorithm)
    demand = Demand.of(recipe, trainers=True, engines=samples, critic=critic, fixed=fixed_models(recipe))
    result: list[dict[str, int]] = [{} for _ in range(demand.devices)]

    def add_process(device: int, parts: Mapping[str, int]) -> None:
        result[device] = _sum([result[device], parts, {PROCESSES: process}])

    for role, first, ranks in (("actor", 0, demand.trainers), ("critic", demand.first_critic, demand.critics)):
        stages = [stage for stage in occupants.stages if stage.role == role]
        for rank in range(ranks):
            add_process(first + rank, _trainer(occupants, sharing, stages[rank * len(stages) // ranks], rank))
    for rank in range(demand.engine_devices):
        add_process(demand.first_engine + rank, _engine(occupants, sharing))
    for device in range(demand.devices - demand.fixed_devices, demand.devices):
        add_process(device, {})
    return result


def host_copies(role: str, held: RankMemory, *, offloads: bool, swaps: int | None, reference: bool) -> dict[str, int]:
    """Return the bytes that a trainer rank keeps on the host, by part.

    `offloads`: it leaves the device while engines use it. `swaps`: optimizer states are on the host and come to the device in
    this many parts. `reference`: the recipe has a reference policy. Copies stay allocated from their first use on.
    """
    parts = {}
    if offloads:
        parts[OFFLOADED] = held.weights_pinned + (0 if swaps else held.states_pinned)
    if swaps:
        parts[SWAPPED] = held.states_pinned
    if held.on_host:
        parts[OPTIMIZER if role == "actor" else CRITIC_OPTIMIZER] = held.on_host
    if role == "actor" and reference:
        parts[REFERENCE] = held.reference_pinned
    return parts


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in parts:
        total.update(each)
    return dict(total)


def _trainer(occupants: Occupants, sharing: TimeSharing, stage: PipelineStage, rank: int) -> dict[str, int]:
    parts = host_copies(
        stage.role,
        stage.held,
        offloads=sharing.offload[stage.role],
        swaps=occupants.swaps.get(stage.role),
        reference=runs_reference_pass(occupants.recipe.algorithm),
    )
    if _saves_a_copy(occupants.recipe, stage.role, rank):
        parts[CHECKPOINT] = stage.held.saved
    sends = (
        occupants.recipe.train.source == "rollout" and occupants.recipe.weight_sync.transport in HOST_MEMORY_TRANSPORTS
    )
    if stage.role == "actor" and sends and (rank == 0 or is_sharded(occupants.recipe)):
        parts[SHARED_MEMORY] = slots(occupants.recipe, occupants.largest)
    return parts


def _saves_a_copy(recipe: Recipe, role: str, rank: int) -> bool:
    """Return True if this rank copies a part of a checkpoint: every rank with a distributed optimizer, else the first
    replica."""
    train = recipe.train
    if not (train.save_every or train.save_at_end):
        return False
    if not copies_checkpoints(recipe, critic=uses_critic(recipe.algorithm)):
        return False
    view = recipe if role == "actor" else critic_view(recipe)
    megatron = view.megatron
    if megatron.distributed_optimizer:
        return True
    first = max(
        megatron.tensor_parallel * megatron.context_parallel,
        megatron.expert_parallel * (megatron.expert_tensor_parallel or 1),
    )
    return rank % (view.cluster.trainers // megatron.pipeline_parallel) < first


def _engine(occupants: Occupants, sharing: TimeSharing) -> dict[str, int]:
    recipe, rank, parts = occupants.recipe, occupants.engines.get(ROLLOUT), {}
    keeps = occupants.keeps_weights or wants_adapters(recipe) or has_draft_weights(recipe.rollout.engine_args)
    if rank is not None and sharing.sleeps and keeps:
        parts[ASLEEP] = rank.asleep
    if rank is not None and update_rule(recipe) == "finish" and is_sharded(recipe):
        parts[STAGED] = rank.received
    if occupants.whole_experts and is_sharded(recipe):
        parts[EXPERTS] = occupants.whole_experts
    if is_sharded(recipe) and recipe.weight_sync.transport in HOST_MEMORY_TRANSPORTS:  # ranks that relay buckets
        parts[SHARED_MEMORY] = SHARDED_SLOTS * recipe.weight_sync.bucket_mb * 2**20
    return parts


def _samples(recipe: Recipe) -> int:
    """Return the bytes of two steps' samples on the controller's machine, all of the longest length."""
    samples = recipe.data.prompts_per_step * samples_per_group(recipe)
    return 2 * samples * longest_sample(recipe) * _BYTES_A_TOKEN


def hosts_note(hosts: list[HostUse], memory: float) -> str:
    """Return the note below the table of hosts."""
    return f"{LEGEND} {pluralize(sum(host.nodes for host in hosts), 'machine')} of {memory:g} GiB."
