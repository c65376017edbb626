"""Checks of the section `observe`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.errors import RecipeError, errors_of, raise_all
from megarl.observe.sinks import TRACKERS
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import kind_of
from megarl.recipe.observe import EVENTS, AlertsConfig, ObserveConfig, OtlpConfig
from megarl.recipe.schema import Recipe
from megarl.recipe.urls import check_headers, check_url, is_variable


def observe_errors(recipe: Recipe) -> Iterator[ValueError]:
    observe = recipe.observe
    for tracker in observe.trackers:
        if tracker not in TRACKERS:
            problem, remedy = f"unknown tracker '{tracker}'", f"choose from {', '.join(TRACKERS)}"
            yield RecipeError("observe.trackers", problem, remedy, value=list(observe.trackers))
    if observe.prometheus is None and observe.prometheus_host != ObserveConfig().prometheus_host:
        problem = "no port is set, so nothing listens (observe.prometheus)"
        yield RecipeError("observe.prometheus_host", problem, "set observe.prometheus", value=observe.prometheus_host)
    yield from alerts_errors(observe.alerts)
    yield from otlp_errors(observe.otlp)
    last_step = recipe.train.steps if recipe.train.epochs is None else math.inf  # known once the rows are counted
    for name, numbers, first, last, counted in (
        ("profile_steps", observe.profile_steps, 1, last_step, "steps (train.steps)"),
        ("profile_ranks", observe.profile_ranks, 0, recipe.cluster.trainers - 1, "ranks (cluster.trainers)"),
        ("profile_engines", observe.profile_engines, 0, recipe.rollout.engines - 1, "engines (rollout.engines)"),
    ):
        if wrong := [number for number in numbers if not first <= number <= last]:
            problem = f"{counted} go from {first} to {last}, and {wrong[0]} is out of range"
            yield RecipeError(f"observe.{name}", problem, f"use numbers from {first} to {last}", value=list(numbers))
    if observe.profile_steps and not (observe.profile_ranks or observe.profile_engines):
        yield RecipeError(
            "observe.profile_ranks", "nothing would be traced", "name a rank, or an engine in profile_engines", value=[]
        )
    if observe.profile_engines:
        yield from _engine_errors(recipe)
    if recipe.cluster.device != "auto":
        yield from trace_errors(recipe.observe, kind_of(recipe.cluster.device))


def alerts_errors(alerts: AlertsConfig) -> Iterator[RecipeError]:
    """Yield an error for a URL in place of the variable that contains it, which no message repeats, and for unknown events."""
    if alerts.url is not None and not is_variable(alerts.url):
        problem = (
            "this key names an environment variable, and its value is not a valid name: a recipe contains no secret"
        )
        remedy = "write e.g. url: ALERT_URL, and export ALERT_URL with the webhook's URL"
        yield RecipeError("observe.alerts.url", problem, remedy)
    for event in alerts.events:
        if event not in EVENTS:
            problem, remedy = f"unknown event '{event}'", f"choose from {', '.join(EVENTS)}"
            yield RecipeError("observe.alerts.events", problem, remedy, value=list(alerts.events))


def otlp_errors(otlp: OtlpConfig) -> Iterator[ValueError]:
    """Yield an error for a URL that is not one of a collector, and for headers that cannot be set."""
    if otlp.url is not None:
        yield from errors_of(check_url, "observe.otlp", otlp.url)
        if urlsplit(otlp.url).path.rstrip("/").endswith("/v1/traces"):
            problem, remedy = "megarl appends /v1/traces to this base URL", "leave /v1/traces out"
            yield RecipeError("observe.otlp.url", problem, remedy, value=otlp.url)
    elif otlp.headers:
        problem = "no collector is set, so nothing is sent (observe.otlp.url)"
        yield RecipeError("observe.otlp.headers", problem, "set observe.otlp.url", value=dict(otlp.headers))
    yield from errors_of(check_headers, "observe.otlp", otlp.headers)


def _engine_errors(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield an error if `observe.profile_engines` cannot trace any engine of the policy."""
    engines = list(recipe.observe.profile_engines)
    if recipe.train.source != "rollout":
        problem, remedy = f"train.source={recipe.train.source} has no engines", "leave it out"
    elif recipe.rollout.engine != "vllm":
        problem, remedy = (
            f"only engines of rollout.engine=vllm can be traced, not {recipe.rollout.engine}",
            "leave it out",
        )
    elif not recipe.observe.profile_steps:
        problem, remedy = "no step would be traced", "name steps in observe.profile_steps"
    else:
        return
    yield RecipeError("observe.profile_engines", problem, remedy, value=engines)


def check_traces(observe: ObserveConfig, kind: DeviceKind) -> None:
    """Raise RecipeError for settings that the profiler of `kind` does not support."""
    raise_all(trace_errors(observe, kind))


def trace_errors(observe: ObserveConfig, kind: DeviceKind) -> Iterator[RecipeError]:
    """Yield an error for each setting that the profiler of `kind` does not support."""
    tracing = kind.tracing
    for name, value, choices in (
        ("profile_contents", observe.profile_contents, tracing.contents),
        ("profile_level", [observe.profile_level] if observe.profile_level else [], tracing.levels),
        ("profile_metrics", [observe.profile_metrics] if observe.profile_metrics else [], tracing.metrics),
        ("profile_export", [observe.profile_export] if observe.profile_export else [], tracing.exports),
    ):
        if unknown := [entry for entry in value if entry not in choices]:
            has = (
                f"the profiler of {kind.plural} has {', '.join(choices)}"
                if choices
                else f"the profiler of {kind.plural} has none"
            )
            yield RecipeError(
                f"observe.{name}",
                f"'{unknown[0]}' is unknown: {has}",
                "choose from these, or leave it out",
                value=value,
            )
    if observe.profile_contents and not {"cpu", "device"} & set(observe.profile_contents):
        yield RecipeError(
            "observe.profile_contents",
            "these contents are only recorded together with operators (cpu) or kernels (device)",
            "add cpu or device",
            value=list(observe.profile_contents),
        )
    settings = {
        "profile_mstx": (observe.profile_mstx, tracing.marks),
        "profile_analysis": (not observe.profile_analysis, tracing.analysis),
    }
    for name, (is_set, supported) in settings.items():
        if is_set and not supported:
            yield RecipeError(
                f"observe.{name}",
                f"the profiler of {kind.plural} has no such setting",
                "leave it out",
                value=getattr(observe, name),
            )
    if observe.profile_metrics in tracing.metrics and observe.profile_level not in tracing.levels_of_metrics:
        yield RecipeError(
            "observe.profile_metrics",
            f"counters are recorded only at {' and '.join(tracing.levels_of_metrics)}",
            f"set observe.profile_level={tracing.levels_of_metrics[0]}",
            value=observe.profile_metrics,
        )
    if observe.profile_level and observe.profile_level == tracing.level_of_marks and not observe.profile_mstx:
        yield RecipeError(
            "observe.profile_level",
            "this level records only marks",
            "set observe.profile_mstx=true",
            value=observe.profile_level,
        )
