"""Which device of which machine each trainer and engine takes: arithmetic alone, no process is asked.

Trainers' ranks go machine by machine, and a tensor-parallel group stays in one where one is large enough.
An engine's devices lie in one machine. Both are placed at once: what engines take first, rank by rank,
would cut the trainers' machines to pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class FixedEngines:
    """Engines of a model that stays as it is, on devices of their own. `section`: the recipe's (teacher, judge);
    `tensor_parallel`: devices of an engine."""

    section: str
    engines: int
    tensor_parallel: int = 1

    @classmethod
    def of(cls, recipe: Recipe, section: str) -> FixedEngines:
        settings = getattr(recipe, section)
        return cls(section, settings.engines, settings.tensor_parallel)

    @property
    def devices(self) -> int:
        return self.engines * self.tensor_parallel

    def __str__(self) -> str:
        return (
            f"{self.section}.engines x {self.section}.tensor_parallel = {self.engines} x {self.tensor_parallel} "
            "(each engine in one machine)"
        )


@dataclass(frozen=True)
class Demand:
    """What a run places.

    trainers, engines: how many there are; 0 of what the command does not start.
    tensor_parallel: devices of an engine.
    trainer_block: neighbours in rank that should share a machine (megatron.tensor_parallel).
    critics, critic_block: the same of the critic.
    shared: engines, trainers and critic take turns on the same devices.
    fixed: engines of a teacher and of a judge, whose devices are always their own; started in this order.
    """

    trainers: int
    engines: int
    tensor_parallel: int = 1
    trainer_block: int = 1
    shared: bool = False
    critics: int = 0
    critic_block: int = 1
    fixed: tuple[FixedEngines, ...] = ()

    @classmethod
    def of(
        cls, recipe: Recipe, *, trainers: bool, engines: bool, critic: bool = False, fixed: Sequence[str] = ()
    ) -> Demand:
        """What `recipe` places, of trainers and engines those that are started at all. `fixed`: sections of the recipe
        that describe engines of fixed models."""
        return cls(
            trainers=recipe.cluster.trainers if trainers else 0,
            engines=recipe.rollout.engines if engines else 0,
            tensor_parallel=recipe.rollout.tensor_parallel,
            trainer_block=recipe.megatron.tensor_parallel,
            shared=trainers and recipe.cluster.placement == "colocated",
            critics=recipe.critic.trainers if critic else 0,
            critic_block=recipe.critic.megatron.tensor_parallel if critic else 1,
            fixed=tuple(FixedEngines.of(recipe, section) for section in fixed),
        )

    @property
    def engine_devices(self) -> int:
        return self.engines * self.tensor_parallel

    @property
    def fixed_devices(self) -> int:
        return sum(kind.devices for kind in self.fixed)

    @property
    def devices(self) -> int:
        """How many devices all of it takes."""
        apart = 0 if self.shared else self.critics + self.engine_devices
        return self.trainers + apart + self.fixed_devices

    def require_trainers_devices_suffice(self) -> None:
        """Raise ValueError where engines or critics that share the trainers' devices are more than these."""
        if self.shared and self.critics > self.trainers:
            raise ValueError(
                f"critic.trainers = {self.critics}, and a colocated critic has the trainers' devices alone: "
                f"cluster.trainers = {self.trainers}. Lower the former, raise cluster.trainers, or set "
                "cluster.placement=disaggregated."
            )
        if self.shared and self.engine_devices > self.trainers:
            raise ValueError(
                f"rollout.engines x rollout.tensor_parallel = {self.engines} x {self.tensor_parallel} = "
                f"{self.engine_devices} devices, and colocated engines have the trainers' alone: "
                f"cluster.trainers = {self.trainers}. Lower the former, raise cluster.trainers, or set "
                "cluster.placement=disaggregated."
            )

    def __str__(self) -> str:
        parts = []
        if self.trainers:
            parts.append(f"cluster.trainers = {self.trainers}")
            if self.trainer_block > 1:
                parts[0] += f" (each megatron.tensor_parallel = {self.trainer_block} of them in one machine)"
        if self.critics:
            parts.append(f"critic.trainers = {self.critics}{' (on the same devices)' if self.shared else ''}")
        if self.engines:
            parts.append(
                f"rollout.engines x rollout.tensor_parallel = {self.engines} x {self.tensor_parallel} "
                f"({'on the same devices, ' if self.shared else ''}each engine in one machine)"
            )
        parts += [str(kind) for kind in self.fixed]
        return " and ".join(parts)


