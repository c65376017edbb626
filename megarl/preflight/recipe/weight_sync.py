"""Checks of the section `exchange`."""

from __future__ import annotations

import math

from megarl.errors import RecipeError
from megarl.recipe.exchange import is_sharded, wants_adapters, why_not_sharded
from megarl.recipe.schema import ExchangeConfig, Recipe


def check_exchange(recipe: Recipe) -> None:
    exchange = recipe.exchange
    if not recipe.lora.rank and exchange.adapters != "auto":
        what = "no adapters are trained, with lora.rank=0"
        raise RecipeError("exchange.adapters", what, "leave it out, or set lora.rank", value=exchange.adapters)
    reason = why_not_sharded(recipe)
    if exchange.route == "planned" and reason is not None:
        raise RecipeError("exchange.route", reason, "set exchange.route=export, or auto", value=exchange.route)
    if exchange.transport in ("device", "ipc"):
        _check_on_devices(recipe)
    if exchange.directory is not None and exchange.transport != "files":
        what = f"with exchange.transport={exchange.transport} nothing is written there"
        raise RecipeError(
            "exchange.directory", what, "leave it out, or set exchange.transport=files", value=exchange.directory
        )
    if math.isinf(exchange.timeout):
        raise RecipeError(
            "exchange.timeout", "every wait has an end", "give seconds, e.g. 3600", value=exchange.timeout
        )
    _check_silence(recipe)
    if exchange.route == "export" and exchange.check_every and not wants_adapters(recipe):
        what = "with exchange.route=export there is nothing to compare with the export"
        raise RecipeError(
            "exchange.check_every", what, "leave it out, or set exchange.route=planned", value=exchange.check_every
        )


def _check_on_devices(recipe: Recipe) -> None:
    key, value = "exchange.transport", recipe.exchange.transport
    whole = why_not_sharded(recipe)
    if whole is not None:
        what = f"it carries planned slices alone: {whole}"
        raise RecipeError(key, what, "set exchange.transport=auto", value=value)
    if recipe.exchange.route != "planned":
        what = f"it carries planned slices alone, and exchange.route={recipe.exchange.route} may send whole tensors"
        raise RecipeError(key, what, "set exchange.route=planned, or exchange.transport=auto", value=value)
    if value == "device" and recipe.cluster.placement == "colocated":
        what = "trainers and engines share devices, whose library connects no two processes of one device"
        remedy = "set cluster.placement=disaggregated, or exchange.transport=ipc, or auto"
        raise RecipeError(key, what, remedy, value=value)


def _check_silence(recipe: Recipe) -> None:
    exchange = recipe.exchange
    given = exchange.silence != ExchangeConfig().silence
    if given and not is_sharded(recipe):
        what = f"weights go whole, and then ranks give no signs of life: {why_not_sharded(recipe) or 'exchange.route=export'}"
        raise RecipeError("exchange.silence", what, "leave it out", value=exchange.silence)
    if is_sharded(recipe) and exchange.silence >= exchange.timeout:
        what = f"every wait ends after exchange.timeout = {exchange.timeout:g} s, before a rank is known to be silent"
        if not given:
            what = f"a rank is known to be silent after exchange.silence = {exchange.silence:g} s, when every wait has ended"
            raise RecipeError(
                "exchange.timeout", what, "make it longer, or lower exchange.silence", value=exchange.timeout
            )
        raise RecipeError(
            "exchange.silence", what, "make it shorter, or raise exchange.timeout", value=exchange.silence
        )
