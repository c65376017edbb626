"""Map trainers, critics and engines to devices: pure arithmetic over the free devices of each machine.

Trainer ranks fill machine after machine; a tensor-parallel group stays in one machine if one is large enough.
All devices of an engine are in one machine. Trainers and engines are placed together: engines placed first would
fragment the trainers' machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megarl.recipe.schema import Recipe

Machines = list[tuple[str, int]]
"""(address, free devices) of each machine of a cluster."""


@dataclass(frozen=True)
class FixedEngines:
    """Engines of a fixed model (never updated), on separate devices.

    section: of the recipe, teacher or judge; tensor_parallel: devices per engine.
    """

    section: str
    engines: int
    tensor_parallel: int = 1

    @classmethod
    def of(cls, recipe: Recipe, section: str) -> FixedEngines:
        settings = getattr(recipe, section)
        teachers = recipe.teacher.by_key.values()
        engines = sum(teacher.engines for teacher in teachers) if section == "teacher" else settings.engines
        return cls(section, engines, settings.tensor_parallel)

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
    """Processes of a run that need devices.

    trainers, engines: numbers of processes and of engines; 0 if the command does not start them.
    tensor_parallel: devices per engine.
    trainer_block: consecutive ranks that should share a machine (megatron.tensor_parallel).
    critics, critic_block: the same for the critic.
    shared: engines, trainers and critic time-share the same devices.
    fixed: engines of the teacher and the judge, in start order; their devices are never shared.
    engines_leave: the number of engines may change while the run goes on.
    """

    trainers: int
    engines: int
    tensor_parallel: int = 1
    trainer_block: int = 1
    shared: bool = False
    critics: int = 0
    critic_block: int = 1
    fixed: tuple[FixedEngines, ...] = ()
    engines_leave: bool = False

    @classmethod
    def of(
        cls, recipe: Recipe, *, trainers: bool, engines: bool, critic: bool = False, fixed: Sequence[str] = ()
    ) -> Demand:
        """Demand of `recipe`. trainers, engines, critic: whether they start; fixed: sections of fixed models' engines."""
        return cls(
            trainers=recipe.cluster.trainers if trainers else 0,
            engines=recipe.rollout.engines if engines else 0,
            tensor_parallel=recipe.rollout.tensor_parallel,
            trainer_block=recipe.megatron.tensor_parallel,
            shared=trainers and recipe.cluster.placement == "colocated",
            critics=recipe.critic.trainers if critic else 0,
            critic_block=recipe.critic.megatron.tensor_parallel if critic else 1,
            fixed=tuple(FixedEngines.of(recipe, section) for section in fixed),
            engines_leave=engines and recipe.rollout.min_engines is not None,
        )

    @property
    def engine_devices(self) -> int:
        return self.engines * self.tensor_parallel

    @property
    def first_critic(self) -> int:
        """Number of the critic's first device: trainers, critic and engines fill devices in this order."""
        return 0 if self.shared else self.trainers

    @property
    def first_engine(self) -> int:
        """Number of the first engine's first device."""
        return 0 if self.shared else self.trainers + self.critics

    @property
    def fixed_devices(self) -> int:
        return sum(kind.devices for kind in self.fixed)

    @property
    def devices(self) -> int:
        """Total number of devices."""
        unshared = 0 if self.shared else self.critics + self.engine_devices
        return self.trainers + unshared + self.fixed_devices

    def require_trainers_devices_suffice(self) -> None:
        """Raise ValueError if colocated engines or critics need more devices than the trainers have."""
        if self.shared and self.critics > self.trainers:
            raise ValueError(
                f"critic.trainers = {self.critics}, but a colocated critic can use only the trainers' devices: "
                f"cluster.trainers = {self.trainers}. Lower critic.trainers, raise cluster.trainers, or set "
                "cluster.placement=disaggregated."
            )
        if self.shared and self.engine_devices > self.trainers:
            raise ValueError(
                f"rollout.engines x rollout.tensor_parallel = {self.engines} x {self.tensor_parallel} = "
                f"{self.engine_devices} devices, but colocated engines can use only the trainers' devices: "
                f"cluster.trainers = {self.trainers}. Use fewer or smaller engines, raise cluster.trainers, or set "
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


Slot = tuple[int, int]  # machine index, index among the devices that the run takes on this machine


@dataclass(frozen=True)
class DeviceMap:
    """Device slots of every trainer, critic and engine."""

    trainers: list[Slot]  # in rank order
    engines: list[list[Slot]]  # by engine
    critics: list[Slot] = field(default_factory=list)  # in rank order
    fixed: list[list[Slot]] = field(default_factory=list)  # by engine, in the order of `Demand.fixed`

    def per_machine(self, machines: int) -> list[int]:
        """Number of devices that the run takes on each machine."""
        slots = {slot for part in self.parts(separate_engines=False) for slot in part}
        return [sum(machine == number for machine, _ in slots) for number in range(machines)]

    def parts(self, *, separate_engines: bool) -> list[list[Slot]]:
        """Return all slots, sorted; separate_engines: the slots of each rollout engine form a further list."""
        engines = [] if separate_engines else self.engines
        rest = {*self.trainers, *self.critics, *(slot for engine in [*engines, *self.fixed] for slot in engine)}
        return [sorted(rest), *([sorted(engine) for engine in self.engines] if separate_engines else [])]


def place(machines: Sequence[tuple[str, int]], demand: Demand, resource: str) -> DeviceMap:
    """Map `demand` to devices.

    machines: (name, free devices) per machine, in the order of the ranks.
    resource: name of the devices in messages.
    Raises ValueError, with the arithmetic, if the demand does not fit.
    """
    demand.require_trainers_devices_suffice()
    plan = _place([free for _, free in machines], demand)
    if plan is None:
        have = ", ".join(f"{free} on {name}" for name, free in machines) or "none"
        raise ValueError(
            f"{demand} need {demand.devices} of {resource}, and the free devices cannot hold them: {have}. "
            "Lower these numbers or make them divide the devices of a machine, free devices, or add machines."
        )
    return plan


def fits(free: Sequence[int], demand: Demand) -> bool:
    """Return whether machines with these numbers of free devices can hold `demand`."""
    is_too_small = demand.shared and max(demand.critics, demand.engine_devices) > demand.trainers
    return not is_too_small and _place(free, demand) is not None


def place_on_cpus(cpus: Sequence[int], demand: Demand) -> DeviceMap:
    """Map processes that need no device to machines: one per CPU first, several per CPU if there are too few.

    cpus: number of CPUs per machine.
    """
    assert cpus, "no machine"
    slots = list(cpus) if any(cpus) else [1] * len(cpus)  # a machine with 0 CPUs gets no processes if another has some
    unshared = Demand(demand.trainers, 0, fixed=demand.fixed) if demand.shared else demand
    per_cpu = 1
    while (plan := _place([count * per_cpu for count in slots], unshared)) is None:
        per_cpu += 1
    if not demand.shared:
        return plan
    hosts = [number * demand.tensor_parallel % demand.trainers for number in range(demand.engines)]
    critics = [plan.trainers[rank % demand.trainers] for rank in range(demand.critics)]
    return DeviceMap(plan.trainers, [[plan.trainers[host]] for host in hosts], critics, plan.fixed)


def _place(free: Sequence[int], demand: Demand) -> DeviceMap | None:
    """Place fixed models' engines last or, if they do not fit then, first; None if neither order fits."""
    rest = replace(demand, fixed=())
    if not demand.fixed:
        return _place_rest(free, rest)
    for fixed_first in (False, True):
        plan = None if fixed_first else _place_rest(free, rest)
        left = _minus(free, plan.per_machine(len(free))) if plan else list(free)
        used = _fill_all(left, demand.fixed)
        if used is not None and fixed_first:
            plan = _place_rest(_minus(free, _sums(used)), rest)
        if used is not None and plan is not None:
            return replace(plan, fixed=_slots_of_kinds(used, demand.fixed, plan.per_machine(len(free))))
    return None


def _fill_all(free: Sequence[int], kinds: Sequence[FixedEngines]) -> list[list[int]] | None:
    """Number of devices per machine for each of `kinds`; None if they do not fit. Places the largest engines first."""
    order, left = _largest_first(free)[::-1], list(free)
    used: dict[int, list[int]] = {}
    for number in sorted(range(len(kinds)), key=lambda number: -kinds[number].tensor_parallel):
        counts = _fill(left, kinds[number].devices, kinds[number].tensor_parallel, order)
        if counts is None:
            return None
        used[number], left = counts, _minus(left, counts)
    return [used[number] for number in range(len(kinds))]


def _slots_of_kinds(
    used: Sequence[Sequence[int]], kinds: Sequence[FixedEngines], after: Sequence[int]
) -> list[list[Slot]]:
    engines: list[list[Slot]] = []
    for counts, kind in zip(used, kinds, strict=True):
        engines += _chunks(_slots(counts, after=after), kind.tensor_parallel)
        after = _sums([after, counts])
    return engines


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _minus(free: Sequence[int], used: Sequence[int]) -> list[int]:
    return [have - count for have, count in zip(free, used, strict=True)]


def _place_rest(free: Sequence[int], demand: Demand) -> DeviceMap | None:
    """Place trainers, critics and rollout engines; None if they do not fit."""
    largest = max(free, default=0)
    block, critic_block = (size if largest >= size else 1 for size in (demand.trainer_block, demand.critic_block))
    if not demand.shared:
        return next(_place_unshared(free, demand, block, critic_block), None)
    # The first size keeps every engine and every tensor-parallel group of the critic within one machine.
    for size in (math.lcm(block, critic_block, demand.tensor_parallel), block):
        if demand.trainers % size:
            continue
        trainers = _fill(free, demand.trainers, size, _largest_first(free))
        engines = _fill(trainers, demand.engine_devices, demand.tensor_parallel, range(len(free))) if trainers else None
        if trainers and engines:
            slots = _slots(trainers)
            return DeviceMap(slots, _chunks(_slots(engines), demand.tensor_parallel), slots[: demand.critics])
    return None


def _place_unshared(free: Sequence[int], demand: Demand, block: int, critic_block: int) -> Iterator[DeviceMap]:
    """Plans on separate devices: trainers, critic, engines in this order (fewest machines first), then engines first."""
    order = _largest_first(free)
    kinds = [
        (demand.trainers, block, order),
        (demand.critics, critic_block, order),
        (demand.engine_devices, demand.tensor_parallel, order[::-1]),
    ]
    for fill_order in ((0, 1, 2), (2, 0, 1)):
        used: dict[int, list[int]] = {}
        left = list(free)
        for kind in fill_order:
            counts = _fill(left, *kinds[kind])
            if counts is None:
                break
            used[kind] = counts
            left = _minus(left, counts)
        else:
            engines = _chunks(_slots(used[2], after=_sums([used[0], used[1]])), demand.tensor_parallel)
            yield DeviceMap(_slots(used[0]), engines, _slots(used[1], after=used[0]))


def _fill(free: Sequence[int], count: int, block: int, order: Sequence[int]) -> list[int] | None:
    """Take `count` devices in whole blocks from machines in `order`; devices per machine, None if they do not fit."""
    used = [0] * len(free)
    for machine in order:
        used[machine] = min(count - sum(used), free[machine]) // block * block
    return used if sum(used) == count else None


def _largest_first(free: Sequence[int]) -> list[int]:
    return sorted(range(len(free)), key=lambda machine: (-free[machine], machine))


def _slots(used: Sequence[int], after: Sequence[int] | None = None) -> list[Slot]:
    first = after or [0] * len(used)
    return [(machine, first[machine] + i) for machine, count in enumerate(used) for i in range(count)]


def _chunks(slots: list[Slot], size: int) -> list[list[Slot]]:
    return [slots[start : start + size] for start in range(0, len(slots), size)]
