"""Memory of each engine that training starts, counted from the engine's model, and its room for a KV cache."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.rank_client import ENGINES, EngineRequest, RankClient
from megarl.commands.plan.count.types import EngineRank, Refusal
from megarl.commands.plan.show.units import GIB, Unit, sized
from megarl.engines import limits_of
from megarl.engines.base import EngineLimits, EngineSpec
from megarl.engines.specs import first_specs, policy_spec
from megarl.errors import InputError
from megarl.platform.kinds import is_accelerator
from megarl.recipe.schema import Recipe

NO_VLLM = "vLLM is not installed here, and engines are counted from its model"
_MOST = 0.95  # largest share of a device for an engine: drivers and communication need the rest


@dataclass(frozen=True)
class Engine:
    """The engines of one model: policy (`section` rollout), teacher or judge."""

    section: str
    name: str  # vllm, sglang
    count: int
    spec: EngineSpec
    limits: EngineLimits
    counts: Mapping[str, Any] | None  # fields of `vllm_memory.RankCounts`
    not_counted: str | None = None  # the reason if `counts` is None


def engines(recipe: Recipe, models: Mapping[str, dict[str, Any]], client: RankClient) -> list[Engine]:
    """Count the engines of a recipe. `models`: section (`EngineSpec.recipe_section`) -> config.json. `client`: a client of
    `ENGINES`."""
    kinds = [(name, spec) for name, spec in first_specs(recipe, training=True) if _is_started(recipe, spec)]
    result = []
    with tempfile.TemporaryDirectory() as directory:
        for name, spec in kinds:
            spec = _planned(recipe, spec)
            count = getattr(recipe, spec.recipe_section).engines
            result.append(Engine(spec.recipe_section, name, count, spec, limits_of(name, spec), None))
        countable = [engine for engine in result if engine.section in models]
        answers = _answers(countable, models, Path(directory), client) if countable else {}
    return [_with(engine, answers.get(engine.section)) for engine in result]


def min_engine_bytes(recipe: Recipe, memory: float) -> float:
    """Return a lower bound of the memory that a policy engine takes from a device of `memory` GiB, from its arguments."""
    if recipe.train.source != "rollout":
        return 0.0
    limits = _policy(recipe).limits
    return (limits.share or 0.0) * memory * 2**30 if limits.cache is None else float(limits.cache)


def policy_engines(recipes: list[Recipe], model: dict[str, Any], deadline: float) -> list[Engine]:
    """Count the policy engines of several recipes. `model`: config.json. Raises InputError after `deadline`
    (time.monotonic)."""
    if importlib.util.find_spec("vllm") is None:
        return [_with(_policy(recipe), {"error": NO_VLLM}) for recipe in recipes]
    with tempfile.TemporaryDirectory() as directory, RankClient(child=ENGINES) as client:
        Path(directory, "config.json").write_text(json.dumps(model), encoding="utf-8")
        kinds = [_policy(recipe) for recipe in recipes]
        futures = [client.submit(_question(engine, directory)) for engine in kinds]
        try:
            answers = [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except TimeoutError as error:
            raise InputError("Engines were not counted in time, so no layout can be shown to fit.") from error
    return [_with(engine, answer) for engine, answer in zip(kinds, answers, strict=True)]


def limits_of_policy(recipe: Recipe) -> EngineLimits:
    """Return the limits of the policy's engines."""
    return _policy(recipe).limits


def _policy(recipe: Recipe) -> Engine:
    name = recipe.rollout.engine
    spec = _planned(recipe, policy_spec(recipe, "engine0", load_weights=False))
    return Engine("rollout", name, recipe.rollout.engines, spec, limits_of(name, spec), None)


def _planned(recipe: Recipe, spec: EngineSpec) -> EngineSpec:
    """Convert a spec's arguments to plain values, and set the device if it changes the engine's memory."""
    device = None if is_accelerator(recipe.cluster.device) else recipe.cluster.device
    return replace(spec, engine_args=dict(spec.engine_args), device=device)


def _question(engine: Engine, directory: Path | str) -> EngineRequest:
    return EngineRequest(engine.name, replace(engine.spec, model_path=str(directory)))


def _is_started(recipe: Recipe, spec: EngineSpec) -> bool:
    return spec.recipe_section != "rollout" or recipe.train.source == "rollout"


