"""How the weights will go to the engines: by the recipe's `exchange.route`, agreed on with trainers and engines once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.cluster.base import Service, WorkerGroup
from megarl.cluster.calls import wait_for_all
from megarl.recipe.exchange import never_planned, wants_adapters
from megarl.recipe.schema import ExchangeConfig, Recipe
from megarl.weight_sync.session import DEVICE_TRANSPORTS, Session


class RouteRefused(RuntimeError):
    """The route that the recipe asks for cannot be taken with this recipe, these trainers or these engines."""


def open_exchange(
    recipe: Recipe,
    trainers: WorkerGroup,
    services: Sequence[Service],
    engines: Sequence[dict[str, Any]],
    notice: Callable[[str], None],
) -> Session:
    """Open an exchange and let every engine join it. `engines`: what each said of itself when it had started.

    `exchange.route: auto` is planned unless recipe, trainers or engines say why it cannot be; `notice` is told which way
    was taken. Raises RouteRefused where `planned` cannot be.
    """
    receivers = [(name, host) for engine in engines for name, host in engine["receivers"]]
    if wants_adapters(recipe):
        return _adapters(recipe, trainers, services, engines, receivers, notice)
    route = recipe.exchange.route
    if route == "export":
        return _exported(recipe, trainers, services, receivers)
    met = never_planned(recipe) or _met(recipe, trainers, services, receivers, "planned")
    if not isinstance(met, str):
        if route == "auto":
            notice("exchange.route=auto: planned; every trainer rank sends the engines the slices that they need")
        return met
    if route == "planned":
        beside = ", and exchange.transport=auto" if recipe.exchange.transport in DEVICE_TRANSPORTS else ""
        raise RouteRefused(f"exchange.route=planned: {met}. Set exchange.route=export, or auto{beside}")
    notice(f"exchange.route=auto: export, not planned, because {met}{_unchecked(recipe)}")
    return _exported(recipe, trainers, services, receivers)


def _adapters(
    recipe: Recipe,
    trainers: WorkerGroup,
    services: Sequence[Service],
    engines: Sequence[dict[str, Any]],
    receivers: list[tuple[str, str]],
    notice: Callable[[str], None],
) -> Session:
    """The base weights once and then adapters alone, where every engine can hold them; else merged weights."""
    asked, reasons = recipe.exchange.adapters, [engine["merged_because"] for engine in engines]
    refused = next((f"{one.name}: {why}" for one, why in zip(services, reasons, strict=True) if why), None)
    met = refused or _met(recipe, trainers, services, receivers, "adapters")
    if isinstance(met, str) and asked == "only":
        raise RouteRefused(f"exchange.adapters=only: {met}. Set exchange.adapters=merged, or auto")
    if isinstance(met, str):
        notice(f"exchange.adapters=auto: merged weights, exported, in every update, because {met}{_unchecked(recipe)}")
        return _exported(recipe, trainers, services, receivers)
    if asked == "auto":
        notice("exchange.adapters=auto: adapters alone; the first update also brings the weights beside them, exported")
    return met


def _unchecked(recipe: Recipe) -> str:
    """What an export, which nothing can be held to and whose ranks give no signs of life, leaves out."""
    given, default = recipe.exchange, ExchangeConfig()
    names = [name for name in ("check_every", "silence") if getattr(given, name) != getattr(default, name)]
    return "".join(f"; exchange.{name}={getattr(given, name):g} has no effect" for name in names)


def _exported(
    recipe: Recipe, trainers: WorkerGroup, services: Sequence[Service], receivers: list[tuple[str, str]]
) -> Session:
    met = _met(recipe, trainers, services, receivers, "export")
    assert not isinstance(met, str), "every engine takes whole tensors, or says that it takes none"
    return met


def _met(
    recipe: Recipe, trainers: WorkerGroup, services: Sequence[Service], receivers: list[tuple[str, str]], route: str
) -> Session | str:
    """A session that everyone has joined; or why trainers or engines cannot take this route."""
    session = trainers.call("open_exchange", receivers, route)[0]
    if isinstance(session, str):
        return session
    joining = [service.call("connect_exchange", session) for service in services]
    limit = recipe.exchange.timeout
    answers = wait_for_all(services, joining, doing="connect to the trainers", key="exchange.timeout", limit=limit)
    reasons = (f"{service.name}: {reason}" for service, reason in zip(services, answers, strict=True) if reason)
    return next(reasons, session)
