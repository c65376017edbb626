"""Which rule two logs are held to, and what comes of it."""

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
from megarl.text import pluralize

THROUGHPUT = "perf/throughput"
FILTERED = "rollout/groups_filtered"


@dataclass(frozen=True)
class Rule:
    """`bound` is of the mean absolute error, in the metric's own unit: 0.04 is the 4 % of the documents."""

    name: str
    bound: float
    metrics: tuple[str, ...]  # what it is about; the first that a log has is taken where none is named
    also: tuple[str, ...]  # what it bounds, too, where it is named


REWARD = Rule("reward", 0.04, ("critic/rewards/mean",), also=("rollout/rewards/mean",))
# As verl's trainer for SFT calls it, and as megarl does. The rule is for SFT; no other loss has one.
LOSS = Rule("loss", 0.02, ("train/loss", "actor/loss"), also=("actor/pg_loss", "val/loss", "eval/loss"))


@dataclass(frozen=True)
class Options:
    """What the command line says. ``max_error`` is in the metric's unit; None: the rule's."""

    metric: str | None = None
    metric_b: str | None = None
    max_error: float | None = None
    first: int | None = None
    last: int | None = None
    throughput_steps: int = 4
    min_throughput_ratio: float | None = None


@dataclass(frozen=True)
class Side:
    """One of the two runs, as it was compared: only the steps that were asked for."""

    path: str
    kind: str
    metric: str
    curve: Series
    throughput: Series
    log: Log


@dataclass(frozen=True)
class Comparison:
    """Everything that console, JSON and page tell. ``throughput`` is None where a run has none of it."""

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
        """None: no ratio was asked for."""
        if self.min_throughput_ratio is None:
            return None
        return self.throughput is not None and self.throughput.within(self.min_throughput_ratio)

    @property
    def within(self) -> bool:
        return self.accurate and self.fast is not False

    def as_json(self) -> dict[str, Any]:
        """The whole result as JSON types; errors and bounds in the metric's unit, not in percent."""
        rate = None if self.throughput is None else asdict(self.throughput)
        return {
            "within": self.within,
            "a": {"path": self.a.path, "kind": self.a.kind, "metric": self.a.metric},
            "b": {"path": self.b.path, "kind": self.b.kind, "metric": self.b.metric},
            "accuracy": {"rule": self.rule, "bound": self.bound, "within": self.accurate, **asdict(self.accuracy)},
            "throughput": rate and {**rate, "min_ratio": self.min_throughput_ratio, "within": self.fast},
            "notes": self.notes,
        }


def compare_logs(a: Log, b: Log, options: Options) -> Comparison:
    """Hold `a` against `b`. Raises ValueError where a metric is missing or the runs have no step in common."""
    metric_a, metric_b, rule = _metrics(a, b, options)
    sides = [_side(log, metric, name, options) for log, metric, name in ((a, metric_a, "A"), (b, metric_b, "B"))]
    bound = options.max_error if options.max_error is not None else rule.bound if rule else None
    if bound is None:
        raise ValueError(
            f"the rules bound the reward ({REWARD.bound:.0%}) and the loss of SFT ({LOSS.bound:.0%}), and {metric_a} is "
            "neither. Say with --max-error how large its mean absolute error may be, in percent: 4 is 0.04."
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
        raise ValueError(f"--min-throughput-ratio needs {THROUGHPUT} in both runs; {lacking} has none of it")
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


def _metrics(a: Log, b: Log, options: Options) -> tuple[str, str, Rule | None]:
    """(A's metric, B's, the rule that bounds them or None): what was asked for, or what both logs are about."""
    rewarded = any(_first(REWARD, log) for log in (a, b))  # then a loss is a policy's, for which there is no rule
    rule = REWARD if rewarded else LOSS
    if options.metric is not None:
        known = next((one for one in (REWARD, rule) if options.metric in one.metrics + one.also), None)
        return options.metric, options.metric_b or options.metric, known
    metric_a, metric_b = _first(rule, a), options.metric_b or _first(rule, b)
    if metric_a is None or metric_b is None:
        raise ValueError(
            f"A ({a.path}) and B ({b.path}) have neither a reward ({', '.join(REWARD.metrics)}) nor a loss "
            f"({', '.join(LOSS.metrics)}) in common. Name what to compare with --metric, and what it is called in "
            f"B with --metric-b. A has {_some(a)}; B has {_some(b)}."
        )
    return metric_a, metric_b, rule


def _first(rule: Rule, log: Log) -> str | None:
    return next((metric for metric in rule.metrics if metric in log.metrics), None)


def _some(log: Log) -> str:
    names = sorted(log.metrics)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _side(log: Log, metric: str, name: str, options: Options) -> Side:
    curve = between(log.curve(metric, name), options.first, options.last)
    rate = between(log.metrics.get(THROUGHPUT, {}), options.first, options.last)
    return Side(str(log.path), log.kind, metric, curve, rate, log)


def _notes(sides: list[Side], result: Accuracy, rate: Throughput, options: Options) -> list[str]:
    """Whatever a reader of the figures has to know, a sentence each."""
    notes = []
    for name, side, only in (("A", sides[0], result.only_a), ("B", sides[1], result.only_b)):
        notes += [f"{name}: {note}." for note in side.log.notes]
        if only:
            notes.append(
                f"{name}: {pluralize(only, 'step')} left out that the other run lacks; it has {span(side.curve)}."
            )
        if again := sorted(side.log.rewritten.get(side.metric, set()) & set(side.curve)):
            notes.append(
                f"{name}: {pluralize(len(again), 'step')} written more than once ({span(again)}); the last one counts."
            )
    for name, odd in (("A", result.not_finite_a), ("B", result.not_finite_b)):
        if odd:
            notes.append(
                f"{name}: not finite (NaN or infinite) in {odd:,} of the common steps: outside the rule, whatever the others say."
            )
    notes += [note for name, side in zip("AB", sides, strict=True) if (note := _filtered(name, side))]
    return notes + _throughput_notes(rate, options)


def _filtered(name: str, side: Side) -> str | None:
    """With dynamic sampling there are two mean rewards, and only one of them is comparable to a run without it."""
    if side.metric != REWARD.metrics[0] or not any(side.log.metrics.get(FILTERED, {}).values()):
        return None
    return (
        f"{name}: dynamic sampling filtered groups; {side.metric} is of those that were trained on, as in verl. "
        "--metric rollout/rewards/mean compares everything that was sampled."
    )


def _throughput_notes(rate: Throughput, options: Options) -> list[str]:
    lacking = [name for name, steps in (("A", rate.steps_a), ("B", rate.steps_b)) if not steps]
    if lacking:
        return [
            f"Throughput was not compared: {' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no {THROUGHPUT}."
        ]
    notes = []
    if min(len(rate.steps_a), len(rate.steps_b)) < options.throughput_steps:
        notes.append(
            f"Throughput: {options.throughput_steps} steps were asked for; A has {len(rate.steps_a)}, B {len(rate.steps_b)}."
        )
    if rate.steps_a != rate.steps_b:
        notes.append(f"Throughput: of A it is {span(rate.steps_a)}, of B {span(rate.steps_b)}.")
    if math.isnan(rate.ratio):
        notes.append(f"Throughput: no ratio, since the means are {rate.mean_a:g} and {rate.mean_b:g}.")
    return notes