def _answers(
    engines: list[Engine], models: Mapping[str, dict[str, Any]], directory: Path, client: RankClient
) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        return {engine.section: {"error": NO_VLLM} for engine in engines}
    futures = {}
    for engine in engines:
        model_directory = directory / engine.section
        model_directory.mkdir()
        (model_directory / "config.json").write_text(json.dumps(models[engine.section]), encoding="utf-8")
        futures[engine.section] = client.submit(_question(engine, model_directory))
    return {section: future.result() for section, future in futures.items()}


def _with(engine: Engine, answer: dict[str, Any] | None) -> Engine:
    if answer is None:
        return replace(engine, not_counted=f"the config.json of {engine.spec.model_path} is not here")
    if "error" in answer:
        return replace(engine, not_counted=answer["error"])
    return replace(engine, counts=answer)


# --- KV cache ------------------------------------------------------------------------------------


def rank_of(engine: Engine, memory: float | None, communicators: int = 0) -> EngineRank | None:
    """Return the memory of one engine device with `memory` GiB. None if the engine's model was not counted.

    `communicators`: bytes of the engine's communicators, which vLLM subtracts from its share before it sizes the cache.
    """
    counts, limits = engine.counts, engine.limits
    if counts is None:
        return None
    weights = counts["weights"] + counts["tables"]
    cache = limits.cache
    if cache is None and memory is not None and limits.share is not None:
        step = counts["working"] if limits.covers_step else 0
        cache = max(0, int(limits.share * memory * GIB) - weights - step - communicators)
    of_sequence = counts["cache_per_token"] * engine.spec.max_model_len
    return EngineRank(
        devices=engine.count * engine.spec.tensor_parallel,
        parameters=counts["parameters"],
        weights=weights,
        largest=counts["largest"],
        asleep=counts["asleep"],
        remade=counts["remade"],
        cache_per_token=counts["cache_per_token"],
        working=counts["working"],
        cache=cache,
        sequences=None if cache is None else cache / of_sequence,
    )


def not_counted(engine: Engine, memory: float | None) -> str | None:
    """Return a sentence on unknown memory of an engine's devices. None if all is known, or without a device."""
    rank = rank_of(engine, memory)
    if rank is None:
        return f"{engine.section}: memory of its engines is not known: {engine.not_counted}"
    if memory is None or rank.cache is not None:
        return None
    key = f"{engine.section}.engine_args.{engine.limits.share_key}"
    return f"{engine.section}: memory of its engines is not known: {key} is not set, so they choose it at start"


def too_small(engine: Engine, rank: EngineRank, memory: float | None) -> Refusal | None:
    """Return a refusal if the KV cache has no room for one sequence of the longest length: the engine would not start."""
    if rank.cache is None or rank.sequences is None or rank.sequences >= 1:
        return None
    limits, longest = engine.limits, engine.spec.max_model_len
    of_sequence = rank.cache_per_token * longest
    needed_room = (
        f"one of {longest:,} tokens takes {sized(of_sequence)} of the KV cache on each of the engine's devices"
    )
    if limits.cache is not None or memory is None or limits.share is None:
        return Refusal(
            f"{engine.section}.engine_args.kv_cache_memory_bytes",
            f"{rank.cache:,} bytes have room for {rank.sequences:.2f} sequences: {needed_room}",
            f"set it to {math.ceil(of_sequence)} or more",
        )
    step = rank.working if limits.covers_step else 0
    share = limits.share * memory * GIB
    unit = Unit.of(share)
    explanation = (
        f"{limits.share:g} x {unit.whole(memory * GIB)} {unit.name} = {unit.show(share)}, less weights "
        + f"{unit.show(rank.weights)}"
        + (f" and the largest step {unit.show(step)}" if step else "")
        + f", leaves {unit.show(rank.cache)}: room for {rank.sequences:.2f} sequences, and {needed_room}"
    )
    needed = math.ceil((rank.weights + step + of_sequence) / (memory * GIB) * 100) / 100
    key = f"{engine.section}.engine_args.{limits.share_key}"
    if needed <= _MOST:
        return Refusal(key, explanation, f"set it to {needed:g} or more")
    tensor = f"{engine.section}.tensor_parallel"
    return Refusal(
        key,
        explanation,
        f"{needed:g} would be needed, and at most {_MOST:g} is possible: raise {tensor} above "
        f"{engine.spec.tensor_parallel}, so that each device has less of weights and cache",
    )
