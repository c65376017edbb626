"""Build a run: start trainers and engines, connect weight sync, and put the parts together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.algorithms.kl import KLWeight
from megarl.checkpoint.graceful_stop import GracefulStop, StopRequested
from megarl.checkpoint.next_commands import Repetition
from megarl.checkpoint.run_checkpoints import Checkpoints
from megarl.checkpoint.saver import Saver
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.cluster import connect
from megarl.cluster.base import Cluster
from megarl.cluster.device_map import Demand
from megarl.cluster.outage_watch import ServiceOutage
from megarl.cluster.stacks.live_run import answering_requests
from megarl.data.tokenizer import Tokenizer
from megarl.engines.specs import fixed_models
from megarl.errors import RecipeError, as_input_error
from megarl.observe.log import RunLog
from megarl.observe.profiling import Profiling
from megarl.platform.device_table import peak_flops
from megarl.platform.kinds import kind_of
from megarl.preflight.engines_and_devices import demand_of
from megarl.preflight.provenance import hosts_and_devices
from megarl.preflight.replay import write_recipe
from megarl.preflight.run_setup import RunSetup
from megarl.recipe import Recipe
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.offload import learners_take_turns
from megarl.rollout.engine_handle import EngineHandle, JudgeHandle, TeacherHandle
from megarl.rollout.evaluate import EvaluationResult, evaluate
from megarl.rollout.fleet.fixed import FixedModelEngines
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.samplers import Samplers, answer_requests, connect_samplers, connect_teacher
from megarl.rollout.source import SampleSource
from megarl.rollout.source_dataset import DatasetSource
from megarl.rollout.source_engines import EnginesSource
from megarl.rollout.start_engines import (
    check_in_flight,
    load_engines,
    shares_devices,
    start_engines,
    start_judge,
    start_teacher,
    wait_for_start,
    wait_until_asleep,
)
from megarl.rollout.tape import ReplayPlan
from megarl.rollout.teacher.scoring import Teacher
from megarl.trainer.group import ActorGroup, CriticGroup
from megarl.trainer.held_out import HeldOut
from megarl.trainer.kept import not_taken_text
from megarl.trainer.machine_load import MachineLoads
from megarl.trainer.repeatable_steps import RepeatableSteps, keep_steps
from megarl.trainer.restarts import TrainerRestarts
from megarl.trainer.start import Learners
from megarl.trainer.worker import kernel_notices
from megarl.weight_sync.connect import open_weight_sync
from megarl.weight_sync.placement import Colocated, Disaggregated, DisaggregatedFleet, EnginesUpdate, Placement
from megarl.weight_sync.publish import ReceivingEngine
from megarl.weight_sync.session import Session


@dataclass
class Run:
    """The parts of a run."""

    recipe: Recipe
    actor: ActorGroup
    critic: CriticGroup | None
    teacher: Teacher | None
    source: SampleSource
    devices: Placement
    evaluate: Callable[[], EvaluationResult] | None  # None: nothing to evaluate
    checkpoints: Checkpoints
    skipped: SkippedSteps
    kl_weight: KLWeight
    tokenizer: Tokenizer
    profiling: Profiling
    log: RunLog
    started_devices: int  # of trainers, critic and engines, at the start
    device_peak: float | None  # FLOP/s of a trainer's device; None: unknown
    repeatable: RepeatableSteps | None = None  # None: no step is trained again
    trainer_restarts: TrainerRestarts | None = None  # None: a failure of a trainer ends the run
    replay: ReplayPlan | None = None  # of train.replay
    fleet: Fleet | None = None  # None: the number of engines is fixed
    fixed_engines: Sequence[FixedModelEngines[Any]] = ()  # of the teachers and the judge
    machine_loads: MachineLoads = field(default_factory=MachineLoads)

    @property
    def device_count(self) -> int:
        """Devices of trainers, critic and engines; perf/throughput divides by it."""
        rollout = self.recipe.rollout
        joined = self.fleet.wanted - rollout.engines if self.fleet is not None else 0
        return self.started_devices + joined * rollout.tensor_parallel

    @property
    def last_step(self) -> int:
        """The last step of this process: `train.steps`, or the last one that a replay repeats."""
        replayed = self.replay.last_step if self.replay is not None else None
        return self.recipe.train.steps if replayed is None else replayed

    def is_cut_off(self, step: int) -> bool:
        """Return whether a replay ends within `step`, as the recorded run did: after its checkpoint, before its metrics."""
        return self.replay is not None and step == self.replay.last_step and not self.replay.logs_last

    @property
    def exports_at_end(self) -> bool:
        """True if the run ends with an export. A replay of a run that ended before `train.steps` has none."""
        whole = self.last_step == self.recipe.train.steps and not self.is_cut_off(self.last_step)
        return self.recipe.train.export_at_end and whole

    def publish_first_weights(self, version: int) -> None:
        self.publish_weights(version)
        if self.recipe.train.source == "rollout":
            self.log.reached("engines have the trainers' weights")

    def publish_weights(self, version: int) -> None:
        """Send the weights to the engines, with `rollout.at_update: drain` after all groups. SFT and DPO have no engines."""
        if self.recipe.train.source != "rollout":
            return
        with self.log.phase("drain"):
            self.source.drain()
        with self.log.phase("weight_sync"):
            self.log.add(self.devices.update_engines(version))

    def evaluate_policy(self, *, after_step: int) -> None:
        """Evaluate the current policy and log the result."""
        assert self.evaluate is not None
        with self.log.phase("eval"):
            self.source.load_newest(after_step)
            result = self.evaluate()
        for notice in result.notices:
            self.log.notice(f"evaluation after step {after_step}: {notice}")
        self.log.evaluation(after_step, result.metrics)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face model."""
        self.devices.give_to_actor()  # its weights may be offloaded
        self.actor.export_hf(folder)

    def forget_saved_steps(self) -> None:
        """Delete what the run keeps to train steps again, up to the newest checkpoint."""
        newest, _ = self.checkpoints.newest()
        if self.checkpoints.journal is not None:
            self.checkpoints.journal.forget_through(newest)
        if self.repeatable is not None:
            self.repeatable.keep_since(newest)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Run the block, then end the trainer processes in order, unless the block raises; the cluster ends the others. The journal
        and its batches remain if the block raises."""
        journal, complete = self.checkpoints.journal, False
        try:
            yield
            for group in (self.actor, self.critic):
                if group is not None:
                    group.shutdown()
            complete = True
        except (StopRequested, ServiceOutage):
            self.forget_saved_steps()
            raise
        finally:
            if journal is not None and complete:
                journal.close()
            if self.repeatable is not None:
                self.repeatable.batches.close(keep=journal is not None and not complete)


@contextlib.contextmanager
def connected(recipe: Recipe, platform: Any, demand: Demand) -> Iterator[Cluster]:
    """Connect to a cluster and reserve devices for `demand`. `megarl doctor RUN_DIRECTORY` can then show its processes.

    Raises InputError if the cluster cannot be reached or has too few devices.
    """
    with as_input_error():
        cluster = connect(recipe, platform, demand)
    with cluster, answering_requests(cluster):
        yield cluster


def build_run(setup: RunSetup, cluster: Cluster, log: RunLog) -> Run:
    """Start every process of the run and connect the parts."""
    recipe, prepared, folder = setup.recipe, setup.prepared, setup.place.directory
    folder.write_hub_commits(setup.hub_commits)
    setup.place.abandon_later_steps(log.notice)
    started = _start_processes(setup, cluster, log)
    engines, actor, critic = started.engines, started.learners.actor, started.learners.critic
    stop = GracefulStop.of(recipe.train)
    verdicts = setup.tape.verdicts() if setup.tape is not None and recipe.reward.uses_judge else None
    parts = (engines, started.descriptions, started.judges, stop.after, log.notice, verdicts)
    samplers = connect_samplers(recipe, prepared.data_sources, setup.platform, cluster, *parts)
    teacher = connect_teacher(recipe, setup.platform, cluster, started.teachers, log.notice)
    devices = connect_engines(recipe, started, log.notice, samplers.fleet, samplers.check, cluster.check)
    for notice in kernel_notices(actor.describe()):
        log.notice(notice)
    log.add_provenance(_hosts_and_devices(setup.platform.name, started))
    source = _source(setup, samplers, engines, cluster)
    has_tape = setup.tape is not None and setup.place.journal is None  # a bundle begins at a checkpoint
    skipped = SkippedSteps(recipe.train, Repetition(folder, has_tape, setup.place.checkpoint))
    kl_weight = KLWeight(recipe.algorithm.kl_coef, recipe.algorithm.kl_target, recipe.algorithm.kl_horizon)
    repeatable, journal = keep_steps(recipe, folder, setup.place.journal, log.notice)
    saver = _saver(setup, started, devices, cluster.check, log)
    load_weights = functools.partial(started.learners.load_checkpoint, devices)
    trace_note = kind_of(setup.platform.name).tracing.engines
    peak_tflops = recipe.cluster.device_peak_tflops
    return Run(
        recipe=recipe,
        actor=actor,
        critic=critic,
        teacher=teacher,
        fixed_engines=[*(teacher.by_source.values() if teacher else ()), *([samplers.judge] if samplers.judge else ())],
        source=source,
        devices=devices,
        evaluate=_evaluation(setup, samplers, actor),
        checkpoints=Checkpoints(
            recipe.train,
            saver,
            source,
            kl_weight,
            skipped,
            setup.place.identity,
            load_weights,
            log,
            stop,
            journal=journal,
        ),
        skipped=skipped,
        kl_weight=kl_weight,
        tokenizer=prepared.tokenizer,
        profiling=Profiling(
            recipe.observe, actor, engines, log, folder.profile, recipe.rollout.start_timeout, cluster.check, trace_note
        ),
        log=log,
        repeatable=repeatable,
        trainer_restarts=started.learners.restarts(recipe, cluster, devices),
        replay=setup.tape.plan if setup.tape is not None else None,
        started_devices=demand_of(recipe).devices,
        fleet=samplers.fleet,
        device_peak=peak_tflops * 1e12 if peak_tflops else peak_flops(actor.ranks[0]["device_name"]),
    )


@dataclass
class Started:
    """The processes of a run, all loaded."""

    engines: list[EngineHandle]
    descriptions: list[dict[str, Any]]  # of the engines
    teachers: list[TeacherHandle]
    judges: list[JudgeHandle]
    learners: Learners
    engines_asleep: bool


def _start_processes(setup: RunSetup, cluster: Cluster, log: RunLog) -> Started:
    """Start engines and trainers. They load at the same time, or one after the other if they share devices."""
    recipe, platform, folder = setup.recipe, setup.platform, setup.place.directory
    if setup.tape is not None:
        write_recipe(setup.tape, recipe)
    rollout, limit = recipe.train.source == "rollout", recipe.rollout.start_timeout
    engines: list[EngineHandle] = []
    if rollout:
        sources = setup.prepared.data_sources
        engines = start_engines(
            recipe, sources, platform, cluster, traces=folder.profile, updated=True, tape=setup.tape
        )
    teachers = start_teacher(recipe, platform, cluster) if "teacher" in fixed_models(recipe) else []
    judges = start_judge(recipe, platform, cluster)
    fixed: list[TeacherHandle | JudgeHandle] = [*teachers, *judges]
    loading_fixed = [engine.start() for engine in fixed]
    loading = load_engines(recipe.rollout, engines)
    descriptions: list[dict[str, Any]] = []
    time_shared = rollout and shares_devices(recipe.cluster, platform)
    if time_shared:
        descriptions = wait_until_asleep(engines, loading, limit, cluster.check)
        log.reached("engines are loaded, and sleep")
    flops, critic_flops = setup.prepared.flops, setup.prepared.critic_flops
    learners = Learners.start(recipe, cluster, platform.name, folder.path, flops, critic_flops, setup.place.resumes)
    log.reached("trainers have the model")
    if cluster.not_taken:
        log.warn(not_taken_text(cluster.not_taken, [engine.service.kept for engine in engines]))
    descriptions = descriptions or wait_for_start(engines, loading, doing="load", limit=limit, check=cluster.check)
    wait_for_start(fixed, loading_fixed, doing="load", limit=limit, check=cluster.check)
    log.reached("engines and all other processes are ready" if rollout else "all processes are ready")
    return Started(engines, descriptions, teachers, judges, learners, time_shared)


def _hosts_and_devices(device: str, started: Started) -> dict[str, Any]:
    """Return the machines of the run with their processes, and the trainers' devices, for the provenance."""
    learners = started.learners
    critic = learners.critic.ranks if learners.critic is not None else []
    machines = [("trainers", rank["machine"]) for rank in learners.actor.ranks]
    machines += [("critic", rank["machine"]) for rank in critic]
    for role, handles in (("engines", started.engines), ("teacher", started.teachers), ("judge", started.judges)):
        machines += [(role, handle.service.host) for handle in handles]
    names = [rank["device_name"] for rank in [*learners.actor.ranks, *critic]]
    return hosts_and_devices(device, machines, names)


