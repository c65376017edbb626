"""Choice of the rule for two logs, and the result of the comparison."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.commands.compare.logs import Log
from megarl.commands.compare.measures import (
    Accuracy,
    NothingInCommon,
    Series,
    Throughput,
    accuracy,
    between,
    span,
    throughput,
)
from megarl.errors import pluralize

THROUGHPUT = "perf/throughput"
FILTERED = "rollout/groups_filtered"


@dataclass(frozen=True)
class CompareRule:
    """A bound on the mean absolute error of a metric, in the metric's unit: 0.04 is 4 % in verl's documents."""

    name: str
    bound: float
    metrics: tuple[str, ...]  # without --metric, the first of these that a log has is compared
    also: tuple[str, ...]  # further metrics that the bound applies to if --metric names them


REWARD = CompareRule("reward", 0.04, ("critic/rewards/mean",), also=("rollout/rewards/mean",))
# The SFT loss of verl and of megarl. No rule bounds any other loss.
LOSS = CompareRule("loss", 0.02, ("train/loss", "actor/loss"), also=("actor/pg_loss", "val/loss", "eval/loss"))


@dataclass(frozen=True)
class CompareOptions:
    """Command line options. ``max_error`` is in the metric's unit; None: the rule's bound."""

    metric: str | None = None
    metric_b: str | None = None
    max_error: float | None = None
    first: int | None = None
    last: int | None = None
    throughput_steps: int = 4
    min_throughput_ratio: float | None = None


@dataclass(frozen=True)
class Side:
    """One of the two runs, restricted to the steps that are compared."""

    log: Log
    metric: str
    curve: Series
    throughput: Series

    def as_json(self) -> dict[str, str]:
        return {"path": str(self.log.path), "kind": self.log.kind, "metric": self.metric}


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison. ``throughput`` is None if a run did not log it."""

    a: Side
    b: Side
    rule: str
    bound: float
    accuracy: Accuracy
    throughput: Throughput | None
    min_throughput_ratio: float | None
    notes: list[str] = field(default_factory=list)

    @property
    def accurate(self) -> bool:
        return self.accuracy.within(self.bound)

    @property
    def fast(self) -> bool | None:
        """True if the throughput ratio is large enough; None without a minimum."""
        if self.min_throughput_ratio is None:
            return None
        return self.throughput is not None and self.throughput.within(self.min_throughput_ratio)

    @property
    def within(self) -> bool:
        return self.accurate and self.fast is not False

    def as_json(self) -> dict[str, Any]:
        """Convert the result to JSON types. Errors and bounds are in the metric's unit, not in percent."""
        rate = None if self.throughput is None else asdict(self.throughput)
        return {
            "within": self.within,
            "a": self.a.as_json(),
            "b": self.b.as_json(),
            "accuracy": {"rule": self.rule, "bound": self.bound, "within": self.accurate, **asdict(self.accuracy)},
            "throughput": rate and {**rate, "min_ratio": self.min_throughput_ratio, "within": self.fast},
            "notes": self.notes,
        }


def compare_logs(a: Log, b: Log, options: CompareOptions) -> Comparison:
    """Compare `a` with `b`. Raises ValueError if a metric is missing or the runs share no step."""
    metric_a, metric_b, rule = _metrics(a, b, options)
    sides = [_side(log, metric, name, options) for log, metric, name in ((a, metric_a, "A"), (b, metric_b, "B"))]
    bound = options.max_error if options.max_error is not None else rule.bound if rule else None
    if bound is None:
        raise ValueError(
            f"the rules bound the reward ({REWARD.bound:.0%}) and the SFT loss ({LOSS.bound:.0%}), but not {metric_a}. "
            "Set its largest mean absolute error with --max-error, in percent: 4 is 0.04."
        )
    try:
        result = accuracy(sides[0].curve, sides[1].curve)
    except NothingInCommon as error:
        whole = f" In all, A has {span(a.metrics[metric_a])}, B {span(b.metrics[metric_b])}."
        limited = options.first is not None or options.last is not None
        raise ValueError(f"{error}{' within --steps' if limited else ''}.{whole if limited else ''}") from error
    rate = throughput(sides[0].throughput, sides[1].throughput, options.throughput_steps)
    has_rate = bool(rate.steps_a and rate.steps_b)
    if options.min_throughput_ratio is not None and not has_rate:
        lacking = " and ".join(name for name, steps in (("A", rate.steps_a), ("B", rate.steps_b)) if not steps)
        raise ValueError(f"--min-throughput-ratio needs {THROUGHPUT} in both runs; {lacking} did not log it")
    return Comparison(
        a=sides[0],
        b=sides[1],
        rule=rule.name if rule else metric_a,
        bound=bound,
        accuracy=result,
        throughput=rate if has_rate else None,
        min_throughput_ratio=options.min_throughput_ratio,
        notes=_notes(sides, result, rate, options),
    )


