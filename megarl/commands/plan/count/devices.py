"""What lies on a device in each phase of a step, of all that a recipe puts there. Pure.

As `megarl/weight_sync/handover.py` and the trainers' `Offloader` do it: colocated, trainers, critic and engines take turns; who does not
compute sleeps, or leaves the device where `megatron.offload` says so, or stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

from megarl.algorithms.objective import runs_old_log_prob_pass, runs_reference_pass
from megarl.commands.plan.count.libraries import NOT_COUNTED, Libraries
from megarl.commands.plan.count.stages import Stage
from megarl.commands.plan.count.time_shared import leaves, takes_turns
from megarl.commands.plan.count.types import EngineRank, Place, Use
from megarl.hf.config import text_fields
from megarl.platform.memory import swapped_parts
from megarl.recipe.critic import critic_view
from megarl.recipe.exchange import planned_by_recipe
from megarl.recipe.schema import Recipe
from megarl.weight_sync.session import DEVICE_TRANSPORTS, FULL_SLOTS, RECEIVE_AHEAD, SHARDED_SLOTS, SUM_BYTES

ROLLOUT = "rollout"
EXCHANGED = "exchange buffers"


def swaps_of(recipe: Recipe) -> dict[str, int | None]:
    return {"actor": swapped_parts(recipe.megatron.extra), "critic": swapped_parts(recipe.critic.megatron.extra)}


def largest_tensor(recipe: Recipe, model: dict[str, Any]) -> int:
    """Bytes of the embedding, than which no tensor of a checkpoint is larger."""
    text = text_fields(model)
    return int(text["vocab_size"] * text["hidden_size"] * (4 if recipe.model.dtype == "float32" else 2))


def exchange_buffers(recipe: Recipe, largest: int) -> int:
    """Bytes that a trainer takes on its device to send weights. `largest`: of the model's largest tensor, which an export
    gathers in parts and joins.

    Exported: a bucket of tensors waits to be packed beside. Planned: a bucket is packed at a time; updates that are held
    to the export, the first among them, also make it, one tensor after the other. What buckets are packed into (`slots`)
    lies in the host's memory, unless the transport is of DEVICE_TRANSPORTS.
    """
    bucket, gathered = recipe.exchange.bucket_mb * 2**20, 2 * largest
    on_device = max(bucket, gathered) if planned_by_recipe(recipe) else bucket + gathered
    there = recipe.cluster.device == "cpu" or recipe.exchange.transport in DEVICE_TRANSPORTS
    sums = SUM_BYTES if recipe.exchange.transport == "ipc" else 0
    return on_device + sums + (slots(recipe, largest) if there else 0)


def slots(recipe: Recipe, largest: int) -> int:
    """Bytes that a trainer's buckets are packed into. Planned: each rank's own, and tensors are cut. Exported: those of
    rank 0, and a larger tensor has a bucket of its own."""
    bucket = recipe.exchange.bucket_mb * 2**20
    if planned_by_recipe(recipe):
        return SHARDED_SLOTS * bucket
    return FULL_SLOTS * max(bucket, largest)


@dataclass(frozen=True)
class Turns:
    """How those who share a device share it."""

    colocated: bool
    sleeps: bool  # engines give their memory away while others compute
    offload: dict[str, bool]  # role -> whether it leaves the device to others

    @classmethod
    def of(cls, recipe: Recipe) -> Turns:
        offload = {"actor": leaves(recipe), "critic": leaves(critic_view(recipe))}
        return cls(recipe.cluster.placement == "colocated", takes_turns(recipe), offload)


def places(
    recipe: Recipe,
    stages: list[Stage],
    engines: dict[str, EngineRank],
    *,
    swaps: dict[str, int | None],
    largest: int,
    unknown: Mapping[str, str] = MappingProxyType({}),
    libraries: Libraries = NOT_COUNTED,
) -> list[Place]:
    """`engines`: sections -> one device of an engine. `swaps`: role -> see `counts.phases`. `largest`: bytes of the model's
    largest tensor. `unknown`: sections -> what is not known of their engines; a cache that is not known counts as none."""
    turns, found = Turns.of(recipe), []
    on = _Device(recipe, turns, swaps, exchange_buffers(recipe, largest))
    policy = engines.get(ROLLOUT)
    for tenants, count in _together(recipe, stages, policy, turns):
        beside = unknown.get(ROLLOUT) if turns.colocated and (policy is None or policy in tenants) else None
        uses = _with_slots(recipe, tenants, _beside(on.uses(tenants), libraries.of(tenants)))
        found.append(Place(" + ".join(_name(one) for one in tenants), count, uses, beside))
    for section, engine in engines.items():
        if section == ROLLOUT and turns.colocated:
            continue
        uses = [Use("gen" if section == ROLLOUT else section, _sampling(engine))]
        if section == ROLLOUT:
            uses.append(Use("weight_exchange", {**_sampling(engine, steps=False), EXCHANGED: on.loading(engine)}))
            uses = _with_slots(recipe, [engine], _beside(uses, libraries.of([engine])))
        name = "engine" if section == ROLLOUT else section
        found.append(Place(name, engine.devices, uses, unknown.get(section)))
    return found


def _beside(uses: Iterable[Use], constant: Mapping[str, int]) -> list[Use]:
    """`uses` with what lies there in every phase."""
    return [Use(use.phase, {**use.parts, **constant}) for use in uses]


def _with_slots(recipe: Recipe, tenants: Sequence[Stage | EngineRank], uses: list[Use]) -> list[Use]:
    """`uses` with the slots of a transport of DEVICE_TRANSPORTS, which stay on the device between updates: of an actor's rank, and of
    an engine's, which may pass buckets on."""
    senders = sum(not isinstance(one, Stage) or one.role == "actor" for one in tenants)
    if recipe.exchange.transport not in DEVICE_TRANSPORTS or recipe.cluster.device == "cpu" or not senders:
        return uses
    kept = {EXCHANGED: senders * SHARDED_SLOTS * recipe.exchange.bucket_mb * 2**20}
    return [use if EXCHANGED in use.parts else Use(use.phase, {**use.parts, **kept}) for use in uses]