def connect_engines(
    recipe: Recipe,
    started: Started,
    notice: Callable[[str], None],
    fleet: Fleet | None = None,
    check: Callable[[], None] = lambda: None,
    check_processes: Callable[[], None] = lambda: None,
) -> Placement:
    """Open the weight sync between the actor and the engines, and choose how they occupy the devices.

    check_processes: raises if a process of the run has failed. check: raises after SIGTERM, too.
    """
    actor, engines, learners = started.learners.actor, started.engines, started.learners
    if not engines:
        return Placement()
    check_in_flight(recipe, started.descriptions)

    def with_learners(check: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            check()
            learners.check()

        return both

    # A session that is opened again mostly takes the same route.
    notify_once = functools.lru_cache(maxsize=None)(notice)
    members = fleet.members() if fleet is not None else []
    session = open_weight_sync(recipe, actor, engines, started.descriptions, notify_once)
    if update_rule(recipe) == "finish" and not session.sharded and session.adapter_alpha is None:
        problem = "the weights go to the engines whole (see the notices), and each engine rank would keep the whole model in host memory"
        raise RecipeError("rollout.at_update", problem, "set rollout.at_update=refresh or drain", value="finish")
    if fleet is not None:

        def open_session(members: list[ReceivingEngine], indices: list[int]) -> Session:
            descriptions = [fleet.descriptions[i] for i in indices]
            return open_weight_sync(recipe, actor, members, descriptions, notify_once, with_learners(check))

        both, limit = with_learners(check), recipe.rollout.start_timeout
        return DisaggregatedFleet(actor, fleet.engines, session, members, fleet, open_session, both, limit)
    open_again = functools.partial(
        open_weight_sync, recipe, actor, engines, started.descriptions, notify_once, with_learners(check_processes)
    )
    update = EnginesUpdate(actor, engines, session, open_again)
    if recipe.cluster.placement == "disaggregated":
        return Disaggregated(update)
    return Colocated(
        learners.actor_on_devices,
        learners.critic_on_devices,
        engines,
        update,
        engines_sleep=all(description["can_sleep"] for description in started.descriptions),
        engines_asleep=started.engines_asleep,
        requests_wait=update_rule(recipe) == "refresh",
        start_timeout=recipe.rollout.start_timeout,
    )


def _source(setup: RunSetup, samplers: Samplers, engines: Sequence[EngineHandle], cluster: Cluster) -> SampleSource:
    recipe, prepared = setup.recipe, setup.prepared
    if prepared.examples is not None:
        return DatasetSource(recipe, prepared.examples)
    assert prepared.prompts is not None
    arrivals = setup.tape.arrivals() if setup.tape is not None else None
    watched, stop_ids = (samplers.check, arrivals, samplers.fleet, samplers.outages), prepared.tokenizer.stop_ids
    source = EnginesSource(recipe, prepared.prompts, samplers.engines, stop_ids, *watched)
    answer_requests(recipe, cluster, engines, source)
    return source


def _evaluation(setup: RunSetup, samplers: Samplers, actor: ActorGroup) -> Callable[[], EvaluationResult] | None:
    """Return a function that evaluates the policy on held-out problems (RL) or rows (SFT, DPO); None if there are none."""
    recipe, prepared = setup.recipe, setup.prepared
    problems, rows = prepared.evaluation, prepared.held_out
    if rows is not None:
        return HeldOut(recipe, rows, actor).evaluate
    if problems is None:
        return None
    watched, stop_ids = (samplers.check, samplers.fleet, samplers.outages), prepared.tokenizer.stop_ids
    return lambda: evaluate(recipe, problems, samplers.engines, stop_ids, *watched)


def _saver(setup: RunSetup, started: Started, devices: Placement, check: Callable[[], None], log: RunLog) -> Saver:
    recipe, folder = setup.recipe, setup.place.directory.checkpoints
    actor, critic = started.learners.actor, started.learners.critic
    if critic is None:
        return Saver(folder, {"trainer": actor}, recipe.train, check, log.notice, completed=log.checkpoint)
    give = {"critic": devices.give_to_critic, "trainer": devices.give_to_actor}
    onload = (lambda name: give[name]()) if learners_take_turns(recipe, setup.platform.name) else None
    both = {"critic": critic, "trainer": actor}
    return Saver(folder, both, recipe.train, check, log.notice, onload, log.checkpoint)
