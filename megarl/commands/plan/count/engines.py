"""What a rank of each engine that training starts holds and takes, by the engine's own model."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.ask import ENGINES, Asker, EngineQuestion
from megarl.engines import limits_of
from megarl.engines.base import EngineSpec
from megarl.engines.limits import Limits
from megarl.engines.specs import first_specs, policy_spec
from megarl.errors import InputError
from megarl.recipe.schema import Recipe

NO_VLLM = "vLLM is not installed here, whose model would tell"


@dataclass(frozen=True)
class Engine:
    """The engines of one model: the policy's (`section` rollout), the teacher's, the judge's."""

    section: str
    name: str  # vllm, sglang
    count: int
    spec: EngineSpec
    limits: Limits
    counts: Mapping[str, Any] | None  # `vllm_counts.RankCounts`
    not_counted: str | None = None  # why there are none


def engines(recipe: Recipe, models: Mapping[str, dict[str, Any]], asker: Asker) -> list[Engine]:
    """`models`: sections, as of `EngineSpec.recipe_section`, -> config.json of what their engines serve. `asker`: of
    `ENGINES`."""
    kinds = [(name, spec) for name, spec in first_specs(recipe, training=True) if _is_started(recipe, spec)]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for name, spec in kinds:
            spec = _planned(recipe, spec)
            count = getattr(recipe, spec.recipe_section).engines
            found.append(Engine(spec.recipe_section, name, count, spec, limits_of(name, spec), None))
        known = [engine for engine in found if engine.section in models]
        answers = _answers(known, models, Path(directory), asker) if known else {}
    return [_with(engine, answers.get(engine.section)) for engine in found]


def taken_at_least(recipe: Recipe, memory: float) -> float:
    """Bytes that the policy's engines take of a device of `memory` GiB as they sample, by their arguments alone."""
    if recipe.train.source != "rollout":
        return 0.0
    limits = _policy(recipe).limits
    return (limits.share or 0.0) * memory * 2**30 if limits.cache is None else float(limits.cache)


def policies(recipes: list[Recipe], model: dict[str, Any], deadline: float) -> list[Engine]:
    """Of several recipes, the policy's engines. `model`: its config.json. `deadline`, of time.monotonic: raises
    InputError where they are not counted by then."""
    if importlib.util.find_spec("vllm") is None:
        return [_with(_policy(recipe), {"error": NO_VLLM}) for recipe in recipes]
    with tempfile.TemporaryDirectory() as directory, Asker(child=ENGINES) as asker:
        Path(directory, "config.json").write_text(json.dumps(model), encoding="utf-8")
        found = [_policy(recipe) for recipe in recipes]
        futures = [asker.submit(_question(engine, directory)) for engine in found]
        try:
            answers = [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except TimeoutError as error:
            raise InputError("What engines hold was not counted in time: nothing can be said to fit.") from error
    return [_with(engine, answer) for engine, answer in zip(found, answers, strict=True)]


def limits_of_policy(recipe: Recipe) -> Limits:
    """Of the policy's engines."""
    return _policy(recipe).limits


def _policy(recipe: Recipe) -> Engine:
    name = recipe.rollout.engine
    spec = _planned(recipe, policy_spec(recipe, "engine0", load_weights=False))
    return Engine("rollout", name, recipe.rollout.engines, spec, limits_of(name, spec), None)


def _planned(recipe: Recipe, spec: EngineSpec) -> EngineSpec:
    """Plain values, of which a recipe's are not, and the device where it makes a difference to what an engine takes."""
    on_cpu = "cpu" if recipe.cluster.device == "cpu" else None
    return replace(spec, engine_args=dict(spec.engine_args), device=on_cpu)


def _question(engine: Engine, place: Path | str) -> EngineQuestion:
    return EngineQuestion(engine.name, replace(engine.spec, model_path=str(place)))


def _is_started(recipe: Recipe, spec: EngineSpec) -> bool:
    return spec.recipe_section != "rollout" or recipe.train.source == "rollout"


def _answers(
    asked: list[Engine], models: Mapping[str, dict[str, Any]], directory: Path, asker: Asker
) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        return {engine.section: {"error": NO_VLLM} for engine in asked}
    futures = {}
    for engine in asked:
        place = directory / engine.section
        place.mkdir()
        (place / "config.json").write_text(json.dumps(models[engine.section]), encoding="utf-8")
        futures[engine.section] = asker.submit(_question(engine, place))
    return {section: future.result() for section, future in futures.items()}


def _with(engine: Engine, answer: dict[str, Any] | None) -> Engine:
    if answer is None:
        return replace(engine, not_counted=f"the config.json of {engine.spec.model_path} is not here")
    if "error" in answer:
        return replace(engine, not_counted=answer["error"])
    return replace(engine, counts=answer)