def _name(tenant: Stage | EngineRank) -> str:
    return f"{tenant.role} {tenant.number}" if isinstance(tenant, Stage) else "engine"


def _together(
    recipe: Recipe, stages: list[Stage], engine: EngineRank | None, turns: Turns
) -> Iterator[tuple[list[Stage | EngineRank], int]]:
    """Who is on the same devices, and how many these are. Ranks, of critic and engines too, lie on devices in their order."""
    by_role = {role: list(group) for role, group in groupby(stages, lambda stage: stage.role)}
    sizes = {"actor": recipe.cluster.trainers, "critic": recipe.critic.trainers}
    if not turns.colocated:
        for role, own in by_role.items():
            for stage in own:
                yield [stage], sizes[role] // len(own)
        return
    together: Counter[tuple[int, ...]] = Counter()
    for device in range(recipe.cluster.trainers):
        seats = [device * len(own) // sizes[role] if device < sizes[role] else -1 for role, own in by_role.items()]
        together[(*seats, int(engine is not None and device < engine.devices))] += 1
    for (*seats, has_engine), count in together.items():
        tenants: list[Stage | EngineRank] = [
            own[seat] for own, seat in zip(by_role.values(), seats, strict=True) if seat >= 0
        ]
        if has_engine and engine is not None:
            tenants.append(engine)
        yield tenants, count


@dataclass(frozen=True)
class _Device:
    """What one device holds in each phase."""

    recipe: Recipe
    turns: Turns
    swaps: dict[str, int | None]
    exchanged: int  # bytes that a trainer takes to send weights

    def uses(self, tenants: list[Stage | EngineRank]) -> Iterator[Use]:
        """In the order of a step."""
        stages = {one.role: one for one in tenants if isinstance(one, Stage)}
        engine = next((one for one in tenants if isinstance(one, EngineRank)), None)
        algorithm = self.recipe.algorithm
        if engine is not None:
            yield Use("gen", {**self._others(stages, ()), **_sampling(engine)})
        asleep = {} if engine is None or self.turns.sleeps else _sampling(engine, steps=False)
        if "critic" in stages:
            yield from self._computing(stages, "critic", ["values"], "update_critic", asleep)
        if "actor" in stages:
            passes = ["old_log_prob"] if runs_old_log_prob_pass(algorithm) else []
            passes += ["reference"] if runs_reference_pass(algorithm) else []
            yield from self._computing(stages, "actor", passes, "update_actor", asleep)
            if self.recipe.train.source == "rollout":
                yield Use("weight_exchange", self._exchange(stages, engine))

    def loading(self, engine: EngineRank) -> int:
        """Bytes that an engine takes beside its weights while new ones come: a layer that is laid out anew. Planned, a
        layer of each of the trainers' stages, whose buckets come in turns, and the bucket whose boxes are copied there; from
        device to device, those that are on their way, and those that it passes on; over IPC, the latter."""
        if not planned_by_recipe(self.recipe):
            return engine.largest
        buckets = {"device": RECEIVE_AHEAD + SHARDED_SLOTS, "ipc": SHARDED_SLOTS}.get(self.recipe.exchange.transport, 1)
        sums = SUM_BYTES if self.recipe.exchange.transport == "ipc" else 0
        buffers = self.recipe.exchange.bucket_mb * 2**20 * buckets + sums
        return engine.largest * self.recipe.megatron.pipeline_parallel + buffers

    def _computing(
        self, stages: dict[str, Stage], role: str, passes: list[str], update: str, asleep: dict[str, int]
    ) -> Iterator[Use]:
        """Without activations nothing is known of these phases but what is resident."""
        stage = stages[role]
        lies = {**self._others(stages, (role,)), **asleep, **self._resident(stage)}
        beyond = stage.activations
        if beyond is None:
            yield Use(update, lies)
            return
        states = stage.held.masters + stage.held.moments
        swaps = self.swaps.get(role)
        for name in passes:
            yield Use(name, {**lies, **_passing(beyond.forward, beyond.forward_logits)})
        yield Use(update, {**lies, **_passing(beyond.update, beyond.update_logits)})
        yield Use(f"{update}, Adam", {**lies, "Adam's step": states // swaps if swaps else beyond.optimizer})

    def _others(self, stages: dict[str, Stage], computing: tuple[str, ...]) -> dict[str, int]:
        """What those who do not compute have left there."""
        lies: dict[str, int] = {}
        for role, stage in stages.items():
            if role not in computing:
                left = {"buffers": stage.held.buffers} if self.turns.offload[role] else self._resident(stage)
                lies |= {f"{role}'s {part}": size for part, size in left.items()}
        return {part: size for part, size in lies.items() if size}

    def _resident(self, stage: Stage) -> dict[str, int]:
        held = stage.held
        states = 0 if self.swaps.get(stage.role) else held.masters + held.moments
        return {"weights": held.weights + held.buffers, "gradients": held.gradients, "optimizer": states}

    def _exchange(self, stages: dict[str, Stage], engine: EngineRank | None) -> dict[str, int]:
        stage = stages["actor"]
        if self.turns.offload["actor"]:  # the optimizer has left already
            lies = {"weights": stage.held.weights + stage.held.buffers}
        else:
            lies = self._resident(stage)
        lies = {**self._others(stages, ("actor",)), **lies, EXCHANGED: self.exchanged}
        if engine is None:
            return lies
        lies[EXCHANGED] += self.loading(engine)
        cache = {} if self.turns.sleeps else {"KV cache": engine.cache or 0}
        return {**lies, "engine weights": engine.weights, **cache}


def _passing(whole: int, logits: int) -> dict[str, int]:
    return {"activations": whole - logits, "logits": logits}


def _sampling(engine: EngineRank, *, steps: bool = True) -> dict[str, int]:
    own = {"engine weights": engine.weights, "KV cache": engine.cache or 0}
    return {**own, "engine's step": engine.working} if steps else own
