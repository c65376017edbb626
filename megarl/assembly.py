"""Whole commands: train, eval, export. Puts the parts together and takes them down again, whatever happens."""

from __future__ import annotations

import contextlib
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl import platform as platforms
from megarl.algorithms.advantages import uses_critic
from megarl.batching.flops import ModelFlops
from megarl.checkpoint.folder import check_whole, checkpoint_name, list_checkpoints
from megarl.checkpoint.identity import check_base, identity_of
from megarl.checkpoint.next_commands import after_training, naming_checkpoint
from megarl.checkpoint.saver import Saver
from megarl.cluster import connect, is_controller, serve
from megarl.cluster.base import Cluster, Service, WorkerGroup
from megarl.cluster.calls import Service as RolloutService
from megarl.cluster.calls import watching
from megarl.cluster.device_map import Demand
from megarl.engines.specs import fixed_models
from megarl.errors import as_input_error
from megarl.observe.log import RunLog
from megarl.observe.profiling import Profiling
from megarl.observe.run_dir import RunDirectory
from megarl.platform.devices import peak_flops
from megarl.platform.kinds import kind_of
from megarl.preflight.load import load_recipe
from megarl.preflight.run import (
    Prepared,
    RunPlace,
    check_device,
    open_run_directory,
    prepare_evaluation,
    prepare_training,
)
from megarl.recipe import Recipe
from megarl.recipe.critic import critic_view
from megarl.recipe.judge import JUDGE
from megarl.recipe.offload import learners_take_turns, offloads
from megarl.recipe.paths import with_absolute_paths
from megarl.rollout.evaluate import EvaluationResult, evaluate
from megarl.rollout.evaluate_loss import HeldOut
from megarl.rollout.judge.service import with_judge
from megarl.rollout.source import Source
from megarl.rollout.source_dataset import DataSource
from megarl.rollout.source_engines import EnginesSource
from megarl.rollout.start_engines import environment_notices, load_engines, start_engines, start_judge, start_teacher
from megarl.rollout.teacher import Teacher
from megarl.train import Controller, Layout
from megarl.trainer.critic_group import Critic
from megarl.trainer.worker import kernel_notices
from megarl.weight_sync.connect import open_exchange
from megarl.weight_sync.handover import Colocated, Disaggregated, Placement, Tenant, TrainersOnly, wait_for_engines

TRAINER = "megarl.trainer.actor:ActorWorker"
CRITIC = "megarl.trainer.critic:CriticWorker"


@contextlib.contextmanager
def connected(
    recipe: Recipe, platform: Any, *, trainers: bool, engines: bool, critic: bool = False, fixed: Sequence[str] = ()
) -> Iterator[Cluster]:
    """The cluster that the recipe asks for, with room for what will be started; a ValueError is the recipe's fault."""
    with as_input_error():
        cluster = connect(recipe, platform, trainers=trainers, engines=engines, critic=critic, fixed=fixed)
    with cluster:
        yield cluster


