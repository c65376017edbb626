"""The engines that sample and score: the policy's as a fleet, if they may die, and the judge's behind them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megarl.cluster import transport
from megarl.cluster.base import Cluster
from megarl.cluster.outage_watch import OutageWatch
from megarl.engines.base import engine_name
from megarl.engines.specs import policy_spec
from megarl.recipe.observe import Event
from megarl.recipe.schema import Recipe, RolloutConfig
from megarl.rollout.engine_handle import EngineHandle, JudgeHandle, SamplingEngine, TeacherHandle, with_engine_check
from megarl.rollout.fleet.fixed import FixedModelEngines
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.fleet.live_requests import EngineRequests, why_fixed
from megarl.rollout.judge.service import judged_like, with_judge
from megarl.rollout.judge.tape import Verdicts
from megarl.rollout.source_engines import EnginesSource
from megarl.rollout.start_engines import restart_engine, restart_judge, restart_teacher, start_engine
from megarl.rollout.teacher.scoring import Teacher

Notice = Callable[[str, Event | None], None]


@dataclass(frozen=True)
class Samplers:
    """The engines that sample and score, and the objects that `EnginesSource` and `evaluate` check while they wait for them."""

    engines: list[SamplingEngine]  # may grow
    check: Callable[[], None]
    fleet: Fleet | None
    judge: FixedModelEngines[JudgeHandle] | None
    outages: OutageWatch


def connect_samplers(
    recipe: Recipe,
    sources: list[str],
    platform: Any,
    cluster: Cluster,
    engines: Sequence[EngineHandle],
    descriptions: Sequence[dict[str, Any]],
    judges: Sequence[JudgeHandle],
    stop: Callable[[Callable[[], None]], Callable[[], None]],
    notice: Notice,
    verdicts: Verdicts | None,
) -> Samplers:
    """Connect the loaded engines to the judge and the fleet. sources, platform: see `start_engines`. stop: adds the check for SIGTERM.
    verdicts: see `with_judge`."""
    check, outages = check_for(recipe.rollout, engines, cluster, notice)

    def joins(engine: EngineHandle) -> None:
        outages.add(engine)
        samplers.engines.append(judged_like(samplers.engines[0], engine))

    fleet = start_fleet(recipe, sources, platform, cluster, engines, descriptions, notice, joins)
    judge = connect_judge(recipe, platform, cluster, judges, notice)
    sampling = with_judge(recipe.judge, recipe.reward, engines, judge, verdicts)
    samplers = Samplers([*sampling], stop(check), fleet, judge, outages)
    return samplers


def connect_judge(
    recipe: Recipe, platform: Any, cluster: Cluster, judges: Sequence[JudgeHandle], notice: Notice
) -> FixedModelEngines[JudgeHandle] | None:
    """Watch the loaded engines of the judge; None without a judge. Arguments: see `start_engines` and `Fleet`."""
    if not judges:
        return None
    restart, limit = functools.partial(restart_judge, recipe, platform, cluster), recipe.rollout.start_timeout
    engines = FixedModelEngines("judge", judges, recipe.judge, restart, notice, limit)
    cluster.on_check(engines.poll)
    return engines


def connect_teacher(
    recipe: Recipe, platform: Any, cluster: Cluster, teachers: Sequence[TeacherHandle], notice: Notice
) -> Teacher | None:
    """Watch the loaded engines of the teachers; None without a teacher. Arguments: see `start_engines` and `Fleet`."""
    if not teachers:
        return None
    restart, limit = functools.partial(restart_teacher, recipe, platform, cluster), recipe.rollout.start_timeout
    rest, by_source = iter(teachers), {}
    for source, settings in zip(recipe.teacher.by_source or [""], recipe.teacher.by_key.values(), strict=True):
        engines = [*islice(rest, settings.engines)]
        by_source[source] = FixedModelEngines("teacher", engines, settings, restart, notice, limit)
        cluster.on_check(by_source[source].poll)
    return Teacher(by_source, cluster.check)


def answer_requests(recipe: Recipe, cluster: Cluster, engines: Sequence[EngineHandle], source: EnginesSource) -> None:
    """Answer `megarl engines` and the launchers from now on, and release engines that leave."""
    fleet, moves = source.fleet, source.moves
    requests = EngineRequests(
        recipe,
        cluster,
        engines if fleet is None else fleet.engines,
        fleet,
        why_fixed(recipe, transport(recipe.cluster)),
        moves.versions_by_engine,
        moves.groups_by_engine,
    )
    cluster.requests |= {"engines": requests.answer_engines, "leave": requests.answer_leave}
    if fleet is not None:
        cluster.on_check(moves.release_engines)
        cluster.on_check(moves.resample_lost)


def start_fleet(
    recipe: Recipe,
    sources: list[str],
    platform: Any,
    cluster: Cluster,
    engines: Sequence[EngineHandle],
    descriptions: Sequence[dict[str, Any]],
    notice: Notice,
    joins: Callable[[EngineHandle], None],
) -> Fleet | None:
    """Watch the policy's engines as a fleet, if they may die (`rollout.min_engines`); None otherwise. joins: receives each
    additional engine, before it loads. Other arguments: see `start_engines` and `Fleet`."""
    rollout = recipe.rollout
    if rollout.min_engines is None or not engines:
        return None
    released: set[int] = set()  # engines that have given their devices back

    def restart(engine: int) -> None:
        if engine < len(fleet.engines) and engine not in released:
            restart_engine(recipe, sources, platform, cluster, fleet.engines[engine])
            return
        spec = policy_spec(recipe, engine_name(engine), updated=True)
        service = start_engine(recipe, spec, sources, platform, cluster, additional=True)
        released.discard(engine)
        if engine < len(fleet.engines):
            fleet.engines[engine].service = service
        else:
            handle = EngineHandle(service)
            fleet.engines.append(handle)
            joins(handle)

    def end(engine: int) -> None:
        cluster.release_service(fleet.engines[engine].service)
        released.add(engine)

    limits, size = (rollout.start_timeout, rollout.step_timeout), rollout.data_parallel
    fleet = Fleet(engines, descriptions, rollout.min_engines, restart, notice, end, *limits, group_size=size)
    cluster.on_check(fleet.poll)
    return fleet


def check_for(
    rollout: RolloutConfig, engines: Sequence[EngineHandle], cluster: Cluster, notice: Callable[[str, Event], None]
) -> tuple[Callable[[], None], OutageWatch]:
    """Return a function that raises if a process of the run has failed, or a service has been down for too long. Waits for
    samples call it every second. Also return the watch over services, which `notice` reports, also while trainers compute."""
    outages = OutageWatch(engines, rollout.outage_timeout, lambda text: notice(text, "outage"))
    cluster.on_check(outages.poll)
    is_fixed_group = rollout.data_parallel > 1 and rollout.min_engines is None
    processes = with_engine_check(engines, cluster.check) if is_fixed_group else cluster.check

    def check() -> None:
        processes()
        outages.check()

    return check, outages
