"""Stage 4, engine: samples of tiny models, log-probs against the trainer, sleep, leaks, abort; the recipe's engine."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl import engines
from megarl import platform as platforms
from megarl.cluster.failures import CallFailed
from megarl.cluster.torchrun.local_service import LocalService
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.cut import fewer_experts
from megarl.commands.accept.engine_probe import (
    CALL_SECONDS,
    PROBE,
    START_SECONDS,
    gap,
    requests,
    shares_devices,
    start_all,
    start_engine,
    start_trainers,
    timed,
    tiny_recipe,
    visible,
)
from megarl.commands.accept.ranks import LocalRanks, stop_all
from megarl.commands.accept.tiny_families import write_family
from megarl.engines.base import EngineSpec
from megarl.engines.specs import policy_spec
from megarl.engines.vllm.changing_weights import has_draft_weights
from megarl.errors import RecipeError
from megarl.hf.config import text_fields, with_layers
from megarl.preflight.models import config_of, read_hf_config
from megarl.recipe.environment import variables
from megarl.recipe.schema import Recipe, RolloutConfig
from megarl.types import Completion, GenerationRequest

GAP = 0.02  # nats, mean
FREED = 0.9  # share of the engine's memory that sleep frees; the rest is its context, graphs and communicators
LEAK = 10.0  # MiB of host or device memory per cycle
CYCLES = 20
ABORT_SECONDS = 10.0
SAME = 0.8  # share of tokens that must be equal with and without graphs; rounding may change the others
GROUP, LAYERS = 2, 4  # engines in a group of a tiny model; layers of the recipe's model
RECIPE_ENGINE = "the recipe's engine"


def run(context: StageContext) -> None:
    """Test engines of tiny models: on a CPU the dense one, on devices also MoE and MLA, graphs and an engine group.

    Then test the recipe's engine.
    """
    families = ("dense",) if context.tiny else ("dense", "moe", "mla")
    for family in families:
        recipe, trainers = _trainer(context, family)
        eager = {} if context.tiny else {"enforce_eager": family != "dense"}
        with closing(trainers):
            _leave(context, trainers)
            engine = start_engine(context, recipe, load_weights=True, **eager)
            try:
                replayed = _of_family(context, family, engine, trainers)
            finally:
                engine.stop()
            if family == "dense":
                _without_graphs(context, family, recipe, trainers, replayed)
    _group(context)
    _of_recipe(context)


def _trainer(context: StageContext, family: str) -> tuple[Recipe, LocalRanks]:
    """Return a recipe for the family's tiny model, and its trainer, which starts to load."""
    write_family(family, context.shared)
    recipe = tiny_recipe(context, family, 1)
    context.doing(f"starting an engine and a trainer of the {family} model")
    return recipe, start_trainers(context, recipe, 1, f"{family}-trainer")


def _leave(context: StageContext, trainers: LocalRanks) -> None:
    """Offload trainers that share the device, before an engine measures its free memory."""
    if shares_devices(context):
        trainers.call("offload_optimizer")
        trainers.call("offload_weights")


def _of_family(context: StageContext, family: str, engine: LocalService, trainers: LocalRanks) -> list[Completion]:
    """Test one engine. Return its samples of `replay_requests`."""
    free = timed(engine.call("free_memory"))[0]
    info, seconds = timed(engine.call("start"), START_SECONDS)
    context.figure(f"{family}: start", seconds, unit="s")
    context.equal(
        f"{family}: device", info["device"], context.device, cause="the engine runs on another kind of device"
    )
    context.doing(f"{family}: greedy samples, twice")
    greedy = requests(family, 4, 16, temperature=0.0)
    first, second = (timed(engine.call("generate", greedy))[0] for _ in range(2))
    same = all(np.array_equal(before.tokens, after.tokens) for before, after in zip(first, second, strict=True))
    context.equal(f"{family}: greedy samples repeat", same, True, cause="two greedy samples of one prompt differ")
    context.doing(f"{family}: log-probs of samples against the trainer")
    random = requests(family, 8, 24)
    sampled = timed(engine.call("generate", random))[0]
    replayed: list[Completion] = [] if context.tiny else timed(engine.call("generate", replay_requests(family)))[0]
    _memory(context, family, engine, free, info)
    if shares_devices(context):
        trainers.call("onload")
    context.at_most(
        f"{family}: log-probs against the trainer", gap(family, random, sampled, trainers), limit=GAP, unit="nats",
        cause="engine and trainer compute different models, or have different weights",
    )  # fmt: skip
    _abort(context, family, engine)
    return replayed