def load(path: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe of a command line."""
    return load_recipe(path, overrides)


def train(recipe: Recipe) -> Path:
    """Train as `recipe` says and return the run's directory.

    Raises RecipeError or InputError before anything starts, and whatever a worker or engine failed of.
    Under torchrun every rank calls this: rank 0 runs the controller, the others serve until it is done.
    """
    if not is_controller(recipe):
        serve(recipe)
        return Path(recipe.runs_dir) / recipe.name
    with as_input_error():
        recipe = with_absolute_paths(recipe)
        prepared = prepare_training(recipe)
        platform = platforms.select(recipe.cluster.device)
        check_device(recipe, platform.name)
        place = open_run_directory(
            recipe, identity_of(recipe, prepared.model, prepared.critic_model, prepared.rows_of_sets)
        )
        log = RunLog(recipe, place.directory, first_step=place.first_step, total_steps=recipe.train.steps)
    with naming_checkpoint(recipe, place.directory), log:  # in this order: closing the log may find the disk full
        for notice in [*prepared.notices, *place.notices, *environment_notices(recipe, platform)]:
            log.notice(notice)
        rl = recipe.train.source == "rollout"
        critic, fixed = uses_critic(recipe.algorithm), fixed_models(recipe)
        with connected(recipe, platform, trainers=True, engines=rl, critic=critic, fixed=fixed) as cluster:
            with log.phase("start"):
                controller = _assemble(recipe, prepared, platform, cluster, log, place)
            controller.fit(place.checkpoint)
            if recipe.train.export_at_end:
                with log.phase("export"):
                    controller.placement.to_train()  # weights may be off the devices
                    _export_and_compare(recipe, controller.trainers, place.directory.path / "hf")
            controller.trainers.shutdown()
            if controller.critic is not None:
                controller.critic.workers.shutdown()
    print(*after_training(recipe, place.directory), sep="\n", flush=True)
    return place.directory.path


def evaluate_model(recipe: Recipe) -> EvaluationResult:
    """Evaluate `model.path` as it lies on disk on `data.eval_files`; prints the metrics as one JSON object."""
    if not is_controller(recipe):
        serve(recipe)
        return EvaluationResult({})
    with as_input_error():
        recipe = with_absolute_paths(recipe)
        prepared = prepare_evaluation(recipe)
        platform = platforms.select(recipe.cluster.device)
        check_device(recipe, platform.name, training=False)
    for notice in environment_notices(recipe, platform, training=False):
        print(notice, file=sys.stderr)
    assert prepared.evaluation is not None
    judge = [section for section in fixed_models(recipe) if section == JUDGE]  # no teacher is asked
    with connected(recipe, platform, trainers=False, engines=True, fixed=judge) as cluster:
        services = start_engines(recipe, prepared, platform, cluster, load_weights=True)
        judges = start_judge(recipe, platform, cluster)
        starting = [*(judge.call("start") for judge in judges), *load_engines(recipe, services)]
        wait_for_engines([*judges, *services], starting, doing="load", limit=recipe.rollout.start_timeout)
        samplers, check = with_judge(recipe, services, judges, _check_of(recipe, services, cluster))
        result = evaluate(recipe, prepared.evaluation, samplers, prepared.tokenizer.stop_ids, check)
    for notice in result.notices:
        print(notice, file=sys.stderr)
    print(json.dumps(result.metrics))
    return result


def export(run_path: Path, out: Path, step: int | None = None, *, critic: bool = False) -> Path:
    """Write a run's checkpoint (the newest, or that of `step`) as a Hugging Face model to `out`, and prove it.
    `critic`: the critic's, as a token classification model, instead of the actor's."""
    with as_input_error():
        run_dir = RunDirectory(run_path)
        if not run_dir.is_a_run():
            raise ValueError(f"{run_path} is no run's directory: it holds no recipe.resolved.yaml")
        recipe = with_absolute_paths(load_recipe(run_dir.recipe))
        if critic and not uses_critic(recipe.algorithm):
            raise ValueError(f"{run_path} has no critic: its algorithm.advantage is {recipe.algorithm.advantage}")
        checkpoint = _choose_checkpoint(run_dir, step)
        if recipe.lora.rank and not critic:
            check_base(checkpoint, recipe)
        for directory in (out, _adapter_directory(out)) if recipe.lora.rank else (out,):
            if directory.exists() and any(directory.iterdir()):
                raise ValueError(f"{directory} exists and is not empty: choose another --out, or move it away")
        platform = platforms.select(recipe.cluster.device)
    if not is_controller(recipe):
        serve(recipe)
        return out
    if critic:
        recipe = critic_view(recipe)
    with connected(recipe, platform, trainers=True, engines=False) as cluster:
        worker, steps, weights_only = CRITIC if critic else TRAINER, 0, True
        trainers = cluster.start_trainers(worker, recipe.cluster.trainers, (recipe, steps, weights_only), env={})
        trainers.call("load", str(checkpoint / ("critic" if critic else "trainer")))
        equal, untrained = _export_and_compare(recipe, trainers, out)
        trainers.shutdown()
    print(f"{out}: {equal} tensors of {checkpoint.name}, read back equal to the trainer's, bit for bit")
    if recipe.lora.rank:
        print(f"{_adapter_directory(out)}: the adapters alone, for PEFT, on {recipe.model.path}")
    if untrained:
        print(f"{untrained} more, of layers that are not trained, are equal to the starting model's")
    return out


def _export_and_compare(recipe: Recipe, trainers: WorkerGroup, out: Path) -> tuple[int, int]:
    """Write the trainers' weights as a Hugging Face model, read it back, compare. Returns the number of tensors
    that are equal to the trainers', and of those that are not trained and equal to the starting model's.

    With adapters, the model is the merged one, and the adapters alone go to a directory beside it.
    """
    trainers.call("save_hf", str(out.absolute()))
    equal, untrained = trainers.call("compare_with_hf", str(out.absolute()))[0]
    if recipe.lora.rank:
        trainers.call("save_adapter", str(_adapter_directory(out)))
    return equal, untrained


def _adapter_directory(out: Path) -> Path:
    return out.absolute().with_name(f"{out.name}_adapter")


def _choose_checkpoint(run_dir: RunDirectory, step: int | None) -> Path:
    found = list_checkpoints(run_dir.checkpoints)
    if not found:
        raise ValueError(f"{run_dir.path} holds no whole checkpoint: set train.save_every or train.save_at_end")
    wanted = found[-1] if step is None else run_dir.checkpoints / checkpoint_name(step)
    if wanted not in found:
        raise ValueError(f"{run_dir.path} has no checkpoint of step {step}; it has {', '.join(p.name for p in found)}")
    check_whole(wanted)
    return wanted


def _assemble(
    recipe: Recipe, prepared: Prepared, platform: Any, cluster: Cluster, log: RunLog, place: RunPlace
) -> Controller:
    """Start every process and wire the parts."""
    run_dir, rl, patience = place.directory, recipe.train.source == "rollout", recipe.rollout.start_timeout
    services = start_engines(recipe, prepared, platform, cluster, load_weights=False) if rl else []
    readers = start_teacher(recipe, platform, cluster) if "teacher" in fixed_models(recipe) else []
    fixed = [*readers, *(judges := start_judge(recipe, platform, cluster))]
    fixed_starting = [service.call("start") for service in fixed]
    starting = load_engines(recipe, services)
    engines: list[dict[str, Any]] = []
    take_turns = rl and recipe.cluster.placement == "colocated" and platform.ray_resource is not None
    if take_turns:  # an engine measures free memory when it loads: nothing else may take any then
        engines = wait_for_engines(services, starting, doing="load", limit=patience)
        falling_asleep = [service.call("sleep") for service in services]
        wait_for_engines(services, falling_asleep, doing="go to sleep", limit=patience)
        log.reached("engines are loaded, and sleep")
    trainers = _start_trainers(recipe, cluster)
    _check_shared_storage(trainers, run_dir)
    log.reached("trainers have the model")
    actor = Tenant(trainers, offload=offloads(recipe, platform.name))
    critic, critic_tenant = _start_critic(recipe, prepared.critic_flops, platform, cluster, actor, run_dir)
    engines = engines or wait_for_engines(services, starting, doing="load", limit=patience)
    wait_for_engines(fixed, fixed_starting, doing="load", limit=patience)
    log.reached("engines and all other processes are ready" if rl else "all processes are ready")
    samplers, check = with_judge(recipe, services, judges, _check_of(recipe, services, cluster))
    placement = _placement(recipe, actor, critic_tenant, services, engines, log.notice, asleep=take_turns)
    ranks = trainers.call("describe")
    for notice in kernel_notices(ranks):
        log.notice(notice)
    layout = _layout(recipe, prepared.flops, ranks)
    return Controller(
        recipe=recipe,
        trainers=trainers,
        critic=critic,
        teacher=Teacher(readers, recipe.teacher.timeout) if readers else None,
        layout=layout,
        source=_source(recipe, prepared, samplers, check),
        placement=placement,
        log=log,
        tokenizer=prepared.tokenizer,
        evaluate=_evaluation(recipe, prepared, samplers, trainers, layout, check),
        saver=_saver(recipe, platform, run_dir, trainers, critic, placement, cluster),
        identity=place.identity,
        profiling=Profiling(
            recipe.observe, trainers, services, log, run_dir.profile, patience, kind_of(platform.name).tracing.engines
        ),
    )


def _check_of(recipe: Recipe, services: Sequence[Service], cluster: Cluster) -> Callable[[], None]:
    """Raises where something that the run needs has failed; asked while waiting for samples."""
    return cluster.check if recipe.rollout.data_parallel == 1 else watching(services, cluster.check)


def _evaluation(
    recipe: Recipe,
    prepared: Prepared,
    services: Sequence[RolloutService],
    trainers: WorkerGroup,
    layout: Layout,
    check: Callable[[], None],
) -> Callable[[], EvaluationResult] | None:
    """What evaluates the policy of now: engines on held-out problems, or trainers on held-out rows. None: neither."""
    problems, rows = prepared.evaluation, prepared.held_out
    if rows is not None:
        place = layout.data_parallel_rank, layout.data_parallel, layout.micro_batches_multiple_of
        return HeldOut(recipe, rows, trainers, *place, layout.model_flops).evaluate
    if problems is None:
        return None
    return lambda: evaluate(recipe, problems, services, prepared.tokenizer.stop_ids, check)


def _saver(
    recipe: Recipe,
    platform: Any,
    run_dir: RunDirectory,
    trainers: WorkerGroup,
    critic: Critic | None,
    placement: Placement,
    cluster: Cluster,
) -> Saver:
    if critic is None:
        return Saver(run_dir.checkpoints, {"trainer": trainers}, recipe.train, cluster.check)
    turns = {"critic": placement.to_critic, "trainer": placement.to_train}
    return Saver(
        run_dir.checkpoints,
        {"critic": critic.workers, "trainer": trainers},
        recipe.train,
        cluster.check,
        come=(lambda name: turns[name]()) if learners_take_turns(recipe, platform.name) else None,
    )


def _source(
    recipe: Recipe, prepared: Prepared, services: Sequence[RolloutService], check: Callable[[], None]
) -> Source:
    if prepared.examples is not None:
        return DataSource(recipe, prepared.examples)
    assert prepared.prompts is not None
    return EnginesSource(recipe, prepared.prompts, services, prepared.tokenizer.stop_ids, check)


def _start_critic(
    recipe: Recipe, flops: ModelFlops | None, platform: Any, cluster: Cluster, actor: Tenant, run_dir: RunDirectory
) -> tuple[Critic | None, Tenant | None]:
    """The critic, where the recipe has one. The actor leaves the devices that it may have to build on."""
    if not uses_critic(recipe.algorithm):
        return None, None
    actor.leave()
    view = critic_view(recipe)
    steps = recipe.train.steps * recipe.critic.mini_batches
    workers = cluster.start_trainers(CRITIC, recipe.critic.trainers, (view, steps), env={}, name="critic")
    _check_shared_storage(workers, run_dir)
    tenant = Tenant(workers, offload=offloads(view, platform.name))
    tenant.leave()
    return Critic.of(view, workers, flops), tenant


def _check_shared_storage(trainers: WorkerGroup, run_dir: RunDirectory) -> None:
    """Every trainer writes its part of a checkpoint into the run's directory: all must see the same one."""
    token = run_dir.path / f".shared-{uuid.uuid4().hex}"
    token.touch()
    try:
        views = trainers.call("sees", str(token))
    finally:
        token.unlink()
    blind = sorted({host for host, sees in views if not sees})
    if blind:
        raise RuntimeError(
            f"the run's directory {run_dir.path} is not shared: {', '.join(blind)} cannot see it. "
            "Set runs_dir to a path that every node mounts."
        )


def _start_trainers(recipe: Recipe, cluster: Cluster) -> WorkerGroup:
    learning = recipe.train.steps - recipe.critic.warmup_steps  # 0 where there is no critic
    optimizer_steps = learning * recipe.actor.mini_batches
    return cluster.start_trainers(TRAINER, recipe.cluster.trainers, (recipe, optimizer_steps), env={})


def _layout(recipe: Recipe, flops: ModelFlops | None, ranks: Sequence[dict[str, Any]]) -> Layout:
    by_hand = recipe.cluster.device_peak_tflops
    engine_devices = recipe.rollout.engines * recipe.rollout.tensor_parallel
    own_devices = recipe.train.source == "rollout" and recipe.cluster.placement == "disaggregated"
    critic_devices = recipe.critic.trainers if uses_critic(recipe.algorithm) else 0
    fixed = Demand.of(recipe, trainers=False, engines=False, fixed=fixed_models(recipe)).fixed_devices
    return Layout(
        data_parallel_rank=[rank["dp_rank"] for rank in ranks],
        reports=[rank["reports"] for rank in ranks],
        data_parallel=ranks[0]["dp_size"],
        micro_batches_multiple_of=recipe.megatron.pipeline_parallel if recipe.megatron.virtual_pipeline else 1,
        devices=len(ranks) + (engine_devices + critic_devices if own_devices else 0) + fixed,
        model_flops=flops,
        device_peak=by_hand * 1e12 if by_hand else peak_flops(ranks[0]["device_name"]),
    )


def _placement(
    recipe: Recipe,
    actor: Tenant,
    critic: Tenant | None,
    services: Sequence[Service],
    engines: Sequence[dict[str, Any]],
    notice: Callable[[str], None],
    *,
    asleep: bool,
) -> Placement:
    if not services:
        return TrainersOnly()
    session = open_exchange(recipe, actor.workers, services, engines, notice)
    if recipe.cluster.placement == "disaggregated":
        return Disaggregated(actor.workers, services, session)
    return Colocated(
        actor,
        critic,
        services,
        session,
        engines_sleep=all(engine["can_sleep"] for engine in engines),
        engines_asleep=asleep,
        patience=recipe.rollout.start_timeout,
    )
