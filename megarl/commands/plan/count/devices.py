"""Memory of each kind of device in each phase of a step, summed over everything that shares the device. Pure.

Follows `megarl/weight_sync/placement.py` and the trainers' `Offloader`: colocated trainers, critic and engines
time-share devices. Idle engines sleep; idle trainers offload if `megatron.offload` is set, else they stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

from megarl.algorithms.objective import runs_old_log_prob_pass, runs_reference_pass
from megarl.commands.plan.count.engines import Engine
from megarl.commands.plan.count.libraries import NOT_COUNTED, Libraries
from megarl.commands.plan.count.types import DeviceUses, EngineRank, PipelineStage, Refusal, Use
from megarl.commands.plan.count.workload import is_time_shared, trainers_offload
from megarl.commands.plan.show.units import GIB, Unit
from megarl.hf.config import text_fields
from megarl.hf.shape import whole_experts
from megarl.platform.adaptor import swapped_parts
from megarl.platform.kinds import is_accelerator
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.derived.weight_sync_route import is_sharded
from megarl.recipe.schema import Recipe
from megarl.weight_sync.session import DEVICE_TRANSPORTS, FULL_SLOTS, RECEIVE_AHEAD, SHARDED_SLOTS, SUM_BYTES

ROLLOUT = "rollout"
BUFFERS = "weight-sync buffers"
_ENGINE_PARTS = _WEIGHTS, _CACHE, _STEP = "engine weights", "KV cache", "engine's step"
_REMEDY = "change it, or the layout; megarl plan --search looks for layouts that fit"


def swaps_of(recipe: Recipe) -> dict[str, int | None]:
    return {"actor": swapped_parts(recipe.megatron.extra), "critic": swapped_parts(recipe.critic.megatron.extra)}


def largest_tensor(dtype: str, model: dict[str, Any]) -> int:
    """Return the bytes of the embedding: no tensor of a checkpoint is larger."""
    text = text_fields(model)
    return int(text["vocab_size"] * text["hidden_size"] * _element_size(dtype))


def whole_expert_bytes(dtype: str, model: dict[str, Any]) -> int:
    """Return the bytes of the experts that each engine rank collects whole during a sharded update; 0 for most models."""
    return whole_experts(model) * _element_size(dtype)


def _element_size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def weight_sync_buffers(recipe: Recipe, largest: int) -> int:
    """Return the device memory that a trainer needs to send weights, in bytes.

    `largest`: bytes of the model's largest tensor, which an export gathers in parts and joins. Full sync: a bucket of
    tensors waits to be packed meanwhile. Sharded sync: one bucket is packed at a time, and updates that are verified
    against an export (the first one among them) also gather one tensor at a time. Packed buckets (`slots`) are in host
    memory, except for the transports in DEVICE_TRANSPORTS.
    """
    bucket, gathered = recipe.weight_sync.bucket_mb * 2**20, 2 * largest
    on_device = max(bucket, gathered) if is_sharded(recipe) else bucket + gathered
    slots_on_device = not is_accelerator(recipe.cluster.device) or recipe.weight_sync.transport in DEVICE_TRANSPORTS
    sums = SUM_BYTES if recipe.weight_sync.transport == "ipc" else 0
    return on_device + sums + (slots(recipe, largest) if slots_on_device else 0)


def slots(recipe: Recipe, largest: int) -> int:
    """Return the bytes of a trainer's packed buckets. Sharded sync: on each rank; tensors are cut to fit. Full sync: on
    rank 0; a tensor above the bucket size gets a bucket as large as itself."""
    bucket = recipe.weight_sync.bucket_mb * 2**20
    if is_sharded(recipe):
        return SHARDED_SLOTS * bucket
    return FULL_SLOTS * max(bucket, largest)


@dataclass(frozen=True)
class Occupants:
    """The processes on all devices, in the order in which they fill machines. `engines`: section -> one engine device."""

    recipe: Recipe
    stages: list[PipelineStage]
    engines: Mapping[str, EngineRank]
    swaps: Mapping[str, int | None]
    largest: int  # bytes of the model's largest tensor
    keeps_weights: bool  # sleeping engines of this kind of device copy their weights to the host
    whole_experts: int = 0  # bytes that each engine rank collects on the host during a sharded update


@dataclass(frozen=True)
class TimeSharing:
    """Time-sharing of devices between trainers, critic and engines."""

    colocated: bool
    sleeps: bool  # engines free their memory while trainers compute
    offload: dict[str, bool]  # role -> it offloads while others use the device

    @classmethod
    def of(cls, recipe: Recipe) -> TimeSharing:
        offload = {"actor": trainers_offload(recipe), "critic": trainers_offload(critic_view(recipe))}
        return cls(recipe.cluster.placement == "colocated", is_time_shared(recipe.cluster), offload)


def places(
    occupants: Occupants,
    *,
    unknown: Mapping[str, str] = MappingProxyType({}),
    libraries: Libraries = NOT_COUNTED,
) -> list[DeviceUses]:
    """Return each kind of device with its memory by phase.

    `unknown`: section -> why its engines' memory is incomplete; an unknown KV cache counts as 0.
    """
    recipe, engines = occupants.recipe, occupants.engines
    sharing, result = TimeSharing.of(recipe), []
    on = _Device(recipe, sharing, occupants.swaps, weight_sync_buffers(recipe, occupants.largest))
    policy = engines.get(ROLLOUT)
    for together, count in _together(recipe, occupants.stages, policy, sharing):
        not_counted = unknown.get(ROLLOUT) if sharing.colocated and (policy is None or policy in together) else None
        uses = _with_slots(recipe, together, _with_constant(on.uses(together), libraries.of(together)))
        result.append(DeviceUses(" + ".join(occupant.name for occupant in together), count, uses, not_counted))
    for section, engine in engines.items():
        if section == ROLLOUT and sharing.colocated:
            continue
        uses = [Use("gen" if section == ROLLOUT else section, _sampling(engine))]
        if section == ROLLOUT:
            uses.append(Use("weight_sync", {**_sampling(engine, steps=False), BUFFERS: on.loading(engine)}))
            uses = _with_slots(recipe, [engine], _with_constant(uses, libraries.of([engine])))
        name = "engine" if section == ROLLOUT else section
        result.append(DeviceUses(name, engine.devices, uses, unknown.get(section)))
    return result


def _with_constant(uses: Iterable[Use], constant: Mapping[str, int]) -> list[Use]:
    """Add parts that take the same memory in every phase."""
    return [Use(use.phase, {**use.parts, **constant}) for use in uses]


def _with_slots(recipe: Recipe, occupants: Sequence[PipelineStage | EngineRank], uses: list[Use]) -> list[Use]:
    """Add the packed buckets of a transport in DEVICE_TRANSPORTS, which stay allocated between updates: on actor ranks, and on
    engine ranks, which may relay buckets."""
    senders = sum(not isinstance(occupant, PipelineStage) or occupant.role == "actor" for occupant in occupants)
    if (
        recipe.weight_sync.transport not in DEVICE_TRANSPORTS
        or not is_accelerator(recipe.cluster.device)
        or not senders
    ):
        return uses
    kept = {BUFFERS: senders * SHARDED_SLOTS * recipe.weight_sync.bucket_mb * 2**20}
    return [use if BUFFERS in use.parts else Use(use.phase, {**use.parts, **kept}) for use in uses]


def _together(
    recipe: Recipe, stages: list[PipelineStage], engine: EngineRank | None, sharing: TimeSharing
) -> Iterator[tuple[list[PipelineStage | EngineRank], int]]:
    """Group the occupants that share a device: (occupants, number of such devices). Ranks fill devices in their order."""
    by_role = {role: list(group) for role, group in groupby(stages, lambda stage: stage.role)}
    sizes = {"actor": recipe.cluster.trainers, "critic": recipe.critic.trainers}
    if not sharing.colocated:
        for role, stages_of_role in by_role.items():
            for stage in stages_of_role:
                yield [stage], sizes[role] // len(stages_of_role)
        return
    together: Counter[tuple[int, ...]] = Counter()
    for device in range(recipe.cluster.trainers):
        numbers = [
            device * len(stages_of_role) // sizes[role] if device < sizes[role] else -1
            for role, stages_of_role in by_role.items()
        ]
        together[(*numbers, int(engine is not None and device < engine.devices))] += 1
    for (*numbers, has_engine), count in together.items():
        occupants: list[PipelineStage | EngineRank] = [
            stages_of_role[number]
            for stages_of_role, number in zip(by_role.values(), numbers, strict=True)
            if number >= 0
        ]
        if has_engine and engine is not None:
            occupants.append(engine)
        yield occupants, count


@dataclass(frozen=True)
class _Device:
    """Computes the memory of one device in each phase."""

    recipe: Recipe
    sharing: TimeSharing
    swaps: Mapping[str, int | None]
    buffers: int  # bytes of a trainer's weight-sync buffers

    def uses(self, occupants: list[PipelineStage | EngineRank]) -> Iterator[Use]:
        """Yield the memory of each phase, in the order of a step."""
        stages = {occupant.role: occupant for occupant in occupants if isinstance(occupant, PipelineStage)}
        engine = next((occupant for occupant in occupants if isinstance(occupant, EngineRank)), None)
        algorithm = self.recipe.algorithm
        if engine is not None:
            yield Use("gen", {**self._others(stages, ()), **_sampling(engine)})
        asleep = {} if engine is None or self.sharing.sleeps else _sampling(engine, steps=False)
        if "critic" in stages:
            yield from self._computing(stages, "critic", ["values"], "update_critic", asleep)
        if "actor" in stages:
            passes = ["old_log_prob"] if runs_old_log_prob_pass(algorithm) else []
            passes += ["reference"] if runs_reference_pass(algorithm) else []
            yield from self._computing(stages, "actor", passes, "update_actor", asleep)
            if self.recipe.train.source == "rollout":
                yield Use("weight_sync", self._weight_sync(stages, engine))

    def loading(self, engine: EngineRank) -> int:
        """Return the bytes that loading new weights takes on an engine's device.

        Full sync: one layer, which is laid out anew. Sharded sync: one layer per trainer pipeline stage, since their
        buckets arrive interleaved, plus the bucket being copied. With transport `device` also buckets in flight and
        relayed ones; with `ipc` relayed ones.
        """
        if not is_sharded(self.recipe):
            return engine.largest
        buckets = {"device": RECEIVE_AHEAD + SHARDED_SLOTS, "ipc": SHARDED_SLOTS}.get(
            self.recipe.weight_sync.transport, 1
        )
        sums = SUM_BYTES if self.recipe.weight_sync.transport == "ipc" else 0
        buffers = self.recipe.weight_sync.bucket_mb * 2**20 * buckets + sums
        return engine.largest * self.recipe.megatron.pipeline_parallel + buffers

    def _computing(
        self, stages: dict[str, PipelineStage], role: str, passes: list[str], update: str, asleep: dict[str, int]
    ) -> Iterator[Use]:
        """Yield the phases in which `role` computes. Without activations only resident memory is known."""
        stage = stages[role]
        occupied = {**self._others(stages, (role,)), **asleep, **self._resident(stage)}
        beyond = stage.activations
        if beyond is None:
            yield Use(update, occupied)
            return
        states = stage.held.masters + stage.held.moments
        swaps = self.swaps.get(role)
        for name in passes:
            yield Use(name, {**occupied, **_passing(beyond.forward, beyond.forward_logits)})
        yield Use(update, {**occupied, **_passing(beyond.update, beyond.update_logits)})
        yield Use(f"{update}, Adam", {**occupied, "Adam's step": states // swaps if swaps else beyond.optimizer})

    def _others(self, stages: dict[str, PipelineStage], computing: tuple[str, ...]) -> dict[str, int]:
        """Return the memory of trainers that do not compute now."""
        occupied: dict[str, int] = {}
        for role, stage in stages.items():
            if role not in computing:
                remaining = {"buffers": stage.held.buffers} if self.sharing.offload[role] else self._resident(stage)
                occupied |= {f"{role}'s {part}": size for part, size in remaining.items()}
        return {part: size for part, size in occupied.items() if size}

    def _resident(self, stage: PipelineStage) -> dict[str, int]:
        held = stage.held
        states = 0 if self.swaps.get(stage.role) else held.masters + held.moments
        return {"weights": held.weights + held.buffers, "gradients": held.gradients, "optimizer": states}

    def _weight_sync(self, stages: dict[str, PipelineStage], engine: EngineRank | None) -> dict[str, int]:
        stage = stages["actor"]
        if self.sharing.offload["actor"]:  # optimizer states are already offloaded
            occupied = {"weights": stage.held.weights + stage.held.buffers}
        else:
            occupied = self._resident(stage)
        occupied = {**self._others(stages, ("actor",)), **occupied, BUFFERS: self.buffers}
        if engine is None:
            return occupied
        occupied[BUFFERS] += self.loading(engine)
        cache = {} if self.sharing.sleeps else {_CACHE: engine.cache or 0}
        return {**occupied, _WEIGHTS: engine.weights, **cache}


def _passing(whole: int, logits: int) -> dict[str, int]:
    return {"activations": whole - logits, "logits": logits}


def _sampling(engine: EngineRank, *, steps: bool = True) -> dict[str, int]:
    parts = {_WEIGHTS: engine.weights, _CACHE: engine.cache or 0}
    return {**parts, _STEP: engine.working} if steps else parts


# --- refusals ------------------------------------------------------------------------------------


def too_large(places: list[DeviceUses], memory: float, engines: Iterable[Engine]) -> list[Refusal]:
    """Return a refusal for each place with a peak above `memory` GiB. `engines`: every engine that is in `places`."""
    refusals = []
    by_section = {engine.section: engine for engine in engines}
    for place in places:
        use = place.peak
        if use.total <= memory * GIB:
            continue
        unit = Unit.of(use.total)
        explanation = (
            f"{place.name} needs {unit.tenths(use.total)} {unit.name} in {use.phase}: {sum_of_parts(use.parts, unit)}; there are "
            f"{unit.whole(memory * GIB)}"
        )
        largest = max(use.parts, key=lambda part: use.parts[part])
        if use.phase == "gen" or largest in _ENGINE_PARTS:
            key, remedy = _engine_remedy(use, by_section.get(place.name, by_section.get(ROLLOUT)), memory)
        else:
            key, remedy = _key(use.phase, largest), _REMEDY
        refusals.append(Refusal(key, explanation, remedy))
    return refusals


def sum_of_parts(parts: Mapping[str, int], unit: Unit) -> str:
    """Format the parts, largest first, without those below 0.05: "weights 12.1 + gradients 12.1"."""
    by_size = sorted(parts.items(), key=lambda part: -part[1])
    return " + ".join(f"{name} {unit.tenths(size)}" for name, size in by_size if size / unit.size >= 0.05)


def _engine_remedy(use: Use, engine: Engine | None, memory: float) -> tuple[str, str]:
    """Return the recipe key and the remedy if engines are too large: let trainers leave the device, else reduce the KV cache,
    else cut the weights further."""
    stayed = {"actor": "megatron.offload", "critic": "critic.megatron.offload"}
    keys = [key for role, key in stayed.items() if use.phase == "gen" and f"{role}'s weights" in use.parts]
    if keys:
        settings = " and ".join(f"{key}=true" for key in keys)
        return keys[0], f"set {settings}: trainers then leave the device while engines sample"
    assert engine is not None
    device, limits, arguments = memory * GIB, engine.limits, f"{engine.section}.engine_args"
    weights, cache, step = (use.parts.get(part, 0) for part in _ENGINE_PARTS)
    room = device - (use.total - cache)
    if cache and room > 0 and limits.cache is not None:
        return f"{arguments}.kv_cache_memory_bytes", f"set it to {int(room)} or less"
    if cache and limits.cache is None:
        needed = weights + step if limits.covers_step else weights
        share = (room + needed) / device - 0.01
        if share * device > needed:
            return f"{arguments}.{limits.share_key}", f"set it to {share:.2f} or less"
    return (
        f"{engine.section}.tensor_parallel",
        f"raise it above {engine.spec.tensor_parallel}, so that each device has less of weights and cache",
    )


def _key(phase: str, largest: str) -> str:
    """Return the recipe key that controls the largest part of a phase."""
    role = "critic" if "critic" in phase else "actor"
    megatron = "critic.megatron" if role == "critic" else "megatron"
    if largest.startswith(("actor's", "critic's")):  # memory of an idle role that does not offload
        return "megatron.offload" if largest.startswith("actor") else "critic.megatron.offload"
    batch = f"{role}.max_tokens_per_micro_batch"
    keys = {"activations": batch, "logits": batch, BUFFERS: "weight_sync.bucket_mb"}
    return keys.get(largest, f"{megatron}.pipeline_parallel")
