"""Start the engine processes of a run: the policy's, the teacher's and the judge's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.agents.setup import AgentSetup
from megarl.cluster.base import Cluster, Service
from megarl.cluster.calls import wait_for_all
from megarl.cluster.keeper import digest_of
from megarl.data.images import ImageReader
from megarl.engines import engine_settings, process_env
from megarl.engines.base import EngineSpec, EngineTraces, engine_name
from megarl.engines.specs import judge_spec, policy_spec, teacher_specs
from megarl.errors import RecipeError
from megarl.platform.environment import RoleSettings
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.seeded import samples_are_seeded
from megarl.recipe.environment import variables
from megarl.recipe.observe import trace_options
from megarl.recipe.schema import ClusterConfig, Recipe, RolloutConfig
from megarl.rollout.engine_handle import EngineHandle, JudgeHandle, TeacherHandle, load_group
from megarl.rollout.tape import RunTape

ROLLOUT_SERVER = "megarl.rollout.server:RolloutServer"
KEPT_SERVER = "megarl.rollout.kept.server:KeptRolloutServer"
TEACHER_SERVER = "megarl.rollout.teacher.server:TeacherServer"
JUDGE_SERVER = "megarl.rollout.judge.server:JudgeServer"


def start_engines(
    recipe: Recipe,
    sources: list[str],
    platform: Any,
    cluster: Cluster,
    *,
    traces: Path | None,
    updated: bool,
    tape: RunTape | None = None,
) -> list[EngineHandle]:
    """Start the policy's engines; they load in the background.

    sources: data sources of the rows that the engines score.
    traces: folder for the traces of `observe.profile_engines`; None: no traces.
    updated: the first weight sync brings the weights; False: the engines read the weights of `model.path`.
    tape: the run's tape; None: no tape.
    """
    engines = []
    for number in range(recipe.rollout.engines):
        spec = policy_spec(recipe, engine_name(number), updated=updated)
        if traces is not None and number in recipe.observe.profile_engines:
            spec = replace(spec, traces=EngineTraces(str(traces / spec.name), trace_options(recipe.observe)))
        if tape is not None:
            spec = replace(spec, tape=tape.of_engine(spec.name))
        engines.append(EngineHandle(start_engine(recipe, spec, sources, platform, cluster)))
    return engines


def restart_engine(recipe: Recipe, sources: list[str], platform: Any, cluster: Cluster, engine: EngineHandle) -> None:
    """Start a new process of a policy's engine on the devices of the old one, which is ended. It gets its weights from a weight
    sync, and has neither a tape nor traces."""
    spec = policy_spec(recipe, engine.name, updated=True)
    engine.service = start_engine(recipe, spec, sources, platform, cluster, replaces=engine.service)


def start_engine(
    recipe: Recipe,
    spec: EngineSpec,
    sources: list[str],
    platform: Any,
    cluster: Cluster,
    replaces: Service | None = None,
    additional: bool = False,
    server: str = ROLLOUT_SERVER,
) -> Service:
    """Start the process of an engine of the policy. `replaces`, `additional`: see `Cluster.start_service`. server: import path of
    its class, `RolloutServer` or a subclass. With `train.keep_workers` and drain, the engine may outlive its controller."""
    tokenizer = recipe.model.tokenizer or recipe.model.path
    images = ImageReader.of(recipe.model.path, recipe.data)
    scoring = (recipe.reward, sources, recipe.sandbox)
    agent, template = AgentSetup.of(recipe), recipe.data.chat_template
    args = (tokenizer, *scoring, images, agent, recipe.reward.uses_judge, template)
    essential = recipe.rollout.min_engines is None
    engine = recipe.rollout.engine
    is_alone, drains = recipe.rollout.data_parallel == 1, update_rule(recipe) == "drain"
    keep = recipe.train.keep_workers > 0 and server == ROLLOUT_SERVER and drains and is_alone
    return _start(
        KEPT_SERVER if keep else server,
        engine,
        spec,
        args,
        recipe,
        platform,
        cluster,
        replaces=replaces,
        essential=essential,
        additional=additional,
        keep=keep,
    )


def load_engines(rollout: RolloutConfig, engines: Sequence[EngineHandle]) -> list[Future[dict[str, Any]]]:
    """Start loading the policy's engines; the results are their descriptions. `rollout.data_parallel` consecutive engines form a
    group."""
    size = rollout.data_parallel
    groups = [engines[first : first + size] for first in range(0, len(engines), size)]
    return [load for group in groups for load in load_group(group)]


def wait_for_start(
    engines: Sequence[EngineHandle | TeacherHandle | JudgeHandle],
    calls: Sequence[Future[Any]],
    *,
    doing: str,
    limit: float,
    check: Callable[[], None],
) -> list[Any]:
    """Wait for calls that prepare engines. `limit`: `rollout.start_timeout`, in seconds. `check`: `Cluster.check`, which raises if a
    process has died or is stopped. See `wait_for_all`."""
    return wait_for_all(engines, calls, doing=doing, key="rollout.start_timeout", limit=limit, check=check)


def shares_devices(cluster: ClusterConfig, platform: Any) -> bool:
    """Return whether the policy's engines use the trainers' devices in turn. CPU processes share cores instead."""
    return cluster.placement == "colocated" and platform.kind.ray_resource is not None


def wait_until_asleep(
    engines: Sequence[EngineHandle], loading: Sequence[Future[Any]], limit: float, check: Callable[[], None]
) -> list[dict[str, Any]]:
    """Wait until engines are loaded, and put them to sleep. Returns their descriptions. `limit`, `check`: see `wait_for_start`.

    An engine measures the free memory when it loads, so trainers of the same devices start afterwards.
    """
    descriptions = wait_for_start(engines, loading, doing="load", limit=limit, check=check)
    wait_for_start(engines, [engine.sleep() for engine in engines], doing="go to sleep", limit=limit, check=check)
    return descriptions


def start_teacher(recipe: Recipe, platform: Any, cluster: Cluster) -> list[TeacherHandle]:
    """Start the engines of all teachers. Call it after `start_engines`: the cluster assigns devices to policy, teacher, judge
    in this order."""
    return [TeacherHandle(_start_teacher(recipe, platform, cluster, spec)) for spec in teacher_specs(recipe)]


def restart_teacher(recipe: Recipe, platform: Any, cluster: Cluster, engine: TeacherHandle) -> None:
    """Start a new process of a teacher's engine on the devices of the old one, which is ended."""
    spec = next(spec for spec in teacher_specs(recipe) if spec.name == engine.name)
    engine.service = _start_teacher(recipe, platform, cluster, spec, engine.service)


