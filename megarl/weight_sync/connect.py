"""Choose the route of the weights, by `weight_sync.route` and by what trainers and engines support, and open the session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megarl.cluster.calls import wait_for_all
from megarl.recipe.derived.weight_sync_route import wants_adapters, why_not_sharded
from megarl.recipe.schema import Recipe, WeightSyncConfig
from megarl.weight_sync.publish import ReceivingEngine, SendingTrainers
from megarl.weight_sync.session import DEVICE_TRANSPORTS, Session

OpenRoute = Callable[[str], "Session | str"]  # opens a session for a route, or returns the reason against it


class RouteRefused(RuntimeError):
    """Recipe, trainers or engines do not support the route that the recipe requires."""


def open_weight_sync(
    recipe: Recipe,
    trainers: SendingTrainers,
    engines: Sequence[ReceivingEngine],
    descriptions: Sequence[dict[str, Any]],
    notice: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Session:
    """Open a weight sync session that every engine has joined.

    descriptions: results of the engines' `start`. notice: receives the chosen route and the reason. check: of processes, called
    every second while engines join; it may raise.
    `weight_sync.route: auto` chooses the sharded route unless recipe, trainers or engines give a reason against
    it. Raises RouteRefused if `sharded` is required and not possible.
    """
    receivers = [(name, host) for description in descriptions for name, host in description["receivers"]]
    open_route = functools.partial(_open, recipe.weight_sync, trainers, engines, receivers, check)
    if wants_adapters(recipe):
        return _open_adapters(recipe.weight_sync, open_route, engines, descriptions, notice)
    route = recipe.weight_sync.route
    if route == "full":
        return _open_full(open_route)
    session = why_not_sharded(recipe) or open_route("sharded")
    if not isinstance(session, str):
        if route == "auto":
            notice("weight_sync.route=auto: sharded; every trainer rank sends the engines the slices that they need")
        return session
    reason = session
    if route == "sharded":
        transport = ", and weight_sync.transport=auto" if recipe.weight_sync.transport in DEVICE_TRANSPORTS else ""
        raise RouteRefused(f"weight_sync.route=sharded: {reason}. Set weight_sync.route=full, or auto{transport}")
    notice(f"weight_sync.route=auto: full, not sharded, because {reason}{_ignored_setting(recipe.weight_sync)}")
    return _open_full(open_route)


def _open_adapters(
    weight_sync: WeightSyncConfig,
    open_route: OpenRoute,
    engines: Sequence[ReceivingEngine],
    descriptions: Sequence[dict[str, Any]],
    notice: Callable[[str], None],
) -> Session:
    """Send adapters only, after the base weights in the first update; merged weights if an engine cannot hold adapters."""
    setting, reasons = weight_sync.adapters, [description["merged_because"] for description in descriptions]
    refusals = (f"{engine.name}: {reason}" for engine, reason in zip(engines, reasons, strict=True) if reason)
    session = next(refusals, None) or open_route("adapters")
    if not isinstance(session, str):
        if setting == "auto":
            notice("weight_sync.adapters=auto: only adapters are sent; the first update also sends the base weights")
        return session
    reason = session
    if setting == "only":
        raise RouteRefused(f"weight_sync.adapters=only: {reason}. Set weight_sync.adapters=merged, or auto")
    ignored = _ignored_setting(weight_sync)
    notice(f"weight_sync.adapters=auto: merged weights, exported, in every update, because {reason}{ignored}")
    return _open_full(open_route)


def _ignored_setting(weight_sync: WeightSyncConfig) -> str:
    """Return a clause that names the changed setting without effect on full sync, or ""."""
    changed = weight_sync.check_every != WeightSyncConfig().check_every
    return f"; weight_sync.check_every={weight_sync.check_every:g} has no effect" if changed else ""


def _open_full(open_route: OpenRoute) -> Session:
    session = open_route("full")
    assert not isinstance(session, str), "every engine can receive whole tensors"
    return session


def _open(
    weight_sync: WeightSyncConfig,
    trainers: SendingTrainers,
    engines: Sequence[ReceivingEngine],
    receivers: list[tuple[str, str]],
    check: Callable[[], None],
    route: str,
) -> Session | str:
    """Open a session for `route` and let every engine join. Returns the reason if trainers or an engine cannot."""
    session = trainers.open_weight_sync(receivers, route)
    if isinstance(session, str):
        return session
    joining = [engine.connect_weight_sync(session) for engine in engines]
    answers = wait_for_all(
        engines,
        joining,
        doing="connect to the trainers",
        key="weight_sync.timeout",
        limit=weight_sync.timeout,
        check=check,
    )
    reasons = (f"{engine.name}: {reason}" for engine, reason in zip(engines, answers, strict=True) if reason)
    return next(reasons, session)
