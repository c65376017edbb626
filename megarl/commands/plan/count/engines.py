"""Memory of each engine that training starts, counted from the engine's model, and its room for a KV cache."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.rank_client import ENGINES, EngineRequest, RankClient
from megarl.commands.plan.count.types import EngineRank, Refusal
from megarl.commands.plan.show.units import GIB, Unit, sized
from megarl.engines import arguments_of
from megarl.engines.base import EngineLimits, EngineSpec, engine_name
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
    counts: EngineRank | None  # without the KV cache
    not_counted: str | None = None  # the reason if `counts` is None


def engines(recipe: Recipe, models: Mapping[str, dict[str, Any]], client: RankClient) -> list[Engine]:
    """Count the engines of a recipe. `models`: section (`EngineSpec.recipe_section`) -> config.json. `client`: a client of
    `ENGINES`."""
    uncounted = [_engine(recipe, name, spec) for name, spec in first_specs(recipe, training=True)]
    return _counted(uncounted, models, client)


def min_engine_bytes(recipe: Recipe, memory: float) -> float:
    """Return a lower bound of the memory that a policy engine takes from a device of `memory` GiB, from its arguments."""
    if recipe.train.source != "rollout":
        return 0.0
    limits = policy_engine(recipe).limits
    return (limits.share or 0.0) * memory * 2**30 if limits.cache is None else float(limits.cache)


def policy_engines(recipes: list[Recipe], model: dict[str, Any], deadline: float) -> list[Engine]:
    """Count the policy engines of several recipes. `model`: config.json. Raises InputError after `deadline`
    (time.monotonic)."""
    with RankClient(child=ENGINES) as client:
        try:
            return _counted([policy_engine(recipe) for recipe in recipes], {"rollout": model}, client, deadline)
        except FutureTimeout as error:
            raise InputError("Engines were not counted in time, so no layout can be shown to fit.") from error


def policy_engine(recipe: Recipe) -> Engine:
    """Return the policy's engines, uncounted."""
    return _engine(recipe, recipe.rollout.engine, policy_spec(recipe, engine_name(0), updated=True))


def _engine(recipe: Recipe, name: str, spec: EngineSpec) -> Engine:
    """Return an uncounted engine: arguments as plain values, the device only if it changes the engine's memory."""
    device = None if is_accelerator(recipe.cluster.device) else recipe.cluster.device
    spec = replace(spec, engine_args=dict(spec.engine_args), device=device)
    count = getattr(recipe, spec.recipe_section).engines
    return Engine(spec.recipe_section, name, count, spec, arguments_of(name).limits(spec), None)


def _counted(
    engines: list[Engine], models: Mapping[str, dict[str, Any]], client: RankClient, deadline: float = math.inf
) -> list[Engine]:
    """Return `engines` with their counts, or with the reason if they cannot be counted. Raises FutureTimeout after
    `deadline`."""
    installed = importlib.util.find_spec("vllm") is not None
    with tempfile.TemporaryDirectory() as directory:
        for section, model in models.items():
            (folder := Path(directory, section)).mkdir()
            (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        futures = [
            client.submit(EngineRequest(engine.name, replace(engine.spec, model_path=f"{directory}/{engine.section}")))
            if installed and engine.section in models
            else None
            for engine in engines
        ]
        result = []
        for engine, future in zip(engines, futures, strict=True):
            if engine.section not in models:
                reason = f"the config.json of {engine.spec.model_path} is not here"
                result.append(replace(engine, not_counted=reason))
                continue
            seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            answer = {"error": NO_VLLM} if future is None else future.result(seconds)
            error = answer.get("error")
            result.append(replace(engine, counts=None if error else EngineRank(**answer), not_counted=error))
    return result


# --- KV cache ------------------------------------------------------------------------------------


def rank_of(engine: Engine, memory: float | None, communicators: int = 0) -> EngineRank | None:
    """Return the memory of one engine device with `memory` GiB. None if the engine's model was not counted.

    `communicators`: bytes of the engine's communicators, which vLLM subtracts from its share before it sizes the cache.
    """
    rank, limits = engine.counts, engine.limits
    if rank is None:
        return None
    cache = limits.cache
    if cache is None and memory is not None and limits.share is not None:
        step = rank.working if limits.covers_step else 0
        cache = max(0, int(limits.share * memory * GIB) - rank.weights - step - communicators)
    sequences = None if cache is None else cache / (rank.cache_per_token * engine.spec.max_model_len)
    return replace(rank, devices=engine.count * engine.spec.tensor_parallel, cache=cache, sequences=sequences)


def not_counted(engine: Engine, memory: float | None) -> str | None:
    """Return a sentence on unknown memory of an engine's devices. None if all is known, or without a device."""
    rank = rank_of(engine, memory)
    if rank is None:
        return f"{engine.section}: memory of its engines is not known: {engine.not_counted}"
    if memory is None or rank.cache is not None:
        return None
    key = f"{engine.section}.engine_args.{engine.limits.share_key}"
    return f"{engine.section}: memory of its engines is not known: {key} is not set, so they choose it at start"


def too_small(engine: Engine, rank: EngineRank, memory: float) -> Refusal | None:
    """Return a refusal if the KV cache has no room for one sequence of the longest length: the engine would not start."""
    if rank.cache is None or rank.sequences is None or rank.sequences >= 1:
        return None
    limits, longest = engine.limits, engine.spec.max_model_len
    of_sequence = rank.cache_per_token * longest
    needed_room = (
        f"one of {longest:,} tokens takes {sized(of_sequence)} of the KV cache on each of the engine's devices"
    )
    if limits.cache is not None or limits.share is None:
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