Slot = tuple[int, int]  # number of the machine, number of the device among those that are taken there


@dataclass(frozen=True)
class Plan:
    """Where everything goes."""

    trainers: list[Slot]  # in rank order
    engines: list[list[Slot]]  # the devices of each engine
    critics: list[Slot] = field(default_factory=list)  # in rank order
    fixed: list[list[Slot]] = field(default_factory=list)  # the devices of each engine of a fixed model, in their order

    def per_machine(self, machines: int) -> list[int]:
        """How many devices are taken of each machine."""
        engines = [slot for engine in [*self.engines, *self.fixed] for slot in engine]
        slots = {*self.trainers, *self.critics, *engines}
        return [sum(machine == number for machine, _ in slots) for number in range(machines)]


def place(machines: Sequence[tuple[str, int]], demand: Demand, resource: str) -> Plan:
    """Place `demand` on devices.

    machines: (name, free devices) of each, in the order in which ranks go over them.
    resource: the devices' name in messages.
    Raises ValueError, with the arithmetic, for what does not fit.
    """
    demand.require_trainers_devices_suffice()
    plan = _place([free for _, free in machines], demand)
    if plan is None:
        have = ", ".join(f"{free} on {name}" for name, free in machines) or "none"
        raise ValueError(
            f"{demand} need {demand.devices} of {resource}, and what is free does not hold them so: {have}. "
            "Lower these numbers or make them divide the devices of a machine, free devices, or bring more machines."
        )
    return plan


def place_on_cpus(cpus: Sequence[int], demand: Demand) -> Plan:
    """Place processes that need no device. They are spread as if each took a CPU; one may be given many.

    cpus: of each machine.
    """
    assert cpus, "no machine"
    slots = list(cpus) if any(cpus) else [1] * len(cpus)  # a machine that offers none wants no processes
    alone = demand
    if demand.shared:
        alone = Demand(demand.trainers, 0, fixed=demand.fixed)
    rounds = 1
    while (plan := _place([count * rounds for count in slots], alone)) is None:
        rounds += 1
    if not demand.shared:
        return plan
    turns = [number * demand.tensor_parallel % demand.trainers for number in range(demand.engines)]
    critics = [plan.trainers[rank % demand.trainers] for rank in range(demand.critics)]
    return Plan(plan.trainers, [[plan.trainers[turn]] for turn in turns], critics, plan.fixed)


def _place(free: Sequence[int], demand: Demand) -> Plan | None:
    """The rest first and fixed models' engines on what is left, or the other way round; None where neither fits."""
    rest = replace(demand, fixed=())
    if not demand.fixed:
        return _place_rest(free, rest)
    for fixed_first in (False, True):
        plan = None if fixed_first else _place_rest(free, rest)
        left = _minus(free, plan.per_machine(len(free))) if plan else list(free)
        taken = _fill_all(left, demand.fixed)
        if taken is not None and fixed_first:
            plan = _place_rest(_minus(free, _sums(taken)), rest)
        if taken is not None and plan is not None:
            return replace(plan, fixed=_slots_of_kinds(taken, demand.fixed, plan.per_machine(len(free))))
    return None