def _metrics(a: Log, b: Log, options: CompareOptions) -> tuple[str, str, CompareRule | None]:
    """Return A's metric, B's metric, and the rule for them or None. Options take precedence over the logs' metrics."""
    rewarded = any(_first(REWARD, log) for log in (a, b))  # the loss is then a policy loss, which has no rule
    rule = REWARD if rewarded else LOSS
    preferences = any(name.startswith("actor/dpo_") for log in (a, b) for name in log.metrics)  # no rule for DPO's loss
    bounds = (REWARD,) if rewarded or preferences else (REWARD, LOSS)
    if options.metric is not None:
        bounding = next((each for each in bounds if options.metric in each.metrics + each.also), None)
        return options.metric, options.metric_b or options.metric, bounding
    metric_a, metric_b = _first(rule, a), options.metric_b or _first(rule, b)
    if metric_a is None or metric_b is None:
        raise ValueError(
            f"A ({a.path}) and B ({b.path}) have neither a reward ({', '.join(REWARD.metrics)}) nor a loss "
            f"({', '.join(LOSS.metrics)}) in common. Name the metric with --metric, and its name in B with --metric-b. "
            f"A has {_some(a)}; B has {_some(b)}."
        )
    return metric_a, metric_b, rule if rule in bounds else None


def _first(rule: CompareRule, log: Log) -> str | None:
    return next((metric for metric in rule.metrics if metric in log.metrics), None)


def _some(log: Log) -> str:
    names = sorted(log.metrics)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _side(log: Log, metric: str, name: str, options: CompareOptions) -> Side:
    curve = between(log.curve(metric, name), options.first, options.last)
    rate = between(log.metrics.get(THROUGHPUT, {}), options.first, options.last)
    return Side(log, metric, curve, rate)


def _notes(sides: list[Side], result: Accuracy, rate: Throughput, options: CompareOptions) -> list[str]:
    """Return notes on the figures, one sentence each."""
    notes = []
    for name, side, only in (("A", sides[0], result.only_a), ("B", sides[1], result.only_b)):
        notes += [f"{name}: {note}." for note in side.log.notes]
        if only:
            notes.append(
                f"{name}: {pluralize(only, 'step')} omitted: not in the other run; {name} has {span(side.curve)}."
            )
        if again := sorted(side.log.rewritten.get(side.metric, set()) & set(side.curve)):
            notes.append(
                f"{name}: {pluralize(len(again), 'step')} written more than once ({span(again)}); the last value counts."
            )
    for name, count in (("A", result.not_finite_a), ("B", result.not_finite_b)):
        if count:
            notes.append(
                f"{name}: not finite (NaN or infinite) in {pluralize(count, 'common step')}: the run is outside the rule."
            )
    notes += [note for name, side in zip("AB", sides, strict=True) if (note := _filtered(name, side))]
    return notes + _throughput_notes(rate, options)


def _filtered(name: str, side: Side) -> str | None:
    """Return a note if dynamic sampling filtered groups, since the mean reward then excludes these groups."""
    if side.metric != REWARD.metrics[0] or not any(side.log.metrics.get(FILTERED, {}).values()):
        return None
    return (
        f"{name}: dynamic sampling filtered groups; {side.metric} covers the groups used for training, as in verl. "
        "--metric rollout/rewards/mean covers all samples."
    )


def _throughput_notes(rate: Throughput, options: CompareOptions) -> list[str]:
    lacking = [name for name, steps in (("A", rate.steps_a), ("B", rate.steps_b)) if not steps]
    if lacking:
        return [f"Throughput was not compared: {' and '.join(lacking)} did not log {THROUGHPUT}."]
    notes = []
    if min(len(rate.steps_a), len(rate.steps_b)) < options.throughput_steps:
        notes.append(
            f"Throughput: fewer than {options.throughput_steps} steps; A has {len(rate.steps_a)}, B {len(rate.steps_b)}."
        )
    if rate.steps_a != rate.steps_b:
        notes.append(f"Throughput: A's {span(rate.steps_a)}, B's {span(rate.steps_b)}.")
    if math.isnan(rate.ratio):
        notes.append(f"Throughput: the ratio is undefined; the means are {rate.mean_a:g} and {rate.mean_b:g}.")
    return notes
