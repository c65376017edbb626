"""Specifications of a recipe's engines: policy, teacher and judge."""

from __future__ import annotations

import zlib

from megarl.algorithms.objective import needs_teacher, teacher_top_k
from megarl.engines.base import AdapterSpec, EngineSpec
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.lengths import longest_sample, longest_scored_sample
from megarl.recipe.derived.seeded import samples_are_seeded
from megarl.recipe.derived.weight_sync_route import wants_adapters
from megarl.recipe.judge import JUDGE
from megarl.recipe.schema import Recipe


def policy_spec(recipe: Recipe, name: str, *, load_weights: bool) -> EngineSpec:
    """Return the spec of a policy engine. `load_weights`: load `model.path` and never update it (evaluation)."""
    rollout = recipe.rollout
    adapters = AdapterSpec(recipe.lora.rank, tuple(recipe.lora.targets)) if wants_adapters(recipe) else None
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
        load_weights=load_weights,
        at_update="drain" if load_weights else update_rule(recipe),
        refresh_after=None if load_weights else rollout.refresh_after,
        sleep_mode=recipe.cluster.placement == "colocated" and not load_weights,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        fp32_head=recipe.megatron.fp32_head,
        return_routed_experts=recipe.megatron.routing_replay == "rollout" and not load_weights,
        adapters=None if load_weights else adapters,
    )


def teacher_spec(recipe: Recipe, name: str) -> EngineSpec:
    return _fixed_spec(
        recipe, "teacher", name, longest_scored_sample(recipe), prompt_top_k=teacher_top_k(recipe.algorithm)
    )


def judge_spec(recipe: Recipe, name: str) -> EngineSpec:
    return _fixed_spec(recipe, JUDGE, name, recipe.judge.max_prompt_length + recipe.judge.max_tokens)


def fixed_models(recipe: Recipe) -> list[str]:
    """Return the recipe's sections of fixed models with engines, in the order in which they claim devices."""
    used = {"teacher": needs_teacher(recipe.algorithm), JUDGE: recipe.asks_judge}
    return [section for section, is_used in used.items() if is_used]


def first_specs(recipe: Recipe, *, training: bool) -> list[tuple[str, EngineSpec]]:
    """Return (engine name, spec of its first engine) for each model with engines in training, or in `megarl eval`."""
    specs = [(recipe.rollout.engine, policy_spec(recipe, "engine0", load_weights=not training))]
    if training and needs_teacher(recipe.algorithm):
        specs.append((recipe.teacher.engine, teacher_spec(recipe, "teacher0")))
    if recipe.asks_judge:
        specs.append((recipe.judge.engine, judge_spec(recipe, "judge0")))
    return specs


def _fixed_spec(recipe: Recipe, section: str, name: str, longest: int, prompt_top_k: int | None = None) -> EngineSpec:
    """Return the spec of an engine of a fixed model, from its section of the recipe."""
    settings = recipe.judge if section == JUDGE else recipe.teacher
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
    """Return the seed of an engine's generator, which differs between engines if it draws for all requests."""
    seeded, seed = samples_are_seeded(recipe), recipe.train.seed
    return seed if seeded else zlib.crc32(f"{seed}/{name}".encode())
