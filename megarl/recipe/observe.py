"""The recipe's section `observe`: console, trackers, samples, report, alerts and profiler traces."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Optional

from megarl.platform.tracing import TraceOptions
from megarl.recipe.key import key

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe

Event = Literal[
    "start", "death", "given_up", "restart", "rollback", "engines", "outage", "update", "warning", "failure", "end"
]
"""Events of a run that alerts may report; docs/alerts.md describes each."""
EVENTS: tuple[Event, ...] = typing.get_args(Event)
WARNINGS: frozenset[Event] = frozenset({"death", "given_up", "warning"})
"""Events that are reported as warnings: the console shows them in every mode."""


@dataclass
class AlertsConfig:
    """Messages about events of the run to a webhook; see docs/alerts.md."""

    url: Optional[str] = key(
        None,
        "Environment variable that contains the webhook's URL, e.g. ALERT_URL. A recipe contains no secret, and such a URL usually does. Unset: no alerts.",
    )
    format: Literal["json", "slack", "feishu", "dingtalk", "wecom"] = key(
        "json",
        "Body of a message. json: an object with `text` (which Mattermost shows), `run`, `host`, `event`, `step`, `cause` and `time`. The others: the text, as Slack, Feishu (Lark), DingTalk and WeCom accept it.",
    )
    events: list[str] = key(
        ["death", "given_up", "restart", "rollback", "outage", "failure", "end"],
        "Events to report. start: the first step begins. death: an engine or trainer has died or failed, and the run goes on (`rollout.min_engines`, `train.trainer_restarts`, `judge.restarts`, `teacher.restarts`). given_up: an engine has died too often in a row (three times before it sampled), and does not restart. restart: the run is started again (`train.restarts`). rollback: the trainers go back to a checkpoint after spikes (`train.on_spike`). engines: their wanted number changes, or one joins or leaves (`megarl engines`, a machine that ends). outage: a service that samples need is down, or back. update: updates of a step were skipped, or are spikes (`train.on_spike`). warning: any other warning. failure: an error has ended the run. end: the run is finished, or was stopped.",
    )


@dataclass
class OtlpConfig:
    """Spans of the run for an OpenTelemetry collector; see docs/trackers.md."""

    url: Optional[str] = key(
        None,
        "Base URL of a collector that accepts OTLP over HTTP, e.g. http://127.0.0.1:4318; /v1/traces is appended. Unset: no spans are sent.",
    )
    headers: dict[str, str] = key(
        {},
        "Headers of each request, each with the name of the environment variable that contains its value, e.g. {Authorization: MY_TOKEN}. A recipe contains no secret.",
    )


@dataclass
class ObserveConfig:
    """Output of a run: console, trackers, samples, report, alerts and profiler traces. metrics.jsonl is always written."""

    console: Literal["auto", "live", "plain", "quiet", "json"] = key(
        "auto",
        "live: a live display. plain: log lines, for startup and for steps. auto: live on a terminal, else plain. quiet: only warnings, errors and the end. json: one JSON object per event, for programs (docs/console.md).",
    )
    tensorboard: bool = key(True, "Write TensorBoard events.")
    trackers: list[str] = key(
        [],
        "Any of wandb, swanlab, mlflow, trackio; each must be installed, and logged in if it needs that (docs/trackers.md).",
    )
    prometheus: Optional[int] = key(
        None,
        "Port on the controller's machine at which Prometheus reads the newest metrics, e.g. 9464 (docs/metrics.md). Unset: none.",
        at_least=1,
        at_most=65535,
    )
    prometheus_host: str = key(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0 lets other machines read the metrics, without encryption or a password.",
    )
    otlp: OtlpConfig = key(OtlpConfig, "")
    project: str = key("megarl", "Project name in the trackers.")
    samples_per_step: int = key(
        32, "Samples per step that are written to samples/, in whole groups spread over the batch.", at_least=0
    )
    token_samples_per_step: int = key(
        2,
        "The tokens of this many of these samples are written to tokens/, each token with its log-probs, advantage, entropy and version: the first of the batch's first group, and of each the first 4,096 tokens (up to 300 KB per sample).",
        at_least=0,
    )
    report: bool = key(True, "Write report.html at the end.")
    alerts: AlertsConfig = key(AlertsConfig, "")
    profile_steps: list[int] = key(
        [],
        "Steps to trace with the device's profiler, to the run's `profile/`. docs/profiling.md describes the cost and how to read a trace.",
    )
    profile_ranks: list[int] = key(
        [0], "Ranks of the trainers to trace in `observe.profile_steps`, from receiving their shard to the update."
    )
    profile_engines: list[int] = key(
        [],
        "Numbers of the policy's engines to trace in `observe.profile_steps`, while they sample for the step.",
    )
    profile_discrete: bool = key(
        False,
        "Write a trace per phase of a trainer (old_log_prob, reference, update_actor) instead of a trace per step.",
    )
    profile_contents: list[str] = key(
        [],
        "Contents of a trace: device (kernels), cpu (operators), memory, shapes, modules, stack. Empty: device, cpu and shapes, if the device supports them. The others make traces larger and steps slower.",
    )
    profile_level: str = key(
        "",
        "Level of detail, if the device's profiler has levels: level0 (its default), level1, level2, level_none.",
    )
    profile_metrics: str = key(
        "",
        "Counters of the device's cores, if its profiler has them, at level1 and level2, e.g. PipeUtilization. Empty: none.",
    )
    profile_mstx: bool = key(
        False,
        "Record the marks that libraries set in the device's streams (communication, data loading), if its profiler supports them.",
    )
    profile_export: str = key("", "Format of the tables, if the profiler has several: text (its default) or db.")
    profile_analysis: bool = key(
        True,
        "Analyse the trace at the end of the step. false: write raw data only, if the profiler supports it, for a later analysis; the step ends sooner.",
    )


def trace_options(observe: ObserveConfig) -> TraceOptions:
    """Return the settings of `Platform.profiler`."""
    return TraceOptions(
        contents=tuple(observe.profile_contents),
        level=observe.profile_level,
        metrics=observe.profile_metrics,
        export=observe.profile_export,
        marks=observe.profile_mstx,
        analysis=observe.profile_analysis,
    )


def traces_notice(recipe: Recipe) -> str | None:
    """Return a notice that engines' traces overlap if engines sample several steps at a time; else None."""
    ahead = recipe.rollout.max_staleness
    if not recipe.observe.profile_engines or ahead == 0:
        return None
    return (
        f"observe.profile_engines with rollout.max_staleness={ahead:g}: engines sample up to {math.ceil(ahead) + 1} steps at a time, so the "
        "trace called step_N begins after the first samples of step N, and contains requests of later steps too; "
        "rollout.max_staleness=0 in a run of some steps gives traces of one step each"
    )
