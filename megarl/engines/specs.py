"""Specifications of a recipe's engines: policy, teacher and judge."""

from __future__ import annotations

import zlib

from megarl.algorithms.objective import needs_teacher, teacher_top_k
from megarl.engines.base import AdapterSpec, EngineSpec, engine_name
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.lengths import longest_sample, longest_scored_sample
from megarl.recipe.derived.seeded import samples_are_seeded
from megarl.recipe.derived.weight_sync_route import wants_adapters
from megarl.recipe.judge import JUDGE, JudgeConfig, TeacherConfig
from megarl.recipe.schema import Recipe


def policy_spec(recipe: Recipe, name: str, *, updated: bool) -> EngineSpec:
    """Return the spec of a policy engine. `updated`: weight syncs bring its weights; False: it keeps the weights of `model.path`
    (evaluation)."""
    rollout = recipe.rollout
    adapters = AdapterSpec(recipe.lora.rank, tuple(recipe.lora.targets)) if updated and wants_adapters(recipe) else None
    return EngineSpec(
        name=name,
        model_path=recipe.model.path,
        dtype=rollout.dtype or recipe.model.dtype,
        max_model_len=longest_sample(recipe),
        tensor_parallel=rollout.tensor_parallel,
        data_parallel=rollout.data_parallel,
        expert_parallel=rollout.spreads_experts,
        seed=_engine_seed(recipe, name),
        seeded=samples_are_seeded(recipe),
        deterministic=recipe.train.deterministic,
        engine_args=rollout.engine_args,
        load_weights=not updated,
        at_update=update_rule(recipe) if updated else "drain",
        refresh_after=rollout.refresh_after if updated else None,
        sleep_mode=updated and recipe.cluster.placement == "colocated",
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        quantization=rollout.quantization,
        fp32_head=recipe.megatron.fp32_head,
        return_routed_experts=updated and recipe.megatron.routing_replay == "rollout",
        adapters=adapters,
    )


def teacher_specs(recipe: Recipe) -> list[EngineSpec]:
    """Return the specs of the teachers' engines, teacher by teacher."""
    top_k, longest = teacher_top_k(recipe.algorithm), longest_scored_sample(recipe)
    teachers = [teacher for teacher in recipe.teacher.by_key.values() for _ in range(teacher.engines)]
    return [
        _fixed_spec(recipe, "teacher", teacher, f"teacher{number}", longest, prompt_top_k=top_k)
        for number, teacher in enumerate(teachers)
    ]


def judge_spec(recipe: Recipe, name: str) -> EngineSpec:
    return _fixed_spec(recipe, JUDGE, recipe.judge, name, recipe.judge.max_prompt_length + recipe.judge.max_tokens)


def fixed_models(recipe: Recipe, *, training: bool = True) -> list[str]:
    """Return the recipe's sections of fixed models with engines, in the order in which they claim devices.

    `training`: False for `megarl eval`, which needs no teacher.
    """
    used = {"teacher": training and needs_teacher(recipe.algorithm), JUDGE: recipe.asks_judge}
    return [section for section, is_used in used.items() if is_used]


def first_specs(recipe: Recipe, *, training: bool) -> list[tuple[str, EngineSpec]]:
    """Return (engine name, spec of its first engine) for each model with engines in training, or in `megarl eval`."""
    specs = []
    if recipe.train.source == "rollout":
        specs.append((recipe.rollout.engine, policy_spec(recipe, engine_name(0), updated=training)))
    fixed = fixed_models(recipe, training=training)
    if "teacher" in fixed:
        specs.append((recipe.teacher.engine, teacher_specs(recipe)[0]))
    if JUDGE in fixed:
        specs.append((recipe.judge.engine, judge_spec(recipe, "judge0")))
    return specs


def _fixed_spec(
    recipe: Recipe,
    section: str,
    settings: TeacherConfig | JudgeConfig,
    name: str,
    longest: int,
    prompt_top_k: int | None = None,
) -> EngineSpec:
    """Return the spec of an engine of a fixed model."""
    assert settings.path is not None
    return EngineSpec(
        name=name,
        model_path=settings.path,
        dtype=settings.dtype or recipe.model.dtype,
        max_model_len=longest,
        tensor_parallel=settings.tensor_parallel,
        seed=_engine_seed(recipe, name),
        seeded=samples_are_seeded(recipe),
        deterministic=recipe.train.deterministic,
        engine_args=settings.engine_args,
        prompt_top_k=prompt_top_k,
        recipe_section=section,
    )


def _engine_seed(recipe: Recipe, name: str) -> int:
    """Return the seed of an engine's generator. With unseeded requests, each engine gets a different seed."""
    seeded, seed = samples_are_seeded(recipe), recipe.train.seed
    return seed if seeded else zlib.crc32(f"{seed}/{name}".encode())