def start_judge(recipe: Recipe, platform: Any, cluster: Cluster) -> list[JudgeHandle]:
    """Start the judge's engines; none if no reward uses the judge, and in a replay."""
    names = [f"judge{number}" for number in range(recipe.judge.engines if recipe.asks_judge else 0)]
    return [JudgeHandle(_start_judge(recipe, platform, cluster, name)) for name in names]


def restart_judge(recipe: Recipe, platform: Any, cluster: Cluster, engine: JudgeHandle) -> None:
    """Start a new process of a judge's engine on the devices of the old one, which is ended."""
    engine.service = _start_judge(recipe, platform, cluster, engine.name, engine.service)


def _start_teacher(
    recipe: Recipe, platform: Any, cluster: Cluster, spec: EngineSpec, replaces: Service | None = None
) -> Service:
    engine, essential = recipe.teacher.engine, recipe.teacher.restarts == 0
    return _start(TEACHER_SERVER, engine, spec, (), recipe, platform, cluster, replaces=replaces, essential=essential)


def _start_judge(
    recipe: Recipe, platform: Any, cluster: Cluster, name: str, replaces: Service | None = None
) -> Service:
    judge = recipe.judge
    args, essential = (judge, recipe.train.seed if samples_are_seeded(recipe) else None), judge.restarts == 0
    spec = judge_spec(recipe, name)
    return _start(
        JUDGE_SERVER, judge.engine, spec, args, recipe, platform, cluster, replaces=replaces, essential=essential
    )


def _start(
    server: str,
    engine: str,
    spec: EngineSpec,
    args: tuple[Any, ...],
    recipe: Recipe,
    platform: Any,
    cluster: Cluster,
    *,
    replaces: Service | None = None,
    essential: bool = True,
    additional: bool = False,
    keep: bool = False,
) -> Service:
    """Start the process of an engine. `args`: arguments of the class `server` after the engine's name and spec. `replaces` and the
    next two: see `Cluster.start_service`. keep: it may outlive its controller."""
    spec = replace(spec, device=platform.name)
    env = process_env(engine, recipe.cluster.threads) | engine_environment(recipe, platform, engine, spec).environment()
    return cluster.start_service(
        server,
        (engine, spec, *args),
        name=spec.name,
        devices=spec.tensor_parallel,
        env=env,
        replaces=replaces,
        essential=essential,
        additional=additional,
        settings=digest_of(server, engine, spec, args, env) if keep else "",
    )


def engine_environment(recipe: Recipe, platform: Any, engine: str, spec: EngineSpec) -> RoleSettings:
    """Return the environment variables of an engine's process."""
    defaults = platform.engines_env(recipe.train.deterministic)
    return engine_settings(engine, spec, defaults, platform.name, variables(recipe.cluster.environment, "engines"))


def check_in_flight(recipe: Recipe, descriptions: Sequence[dict[str, Any]]) -> None:
    """Raise RecipeError if an engine cannot take new weights while requests run, and `rollout.at_update` needs it."""
    if update_rule(recipe) not in ("refresh", "keep"):
        return
    for each in descriptions:
        name = f"{each['engine']} {each['version']}"
        if each.get("ends_requests_asleep"):
            problem = f"{name} ends running requests when it sleeps, and colocated engines sleep while trainers compute"
            remedy = "set rollout.max_staleness=0, or install vLLM 0.23 or later"
            raise RecipeError("rollout.max_staleness", problem, remedy, value=recipe.rollout.max_staleness)
        if not each["can_update_in_flight"]:
            # Colocated engines cannot drain with requests of the next batches.
            drain = "max_staleness=0" if recipe.cluster.placement == "colocated" else "at_update=drain"
            problem = f"{name} cannot take new weights while requests run"
            remedy = f"set rollout.{drain}, or install another version"
            raise RecipeError("rollout.at_update", problem, remedy, value=update_rule(recipe))