def replay_requests(family: str) -> list[GenerationRequest]:
    """Return short requests to compare samples with and without graphs. One different token changes all tokens after it."""
    return requests(family, 32, 8)


def _without_graphs(
    context: StageContext, family: str, recipe: Recipe, trainers: LocalRanks, replayed: list[Completion]
) -> None:
    """Restart the engine without graphs, and compare its samples with the ones that used graphs."""
    name = f"{family}: graphs against none"
    if context.tiny:
        context.not_run(name, "an engine on a CPU captures no graphs")
        return
    context.doing(f"{family}: an engine without graphs")
    _leave(context, trainers)
    engine = start_engine(context, recipe, load_weights=True, enforce_eager=True)
    try:
        start_all([engine])
        eager = timed(engine.call("generate", replay_requests(family)))[0]
    finally:
        engine.stop()
    check_replay(context, name, replayed, eager)


def check_replay(context: StageContext, name: str, replayed: list[Completion], eager: list[Completion]) -> None:
    """Check that both have the same tokens, and the same log-probs up to the first different token of each pair."""
    share, difference = agreement(replayed, eager)
    cause = "a graph was replayed with the inputs of another step, or captured other kernels"
    context.at_least(
        f"{name}, tokens", share, limit=SAME, unit="of the tokens until the first that differs", cause=cause
    )
    context.at_most(f"{name}, log-probs", difference, limit=GAP, unit="nats", cause=cause)


def agreement(first: list[Completion], second: list[Completion]) -> tuple[float, float]:
    """Return the share of tokens before the first different one, and the mean difference of their log-probs in nats.

    The difference is NaN if no token agrees.
    """
    agreed, tokens, differences = 0, 0, []
    for left, right in zip(first, second, strict=True):
        length = min(len(left.tokens), len(right.tokens))
        same = np.cumprod(left.tokens[:length] == right.tokens[:length]).astype(bool)
        agreed, tokens = agreed + int(same.sum()), tokens + max(len(left.tokens), len(right.tokens))
        differences.append(np.abs(left.log_probs[:length] - right.log_probs[:length])[same])
    apart = np.concatenate(differences) if differences else np.array([])
    return agreed / max(tokens, 1), float(apart.mean()) if len(apart) else math.nan


def _group(context: StageContext) -> None:
    """Test a group of two engines with expert parallelism and unequal loads.

    On a CPU it only runs for a recipe that has engine groups.
    """
    name, recipe = "a group of engines", context.recipe
    groups = recipe is not None and recipe.train.source == "rollout" and recipe.rollout.data_parallel > 1
    if context.tiny and not groups:
        context.not_run(name, "on a CPU, a recipe with rollout.data_parallel above 1 starts it")
        return
    if not context.tiny and context.settings.devices < GROUP:
        context.not_run(name, f"needs {GROUP} devices")
        return
    family = "mla" if groups and _is_latent(context) else "moe"
    tiny, trainers = _trainer(context, family)
    group: list[LocalService] = []
    try:
        for number in range(GROUP):
            group.append(start_engine(context, tiny, load_weights=True, number=number, group=GROUP, enforce_eager=True))
        infos, seconds = start_all(group)
        context.figure(f"{name}: start", seconds, unit="s")
        context.doing(f"{name}: samples of unequal loads")
        loads = [requests(family, 6, 16), requests(family, 1, 4)]
        sampled = _together(group, "generate", loads)
        if infos[0]["can_sleep"]:
            _together(group, "sleep")
            _together(group, "wake")
        for number, (load, samples) in enumerate(zip(loads, sampled, strict=True)):
            context.at_most(
                f"{name}: log-probs of engine {number} against the trainer", gap(family, load, samples, trainers),
                limit=GAP, unit="nats", cause="tokens are routed to other experts than in the trainer, or experts have other weights",
            )  # fmt: skip
    finally:
        stop_all(group)
        trainers.close()


def _together(group: list[LocalService], method: str, arguments: list[Any] | None = None) -> list[Any]:
    """Call all engines of a group at the same time, since they wait for each other. Return their results."""
    each = [()] * len(group) if arguments is None else [(argument,) for argument in arguments]
    calls = [engine.call(method, *args) for engine, args in zip(group, each, strict=True)]
    return [call.result(CALL_SECONDS) for call in calls]


