"""Checks of the section `exchange`: the weight sync from trainers to engines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.exchange import is_sharded, wants_adapters, why_not_sharded
from megarl.recipe.schema import ExchangeConfig, Recipe


def exchange_errors(recipe: Recipe) -> Iterator[RecipeError]:
    exchange = recipe.exchange
    if not recipe.lora.rank and exchange.adapters != "auto":
        problem = "lora.rank is 0, so no adapters are trained"
        yield RecipeError("exchange.adapters", problem, "leave it out, or set lora.rank", value=exchange.adapters)
    reason = why_not_sharded(recipe)
    if exchange.route == "planned" and reason is not None:
        yield RecipeError("exchange.route", reason, "set exchange.route=export, or auto", value=exchange.route)
    if exchange.transport in ("device", "ipc"):
        yield from _device_memory_errors(recipe)
    if exchange.directory is not None and exchange.transport != "files":
        problem = f"exchange.transport={exchange.transport} writes no files"
        remedy = "leave it out, or set exchange.transport=files"
        yield RecipeError("exchange.directory", problem, remedy, value=exchange.directory)
    if math.isinf(exchange.timeout):
        remedy = "give seconds, e.g. 3600"
        yield RecipeError("exchange.timeout", "the timeout must be finite", remedy, value=exchange.timeout)
    yield from _heartbeat_errors(recipe)
    if exchange.route == "export" and exchange.check_every and not wants_adapters(recipe):
        problem = "exchange.route=export has no sharded update to compare with the export"
        remedy = "leave it out, or set exchange.route=planned"
        yield RecipeError("exchange.check_every", problem, remedy, value=exchange.check_every)


def _device_memory_errors(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield errors of transports that leave weights in device memory, which only the sharded route can use."""
    key, transport, route = "exchange.transport", recipe.exchange.transport, recipe.exchange.route
    reason = why_not_sharded(recipe)
    if reason is not None:
        problem = f"it needs exchange.route=planned: {reason}"
        yield RecipeError(key, problem, "set exchange.transport=auto", value=transport)
    elif route != "planned":
        problem = f"it needs exchange.route=planned, and exchange.route={route} may send whole tensors"
        remedy = "set exchange.route=planned, or exchange.transport=auto"
        yield RecipeError(key, problem, remedy, value=transport)
    if transport == "device" and recipe.cluster.placement == "colocated":
        problem = "trainers and engines share devices, and the collective library cannot connect two processes on the same device"
        remedy = "set cluster.placement=disaggregated, or exchange.transport=ipc, or auto"
        yield RecipeError(key, problem, remedy, value=transport)


def _heartbeat_errors(recipe: Recipe) -> Iterator[RecipeError]:
    exchange, sharded = recipe.exchange, is_sharded(recipe)
    is_set = exchange.silence != ExchangeConfig().silence
    if not sharded:
        if is_set:
            reason = why_not_sharded(recipe) or "exchange.route=export"
            problem = f"only sharded weight sync has heartbeats, and weights are sent whole: {reason}"
            yield RecipeError("exchange.silence", problem, "leave it out", value=exchange.silence)
        return
    if exchange.silence < exchange.timeout:
        return
    if is_set:
        problem = f"the wait ends after exchange.timeout = {exchange.timeout:g} s, before the heartbeat timeout"
        remedy = f"set it to less than {exchange.timeout:g}, or raise exchange.timeout"
        yield RecipeError("exchange.silence", problem, remedy, value=exchange.silence)
    else:
        problem = f"the wait would end before the heartbeat timeout, exchange.silence = {exchange.silence:g} s"
        remedy = f"set it to more than {exchange.silence:g}, or lower exchange.silence"
        yield RecipeError("exchange.timeout", problem, remedy, value=exchange.timeout)
