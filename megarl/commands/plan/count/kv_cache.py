"""What is left on an engine's devices for its KV cache. Pure."""

from __future__ import annotations

import math

from megarl.commands.plan.count.engines import Engine
from megarl.commands.plan.count.types import EngineRank, Refusal
from megarl.commands.plan.show.units import GIB, Unit, sized

_MOST = 0.95  # of a device's memory that an engine may be given: drivers and communication take the rest


def rank_of(engine: Engine, memory: float | None, communicators: int = 0) -> EngineRank | None:
    """One device of `engine`, of a device with `memory` GiB; None where the engine's model could not be counted.
    `communicators`: bytes of the engine's own, which vLLM takes off its share before it sizes the cache."""
    counts, limits = engine.counts, engine.limits
    if counts is None:
        return None
    weights = counts["weights"] + counts["beside"]
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
    """What is not known of an engine's devices, and why; None where all of it is, and without a device."""
    rank = rank_of(engine, memory)
    if rank is None:
        return f"{engine.section}: what its engines hold is not known: {engine.not_counted}"
    if memory is None or rank.cache is not None:
        return None
    key = f"{engine.section}.engine_args.{engine.limits.share_key}"
    return f"{engine.section}: how much of a device its engines take is not known: {key} is not set, so they find out"


def too_small(engine: Engine, rank: EngineRank, memory: float | None) -> Refusal | None:
    """Where the cache has no room for one sequence of the longest length, with which no engine starts."""
    if rank.cache is None or rank.sequences is None or rank.sequences >= 1:
        return None
    limits, longest = engine.limits, engine.spec.max_model_len
    of_sequence = rank.cache_per_token * longest
    told = f"one of {longest:,} tokens takes {sized(of_sequence)} of the KV cache on each of the engine's devices"
    if limits.cache is not None or memory is None or limits.share is None:
        return Refusal(
            f"{engine.section}.engine_args.kv_cache_memory_bytes",
            f"{rank.cache:,} bytes have room for {rank.sequences:.2f} sequences: {told}",
            f"set it to {math.ceil(of_sequence)} or more",
        )
    step = rank.working if limits.covers_step else 0
    share = limits.share * memory * GIB
    unit = Unit.of(share)
    told = (
        f"{limits.share:g} x {unit.whole(memory * GIB)} {unit.name} = {unit.show(share)}, less weights "
        + f"{unit.show(rank.weights)}"
        + (f" and the largest step {unit.show(step)}" if step else "")
        + f", leaves {unit.show(rank.cache)}: room for {rank.sequences:.2f} sequences, and {told}"
    )
    needed = math.ceil((rank.weights + step + of_sequence) / (memory * GIB) * 100) / 100
    key = f"{engine.section}.engine_args.{limits.share_key}"
    if needed <= _MOST:
        return Refusal(key, told, f"set it to {needed:g} or more")
    tensor = f"{engine.section}.tensor_parallel"
    return Refusal(
        key,
        told,
        f"{needed:g} would be needed, of which no more than {_MOST:g} can be given: raise {tensor} above "
        f"{engine.spec.tensor_parallel}, which cuts weights and cache",
    )
