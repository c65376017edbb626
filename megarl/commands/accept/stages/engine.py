"""Stage 4: an engine of tiny models: samples, log-probs against the trainer, sleep, leaks, abort, the recipe's engine."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.failures import CallFailed
from megarl.cluster.local import LocalService
from megarl.commands.accept.context import Context
from megarl.commands.accept.engine_probe import (
    CALL_SECONDS,
    START_SECONDS,
    TRAINER,
    gap,
    requests,
    shares_devices,
    start_engine,
    timed,
    tiny_recipe,
)
from megarl.commands.accept.families import write_family
from megarl.commands.accept.ranks import LocalRanks, rank_environment

GAP = 0.02  # nats, mean
FREED = 0.9  # of what the engine took when it started; the rest is its context, graphs and communicators
LEAK = 10.0  # MiB a cycle, of host or device memory
CYCLES = 20
ABORT_SECONDS = 10.0


def run(context: Context) -> None:
    """The dense model on a CPU; on devices also the models with experts, without and with graphs."""
    families = ("dense",) if context.tiny else ("dense", "moe", "mla")
    for family in families:
        write_family(family, context.shared)
        recipe = tiny_recipe(context, family, 1)
        eager = {} if context.tiny else {"enforce_eager": family != "dense"}
        context.doing(f"starting an engine and a trainer of the {family} model")
        trainers = LocalRanks(context.folder / f"{family}-trainer", TRAINER, (recipe, 10), 1, rank_environment(context))
        try:
            if shares_devices(context):
                trainers.call("offload_optimizer")
                trainers.call("offload_weights")
            engine = start_engine(context, recipe, load_weights=True, **eager)
            try:
                _of_family(context, family, engine, trainers)
            finally:
                engine.stop()
        finally:
            trainers.close()
    _of_recipe(context)


def _of_family(context: Context, family: str, engine: LocalService, trainers: LocalRanks) -> None:
    free = timed(engine.call("free_memory"))[0]
    info, seconds = timed(engine.call("start"), START_SECONDS)
    context.figure(f"{family}: start", seconds, unit="s")
    context.equal(
        f"{family}: device", info["device"], context.device, cause="the engine runs on another kind of device"
    )
    context.doing(f"{family}: greedy samples, twice")
    asked = requests(family, 4, 16, temperature=0.0)
    first, second = (timed(engine.call("generate", asked))[0] for _ in range(2))
    same = all(np.array_equal(one.tokens, other.tokens) for one, other in zip(first, second, strict=True))
    context.equal(f"{family}: greedy samples repeat", same, True, cause="two greedy samples of one prompt differ")
    context.doing(f"{family}: log-probs of samples against the trainer")
    asked = requests(family, 8, 24)
    sampled = timed(engine.call("generate", asked))[0]
    _memory(context, family, engine, free, info)
    if shares_devices(context):
        trainers.call("onload")
    context.at_most(
        f"{family}: log-probs against the trainer", gap(family, asked, sampled, trainers), limit=GAP, unit="nats",
        cause="engine and trainer compute different models, or read other weights",
    )  # fmt: skip
    _abort(context, family, engine)


def _memory(context: Context, family: str, engine: LocalService, free: float | None, info: dict[str, Any]) -> None:
    """Sleep and wake; how much is freed, and how much more stays with every cycle."""
    if not info["can_sleep"]:
        context.not_run(f"{family}: sleep and wake", "the engine's memory is the host's: there is nothing to free")
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
    """Growth per cycle: the median of the differences between all pairs (Theil and Sen), which no single jump moves."""
    rows, columns = np.triu_indices(len(values), 1)
    return float(np.median((values[columns] - values[rows]) / (columns - rows)))


def _abort(context: Context, family: str, engine: LocalService) -> None:
    """A request that is aborted ends soon, and the engine goes on."""
    context.doing(f"{family}: abort of a request in flight")
    running = engine.call("generate", requests(family, 4, 180))
    time.sleep(0.3)
    began = time.monotonic()
    engine.call("abort").result(CALL_SECONDS)
    outcome = "finished before the abort"
    try:
        running.result(ABORT_SECONDS)
    except FutureTimeout:
        outcome = "still running"
    except CallFailed as error:
        outcome = "aborted" if "GenerationAborted" in str(error) else str(error)
    context.equal(
        f"{family}: abort", outcome in ("aborted", "finished before the abort"), True, cause=f"the request is {outcome}"
    )
    context.at_most(f"{family}: abort", time.monotonic() - began, limit=ABORT_SECONDS, unit="s")
    again = timed(engine.call("generate", requests(family, 2, 4)))[0]
    context.equal(f"{family}: samples after an abort", len(again), 2)


def _of_recipe(context: Context) -> None:
    """One engine as the recipe has it, with dummy weights and few layers."""
    recipe = context.recipe
    name = "the recipe's engine"
    if recipe is None or recipe.train.source != "rollout":
        context.not_run(name, "no recipe that samples was named")
        return
    if context.tiny:
        context.not_run(name, "a CPU runs the recipe's twin instead: stage 6")
        return
    if not (Path(recipe.model.path) / "config.json").is_file():
        context.not_run(name, f"{recipe.model.path} holds no config.json: fetch the model, or its config and tokenizer")
        return
    if recipe.rollout.data_parallel > 1 or recipe.rollout.tensor_parallel > context.settings.devices:
        devices = recipe.rollout.data_parallel * recipe.rollout.tensor_parallel
        context.not_run(name, f"it spreads over {devices} devices in several engines: no stage starts it")
        return
    from dataclasses import replace

    from megarl import engines
    from megarl import platform as platforms
    from megarl.commands.accept.engine_probe import PROBE
    from megarl.engines.specs import policy_spec

    context.doing("starting the recipe's engine with dummy weights and 4 layers")
    args = {**recipe.rollout.engine_args, "hf_overrides": {"num_hidden_layers": 4}, "load_format": "dummy"}
    spec = replace(policy_spec(recipe, "recipe", load_weights=True), engine_args=args, device=context.device)
    env = engines.engine_env(recipe.rollout.engine, platforms.select(context.device).rollout_env(), 4, args)
    engine = LocalService(
        PROBE, (recipe.rollout.engine, spec), name="recipe's engine", log=context.folder / "recipe.log", env=env
    )
    try:
        _, seconds = timed(engine.call("start"), START_SECONDS)
        context.figure(f"{name}: start", seconds, unit="s")
        sampled = timed(engine.call("generate", requests("dense", 32, 16)))[0]
        context.equal(f"{name}: samples", len(sampled), 32)
    finally:
        engine.stop()