def _is_latent(context: StageContext) -> bool:
    """Return True if the recipe's model has latent attention; False if its config.json is unknown."""
    assert context.recipe is not None
    try:
        config = config_of(context.recipe.model.path, Path(context.settings.recipe))
    except RecipeError:
        return False
    return bool(text_fields(config).get("kv_lora_rank"))


def _memory(context: StageContext, family: str, engine: LocalService, free: float | None, info: dict[str, Any]) -> None:
    """Check how much memory sleep frees, and how much memory every cycle of sleep and wake leaks."""
    if not info["can_sleep"]:
        context.not_run(f"{family}: sleep and wake", "the engine uses host memory, which sleep does not free")
        return
    cycles = 6 if context.tiny else CYCLES
    asleep: list[tuple[float, float]] = []
    awake = timed(engine.call("free_memory"))[0]
    for cycle in range(cycles):
        context.doing(f"{family}: sleep and wake, cycle {cycle + 1} of {cycles}")
        timed(engine.call("sleep"))
        asleep.append((timed(engine.call("resident"))[0], timed(engine.call("free_memory"))[0] or 0.0))
        for tag in ("weights", "kv_cache"):
            before = timed(engine.call("free_memory"))[0]
            timed(engine.call("wake", (tag,)))
            after = timed(engine.call("free_memory"))[0]
            if cycle == 0 and before is not None and after is not None:
                context.figure(f"{family}: memory that {tag} take back", before - after, unit="GiB")
    host, device = (np.array(column)[1:] * 1024 for column in zip(*asleep, strict=True))
    context.at_most(
        f"{family}: host memory kept by a cycle of sleep", slope(host), limit=LEAK, unit="MiB a cycle",
        cause=f"the host's memory grows with every sleep: {host[0]:.0f} to {host[-1]:.0f} MiB",
    )  # fmt: skip
    if free is not None and awake is not None:
        context.at_most(
            f"{family}: device memory kept by a cycle of sleep", slope(-device), limit=LEAK, unit="MiB a cycle",
            cause="the device's free memory shrinks with every sleep",
        )  # fmt: skip
        freed = (asleep[0][1] - awake) / max(free - awake, 1e-9)
        context.at_least(f"{family}: memory freed by sleep", freed, limit=FREED, unit="of what the engine took")


def slope(values: np.ndarray) -> float:
    """Return the growth per cycle: the median slope of all pairs (Theil and Sen), which is robust against single jumps."""
    rows, columns = np.triu_indices(len(values), 1)
    return float(np.median((values[columns] - values[rows]) / (columns - rows)))


def _abort(context: StageContext, family: str, engine: LocalService) -> None:
    """Check that an aborted request ends soon, and that the engine then samples again."""
    context.doing(f"{family}: abort of a request in flight")
    running = engine.call("generate", requests(family, 4, 180))
    time.sleep(0.1)
    began = time.monotonic()
    engine.call("abort").result(CALL_SECONDS)
    outcome = "finished before the abort"
    try:
        running.result(ABORT_SECONDS)
    except FutureTimeout:
        outcome = "still running"
    except CallFailed as error:
        outcome = "aborted" if "GenerationAborted" in str(error) else str(error)
    if outcome == "finished before the abort":
        context.not_run(f"{family}: abort", f"the request {outcome}")
    else:
        context.equal(f"{family}: abort", outcome == "aborted", True, cause=f"the request is {outcome}")
        context.at_most(f"{family}: abort", time.monotonic() - began, limit=ABORT_SECONDS, unit="s")
    again = timed(engine.call("generate", requests(family, 2, 4)))[0]
    context.equal(f"{family}: samples after an abort", len(again), 2)