def _fill_all(free: Sequence[int], kinds: Sequence[FixedEngines]) -> list[list[int]] | None:
    """How many devices each of `kinds` takes of each machine; None where they do not fit. The largest engines choose
    first: smaller ones fit into what these leave."""
    order, left = _largest_first(free)[::-1], list(free)
    taken: dict[int, list[int]] = {}
    for number in sorted(range(len(kinds)), key=lambda number: -kinds[number].tensor_parallel):
        counts = _fill(left, kinds[number].devices, kinds[number].tensor_parallel, order)
        if counts is None:
            return None
        taken[number], left = counts, _minus(left, counts)
    return [taken[number] for number in range(len(kinds))]


def _slots_of_kinds(
    taken: Sequence[Sequence[int]], kinds: Sequence[FixedEngines], after: Sequence[int]
) -> list[list[Slot]]:
    engines: list[list[Slot]] = []
    for counts, kind in zip(taken, kinds, strict=True):
        engines += _chunks(_slots(counts, after=after), kind.tensor_parallel)
        after = _sums([after, counts])
    return engines


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _minus(free: Sequence[int], taken: Sequence[int]) -> list[int]:
    return [have - count for have, count in zip(free, taken, strict=True)]


def _place_rest(free: Sequence[int], demand: Demand) -> Plan | None:
    """All but the engines of fixed models."""
    largest = max(free, default=0)
    block, critic_block = (size if largest >= size else 1 for size in (demand.trainer_block, demand.critic_block))
    if not demand.shared:
        return next(_apart(free, demand, block, critic_block), None)
    # The first leaves no machine with a piece of an engine's devices, or of a critic's neighbours.
    for size in (math.lcm(block, critic_block, demand.tensor_parallel), block):
        if demand.trainers % size:
            continue
        trainers = _fill(free, demand.trainers, size, _largest_first(free))
        engines = _fill(trainers, demand.engine_devices, demand.tensor_parallel, range(len(free))) if trainers else None
        if trainers and engines:
            slots = _slots(trainers)
            return Plan(slots, _chunks(_slots(engines), demand.tensor_parallel), slots[: demand.critics])
    return None


def _apart(free: Sequence[int], demand: Demand, block: int, critic_block: int) -> Iterator[Plan]:
    """Trainers first, on the fewest machines, then the critic; else engines first, on the others' end."""
    order = _largest_first(free)
    kinds = [
        (demand.trainers, block, order),
        (demand.critics, critic_block, order),
        (demand.engine_devices, demand.tensor_parallel, order[::-1]),
    ]
    for turns in ((0, 1, 2), (2, 0, 1)):
        taken: dict[int, list[int]] = {}
        left = list(free)
        for kind in turns:
            counts = _fill(left, *kinds[kind])
            if counts is None:
                break
            taken[kind] = counts
            left = _minus(left, counts)
        else:
            before_engines = [own + critics for own, critics in zip(taken[0], taken[1], strict=True)]
            engines = _chunks(_slots(taken[2], after=before_engines), demand.tensor_parallel)
            yield Plan(_slots(taken[0]), engines, _slots(taken[1], after=taken[0]))


def _fill(free: Sequence[int], count: int, block: int, order: Sequence[int]) -> list[int] | None:
    """How many devices to take of each machine, whole blocks, in `order`; None where they do not fit."""
    taken = [0] * len(free)
    for machine in order:
        taken[machine] = min(count - sum(taken), free[machine]) // block * block
    return taken if sum(taken) == count else None


def _largest_first(free: Sequence[int]) -> list[int]:
    return sorted(range(len(free)), key=lambda machine: (-free[machine], machine))


def _slots(taken: Sequence[int], after: Sequence[int] | None = None) -> list[Slot]:
    first = after or [0] * len(taken)
    return [(machine, first[machine] + i) for machine, count in enumerate(taken) for i in range(count)]


def _chunks(slots: list[Slot], size: int) -> list[list[Slot]]:
    return [slots[start : start + size] for start in range(0, len(slots), size)]
