"""Starting the engines of a run: the policy's, which sample, the teacher's, which read, and the judge's, which judge."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.agents.setup import AgentSetup
from megarl.cluster import trainer_notices
from megarl.cluster.base import Cluster, Service
from megarl.data.images import ImageReader
from megarl.engines import engine_settings, process_env
from megarl.engines.base import EngineSpec, EngineTraces, Seat
from megarl.engines.specs import first_specs, judge_spec, policy_spec, teacher_spec
from megarl.observe.run_dir import RunDirectory
from megarl.platform.environment import RoleSettings
from megarl.preflight.run import Prepared
from megarl.recipe.environment import variables
from megarl.recipe.judge import uses_judge
from megarl.recipe.observe import trace_options, traces_notice
from megarl.recipe.schema import Recipe
from megarl.recipe.seeded import seeds_notice
from megarl.weight_sync.handover import wait_for_engines

ROLLOUT_SERVER = "megarl.rollout.server:RolloutServer"
TEACHER_SERVER = "megarl.rollout.teacher_server:TeacherServer"
JUDGE_SERVER = "megarl.rollout.judge.server:JudgeServer"


def environment_notices(recipe: Recipe, platform: Any, *, training: bool = True) -> list[str]:
    """Notices of variables that the shell of this command has otherwise than the recipe's processes would, and of those that
    the recipe sets or needs. `training`: false for `megarl eval`, which has no trainers. Raises RecipeError for a variable
    of `cluster.environment` with which processes would be wrong."""
    said = trainer_notices(recipe, platform) if training else []
    if training:
        said += [notice for notice in (seeds_notice(recipe), traces_notice(recipe)) if notice]
    for engine, spec in first_specs(recipe, training=training):
        if training and recipe.train.source != "rollout" and spec.recipe_section == "rollout":
            continue
        settings = _settings(recipe, platform, engine, spec)
        said += settings.notices()
        said += [f"engines have {name}={value}: {why}" for name, value, why in settings.computed()]
        if spec.deterministic and engine == "vllm" and platform.deterministic_rollout_env():
            said.append(
                "train.deterministic: engines run in vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT=1), which is slower and in "
                "beta; docs/numerics.md says what it covers"
            )
    return list(dict.fromkeys(said))


def start_engines(
    recipe: Recipe, prepared: Prepared, platform: Any, cluster: Cluster, *, load_weights: bool
) -> list[Service]:
    """The policy's engines, beginning to load; `load_weights`: those of `model.path`, which no exchange replaces."""
    rollout = recipe.rollout
    services = []
    for number in range(rollout.engines):
        spec = replace(policy_spec(recipe, f"engine{number}", load_weights=load_weights), device=platform.name)
        if number in recipe.observe.profile_engines and not load_weights:
            folder = RunDirectory(Path(recipe.runs_dir, recipe.name)).profile / f"engine{number}"
            spec = replace(spec, traces=EngineTraces(str(folder), trace_options(recipe.observe)))
        tokenizer = recipe.model.tokenizer or recipe.model.path
        images = ImageReader.of(recipe.model.path, recipe.data)
        scoring = (recipe.reward, prepared.data_sources, recipe.sandbox)
        args = (rollout.engine, spec, tokenizer, *scoring, images, AgentSetup.of(recipe), uses_judge(recipe))
        services.append(_start(ROLLOUT_SERVER, rollout.engine, spec, args, recipe, platform, cluster))
    return services


def load_engines(recipe: Recipe, services: Sequence[Service]) -> list[Future[dict[str, Any]]]:
    """Calls that load the policy's engines and return what each says of itself. Consecutive engines form groups: these
    wait until the first of each has said where it meets."""
    size = recipe.rollout.data_parallel
    if size == 1:
        return [service.call("start") for service in services]
    firsts = services[::size]
    opening = [first.call("open_meeting_place", first.address) for first in firsts]
    seats: list[Seat] = wait_for_engines(
        firsts, opening, doing="say where its group meets", limit=recipe.rollout.start_timeout
    )
    return [
        service.call("start", replace(seats[number // size], rank=number % size, size=size))
        for number, service in enumerate(services)
    ]


def start_teacher(recipe: Recipe, platform: Any, cluster: Cluster) -> list[Service]:
    """The teacher's engines, beginning to load. After the policy's: devices are claimed in this order."""
    services = []
    for number in range(recipe.teacher.engines):
        spec = replace(teacher_spec(recipe, f"teacher{number}"), device=platform.name)
        args = (recipe.teacher.engine, spec)
        services.append(_start(TEACHER_SERVER, recipe.teacher.engine, spec, args, recipe, platform, cluster))
    return services


def start_judge(recipe: Recipe, platform: Any, cluster: Cluster) -> list[Service]:
    """The judge's engines, beginning to load; none where nobody asks one. After the teacher's, as `fixed_models` says."""
    judge = recipe.judge
    services = []
    for number in range(judge.engines if uses_judge(recipe) else 0):
        spec = replace(judge_spec(recipe, f"judge{number}"), device=platform.name)
        args = (judge.engine, spec, judge, recipe.train.seed if spec.seeded else None)
        services.append(_start(JUDGE_SERVER, judge.engine, spec, args, recipe, platform, cluster))
    return services


def _start(
    server: str,
    engine: str,
    spec: EngineSpec,
    args: tuple[Any, ...],
    recipe: Recipe,
    platform: Any,
    cluster: Cluster,
) -> Service:
    env = process_env(engine, recipe.cluster.threads) | _settings(recipe, platform, engine, spec).environment()
    return cluster.start_service(server, args, name=spec.name, devices=spec.tensor_parallel, env=env)


def _settings(recipe: Recipe, platform: Any, engine: str, spec: EngineSpec) -> RoleSettings:
    own = platform.engines_env(recipe.train.deterministic)
    return engine_settings(engine, spec, own, platform.name, variables(recipe, "engines"))