def _of_recipe(context: StageContext) -> None:
    """Test the recipe's engine or engine group with dummy weights and few layers."""
    recipe = context.recipe
    if recipe is None or recipe.train.source != "rollout":
        context.not_run(RECIPE_ENGINE, "no recipe with sampling was named")
        return
    if context.tiny:
        context.not_run(RECIPE_ENGINE, "stage 6 runs a tiny copy of the recipe on a CPU instead")
        return
    if not (Path(recipe.model.path) / "config.json").is_file():
        context.not_run(
            RECIPE_ENGINE, f"{recipe.model.path} has no config.json: fetch the model, or its config and tokenizer"
        )
        return
    config = read_hf_config(recipe.model.path)
    if recipe.rollout.engine == "sglang" and "text_config" in config:
        context.not_run(
            RECIPE_ENGINE, "SGLang cannot override single fields of text_config, so its layers cannot be reduced"
        )
        return
    devices, parallel = context.settings.devices, recipe.rollout.tensor_parallel
    if parallel > devices:
        context.not_run(RECIPE_ENGINE, f"rollout.tensor_parallel={parallel}, and this node has {devices} devices")
        return
    if has_draft_weights(recipe.rollout.engine_args):
        context.not_run(
            f"{RECIPE_ENGINE}: drafts", "their weights are in the checkpoint, and the engine has other layers than it"
        )
    _sample(context, recipe, config, math.gcd(recipe.rollout.data_parallel, devices // parallel))


def _sample(context: StageContext, recipe: Recipe, config: dict[str, Any], size: int) -> None:
    """Start `size` of the recipe's engines in a group, and sample with them. `config`: the model's config.json."""
    context.doing(f"starting {size} of the recipe's engines with dummy weights and {LAYERS} layers")
    group: list[LocalService] = []
    try:
        for number in range(size):
            group.append(_recipe_engine(context, recipe, config, number, size))
        _, seconds = start_all(group)
        context.figure(
            f"{RECIPE_ENGINE}: layout",
            f"{size} x TP{recipe.rollout.tensor_parallel}; the recipe: {recipe.rollout.data_parallel} in a group",
        )
        context.figure(f"{RECIPE_ENGINE}: start", seconds, unit="s")
        for engine in group:
            timed(engine.call("sample_dummy_weights"))
        sampled = _together(group, "generate", [requests("dense", 32, 16)] * size)
        context.equal(f"{RECIPE_ENGINE}: samples", sum(map(len, sampled)), 32 * size)
    finally:
        stop_all(group)


def few_layers(rollout: RolloutConfig, config: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the recipe's overrides of config.json with few layers, and with its experts per rank in a group of `size`."""
    value = rollout.engine_args.get(engines.arguments_of(rollout.engine).OVERRIDES) or {}
    overrides: dict[str, Any] = json.loads(value) if isinstance(value, str) else dict(value)
    text = overrides.get("text_config") or {} if "text_config" in config else overrides
    fields = text_fields(config)
    small = {
        **text,
        **with_layers(fields, LAYERS, dense=LAYERS - 1),
        **fewer_experts(fields, size, rollout.data_parallel),
    }
    return {**overrides, "text_config": small} if "text_config" in config else small


def recipe_spec(context: StageContext, recipe: Recipe, config: dict[str, Any], number: int, size: int) -> EngineSpec:
    """Return the spec of the recipe's engine `number` in a group of `size`, with few layers and dummy weights.

    `config`: the model's config.json.
    """
    rollout = recipe.rollout
    overrides = few_layers(rollout, config, size)
    args = dict(rollout.engine_args)
    if has_draft_weights(args):
        del args["speculative_config"]
    args[engines.arguments_of(rollout.engine).OVERRIDES] = (
        json.dumps(overrides) if rollout.engine == "sglang" else overrides
    )
    return replace(
        policy_spec(recipe, f"recipe{number}", updated=False),
        engine_args=args, load_weights=False, data_parallel=size, device=context.device,
        expert_parallel=size > 1 or bool(rollout.expert_parallel),
    )  # fmt: skip


def _recipe_engine(
    context: StageContext, recipe: Recipe, config: dict[str, Any], number: int, size: int
) -> LocalService:
    """Start the recipe's engine `number` in a group of `size` like `start_engines`, except for layers and weights."""
    platform, rollout = platforms.select(context.device), recipe.rollout
    spec = recipe_spec(context, recipe, config, number, size)
    defaults = platform.engines_env(recipe.train.deterministic)
    settings = engines.engine_settings(
        rollout.engine, spec, defaults, platform.name, variables(recipe.cluster.environment, "engines")
    )
    first = number * rollout.tensor_parallel
    env = engines.process_env(rollout.engine, recipe.cluster.threads) | settings.environment()
    env |= visible(context, range(first, first + rollout.tensor_parallel))
    log = context.folder / f"recipe-{number}.log"
    return LocalService(PROBE, (rollout.engine, spec), name=f"the recipe's engine {number}", log=log, env=env)
