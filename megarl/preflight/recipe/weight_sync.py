"""Checks of the section `weight_sync`: the weight sync from trainers to engines."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.derived.weight_sync_route import is_sharded, wants_adapters, why_not_sharded
from megarl.recipe.schema import Recipe, WeightSyncConfig


def weight_sync_errors(recipe: Recipe) -> Iterator[RecipeError]:
    weight_sync = recipe.weight_sync
    if not recipe.lora.rank and weight_sync.adapters != "auto":
        problem = "lora.rank is 0, so no adapters are trained"
        yield RecipeError("weight_sync.adapters", problem, "leave it out, or set lora.rank", value=weight_sync.adapters)
    reason = why_not_sharded(recipe)
    if weight_sync.route == "sharded" and reason is not None:
        yield RecipeError("weight_sync.route", reason, "set weight_sync.route=full, or auto", value=weight_sync.route)
    if weight_sync.transport in ("device", "ipc"):
        yield from _device_memory_errors(recipe)
    if weight_sync.directory is not None and weight_sync.transport != "files":
        problem = f"weight_sync.transport={weight_sync.transport} writes no files"
        remedy = "leave it out, or set weight_sync.transport=files"
        yield RecipeError("weight_sync.directory", problem, remedy, value=weight_sync.directory)
    yield from _heartbeat_errors(recipe)
    if weight_sync.route == "full" and weight_sync.check_every and not wants_adapters(recipe):
        problem = "weight_sync.route=full has no sharded update to compare with the export"
        remedy = "leave it out, or set weight_sync.route=sharded"
        yield RecipeError("weight_sync.check_every", problem, remedy, value=weight_sync.check_every)


def _device_memory_errors(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield errors of transports that leave weights in device memory, which only the sharded route can use."""
    key, transport, route = "weight_sync.transport", recipe.weight_sync.transport, recipe.weight_sync.route
    reason = why_not_sharded(recipe)
    if reason is not None:
        problem = f"it needs weight_sync.route=sharded: {reason}"
        yield RecipeError(key, problem, "set weight_sync.transport=auto", value=transport)
    elif route != "sharded":
        problem = f"it needs weight_sync.route=sharded, and weight_sync.route={route} may send whole tensors"
        remedy = "set weight_sync.route=sharded, or weight_sync.transport=auto"
        yield RecipeError(key, problem, remedy, value=transport)
    if transport == "device" and recipe.cluster.placement == "colocated":
        problem = "trainers and engines share devices, and the collective library cannot connect two processes on the same device"
        remedy = "set cluster.placement=disaggregated, or weight_sync.transport=ipc, or auto"
        yield RecipeError(key, problem, remedy, value=transport)


def _heartbeat_errors(recipe: Recipe) -> Iterator[RecipeError]:
    weight_sync = recipe.weight_sync
    is_set = weight_sync.silence != WeightSyncConfig().silence
    if weight_sync.silence < weight_sync.timeout or not (is_set or is_sharded(recipe)):
        return
    if is_set:
        problem = f"the wait ends after weight_sync.timeout = {weight_sync.timeout:g} s, before the heartbeat timeout"
        remedy = f"set it to less than {weight_sync.timeout:g}, or raise weight_sync.timeout"
        yield RecipeError("weight_sync.silence", problem, remedy, value=weight_sync.silence)
    else:
        problem = f"the wait would end before the heartbeat timeout, weight_sync.silence = {weight_sync.silence:g} s"
        remedy = f"set it to more than {weight_sync.silence:g}, or lower weight_sync.silence"
        yield RecipeError("weight_sync.timeout", problem, remedy, value=weight_sync.timeout)
