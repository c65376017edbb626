"""Starting the engines of a run: the policy's, which sample, and the teacher's, which read."""

from __future__ import annotations

from typing import Any

from megarl.algorithms.objective import teacher_top_k
from megarl.cluster.base import Cluster, Service
from megarl.config.schema import Recipe
from megarl.engines import engine_env
from megarl.engines.base import EngineSpec
from megarl.preflight import Prepared

ROLLOUT_SERVER = "megarl.rollout.server:RolloutServer"
TEACHER_SERVER = "megarl.rollout.teacher_server:TeacherServer"


def start_engines(
    recipe: Recipe, prepared: Prepared, platform: Any, cluster: Cluster, *, load_weights: bool
) -> list[Service]:
    """The policy's engines, beginning to load; `load_weights`: those of `model.path`, which no exchange replaces."""
    rollout = recipe.rollout
    services = []
    for number in range(rollout.engines):
        spec = EngineSpec(
            name=f"engine{number}",
            model_path=recipe.model.path,
            dtype=rollout.dtype or recipe.model.dtype,
            max_model_len=_longest(recipe),
            tensor_parallel=rollout.tensor_parallel,
            seed=recipe.train.seed,
            engine_args=rollout.engine_args,
            load_weights=load_weights,
            sleep_mode=recipe.cluster.placement == "colocated" and not load_weights,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            return_routed_experts=recipe.megatron.routing_replay == "rollout" and not load_weights,
        )
        tokenizer = recipe.model.tokenizer or recipe.model.path
        args = (rollout.engine, spec, tokenizer, recipe.reward, prepared.data_sources)
        services.append(_start(ROLLOUT_SERVER, rollout.engine, spec, args, recipe, platform, cluster))
    return services


def start_teacher(recipe: Recipe, platform: Any, cluster: Cluster) -> list[Service]:
    """The teacher's engines, beginning to load. After the policy's: devices are claimed in this order."""
    teacher = recipe.teacher
    assert teacher.path is not None
    services = []
    for number in range(teacher.engines):
        spec = EngineSpec(
            name=f"teacher{number}",
            model_path=teacher.path,
            dtype=teacher.dtype or recipe.model.dtype,
            max_model_len=_longest(recipe) + 1,  # an engine that reads a whole sample samples one token more
            tensor_parallel=teacher.tensor_parallel,
            seed=recipe.train.seed,
            engine_args=teacher.engine_args,
            prompt_top_k=teacher_top_k(recipe.algorithm),
            recipe_section="teacher",
        )
        args = (teacher.engine, spec)
        services.append(_start(TEACHER_SERVER, teacher.engine, spec, args, recipe, platform, cluster))
    return services


def _longest(recipe: Recipe) -> int:
    return recipe.data.max_prompt_length + recipe.rollout.max_response_length


def _start(
    server: str,
    engine: str,
    spec: EngineSpec,
    args: tuple[Any, ...],
    recipe: Recipe,
    platform: Any,
    cluster: Cluster,
) -> Service:
    env = engine_env(engine, platform.rollout_env(), recipe.cluster.threads)
    return cluster.start_service(server, args, name=spec.name, devices=spec.tensor_parallel, env=env)
