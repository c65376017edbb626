"""Choose the route of the weights, by `exchange.route` and by what trainers and engines support, and open the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.cluster.calls import wait_for_all
from megarl.recipe.exchange import wants_adapters, why_not_sharded
from megarl.recipe.schema import ExchangeConfig, Recipe
from megarl.weight_sync.publish import ReceivingEngine, SendingTrainers
from megarl.weight_sync.session import DEVICE_TRANSPORTS, Session


class RouteRefused(RuntimeError):
    """Recipe, trainers or engines do not support the route that the recipe requires."""


def open_exchange(
    recipe: Recipe,
    trainers: SendingTrainers,
    engines: Sequence[ReceivingEngine],
    descriptions: Sequence[dict[str, Any]],
    notice: Callable[[str], None],
) -> Session:
    """Open a weight sync session that every engine has joined.

    descriptions: results of the engines' `start`. notice: receives the chosen route and the reason.
    `exchange.route: auto` chooses the sharded route ("planned") unless recipe, trainers or engines give a reason against
    it. Raises RouteRefused if `planned` is required and not possible.
    """
    receivers = [(name, host) for description in descriptions for name, host in description["receivers"]]
    if wants_adapters(recipe):
        return _open_adapters(recipe.exchange, trainers, engines, descriptions, receivers, notice)
    route = recipe.exchange.route
    if route == "export":
        return _open_export(recipe.exchange, trainers, engines, receivers)
    session = why_not_sharded(recipe) or _open(recipe.exchange, trainers, engines, receivers, "planned")
    if not isinstance(session, str):
        if route == "auto":
            notice("exchange.route=auto: planned; every trainer rank sends the engines the slices that they need")
        return session
    reason = session
    if route == "planned":
        transport = ", and exchange.transport=auto" if recipe.exchange.transport in DEVICE_TRANSPORTS else ""
        raise RouteRefused(f"exchange.route=planned: {reason}. Set exchange.route=export, or auto{transport}")
    notice(f"exchange.route=auto: export, not planned, because {reason}{_ignored_settings(recipe.exchange)}")
    return _open_export(recipe.exchange, trainers, engines, receivers)


def _open_adapters(
    exchange: ExchangeConfig,
    trainers: SendingTrainers,
    engines: Sequence[ReceivingEngine],
    descriptions: Sequence[dict[str, Any]],
    receivers: list[tuple[str, str]],
    notice: Callable[[str], None],
) -> Session:
    """Send adapters only, after the base weights in the first update; merged weights if an engine cannot hold adapters."""
    setting, reasons = exchange.adapters, [description["merged_because"] for description in descriptions]
    refusals = (f"{engine.name}: {reason}" for engine, reason in zip(engines, reasons, strict=True) if reason)
    session = next(refusals, None) or _open(exchange, trainers, engines, receivers, "adapters")
    if not isinstance(session, str):
        if setting == "auto":
            notice("exchange.adapters=auto: only adapters are sent; the first update also sends the base weights")
        return session
    reason = session
    if setting == "only":
        raise RouteRefused(f"exchange.adapters=only: {reason}. Set exchange.adapters=merged, or auto")
    ignored = _ignored_settings(exchange)
    notice(f"exchange.adapters=auto: merged weights, exported, in every update, because {reason}{ignored}")
    return _open_export(exchange, trainers, engines, receivers)


def _ignored_settings(exchange: ExchangeConfig) -> str:
    """Return a clause that names the changed settings without effect on an export: it has no plan and no heartbeat."""
    default = ExchangeConfig()
    names = [name for name in ("check_every", "silence") if getattr(exchange, name) != getattr(default, name)]
    return "".join(f"; exchange.{name}={getattr(exchange, name):g} has no effect" for name in names)


def _open_export(
    exchange: ExchangeConfig,
    trainers: SendingTrainers,
    engines: Sequence[ReceivingEngine],
    receivers: list[tuple[str, str]],
) -> Session:
    session = _open(exchange, trainers, engines, receivers, "export")
    assert not isinstance(session, str), "every engine can receive whole tensors"
    return session


def _open(
    exchange: ExchangeConfig,
    trainers: SendingTrainers,
    engines: Sequence[ReceivingEngine],
    receivers: list[tuple[str, str]],
    route: str,
) -> Session | str:
    """Open a session for `route` and let every engine join. Returns the reason if trainers or an engine cannot."""
    session: Session | str = trainers.open_exchange(receivers, route)
    if isinstance(session, str):
        return session
    joining = [engine.connect_weight_sync(session) for engine in engines]
    answers = wait_for_all(
        engines, joining, doing="connect to the trainers", key="exchange.timeout", limit=exchange.timeout
    )
    reasons = (f"{engine.name}: {reason}" for engine, reason in zip(engines, answers, strict=True) if reason)
    return next(reasons, session)
