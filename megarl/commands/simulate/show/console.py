"""A study on the console."""

from __future__ import annotations

from rich.console import Console

from megarl.commands.plan.show.tables import Columns, console_width, fitted, transposed
from megarl.commands.plan.show.units import sized
from megarl.commands.simulate.study import SimulatedRun, Study
from megarl.observe.console import short_seconds

HEAD = (
    "rule, S, window",
    "step, s",
    "gain",
    "E idle",
    "T idle",
    "lag",
    "most",
    "requests",
    "waiting",
    "memory",
    "length",
)
"""Columns of the table of schedules."""

LEGEND = (
    "S: rollout.max_staleness; gain: trained tokens per second against sync, which samples and trains in turn on all devices",
    "E idle, T idle: share of the time in which engines and trainers wait; requests: running on an engine, mean",
    "lag, most: versions between a token and the policy that trains on it, mean and largest",
    "waiting, memory: most finished samples before the end of their training step, on all hosts of engines; length: mean of "
    "trained against sampled responses",
)


OVERSAMPLING_TITLE = "Over-sampling, simulated: algorithm.dynamic_sampling.oversample"

OVERSAMPLING_LEGEND = (
    "sampled: groups per trained group; unused: share of the sampled groups that no batch takes; missing: groups short of whole "
    "batches at algorithm.dynamic_sampling.max_attempts"
)


def show(result: Study) -> None:
    console = Console(width=console_width())
    console.print(fitted(schedule_columns(result), schedules_title(result), console.width), highlight=False)
    if len(result.splits) > 1:
        console.print(fitted(split_columns(result), splits_title(result), console.width), highlight=False)
    if result.oversampled:
        console.print(fitted(oversampling_columns(result), OVERSAMPLING_TITLE, console.width), highlight=False)
    for line in legend(result):
        console.print(f"- {line}", style="dim", highlight=False)
    console.print(f"\nRecommended: {described(result.best)}", highlight=False)
    if result.settings:
        console.print(f"  {' '.join(result.settings)}", highlight=False, soft_wrap=True)  # users copy this line
    else:
        console.print("  The recipe has these settings.", highlight=False)
    for line in remarks(result):
        console.print(f"- {line}", highlight=False)
    for line in result.notes:
        console.print(f"- {line}", style="dim", highlight=False)


def legend(result: Study) -> list[str]:
    """Return the legend of the tables."""
    return [*LEGEND, *([OVERSAMPLING_LEGEND] if result.oversampled else [])]


def schedules_title(result: Study) -> str:
    run = result.runs[-1]
    if run.setting.colocated:
        return f"{result.devices} x {result.device}, simulated"
    shared = "sync and colocated" if any(run.name == "colocated" for run in result.runs) else "sync"
    return f"{result.devices} x {result.device}, simulated: {divided(run)}; {shared} on all"


def splits_title(result: Study) -> str:
    return f"Splits, simulated with {named(result.best)}"


def divided(run: SimulatedRun) -> str:
    """Describe the split: ``20 trainers, 6 engines on 12 devices``."""
    return f"{run.setting.trainers:,} trainers, {run.engines:,} engines on {run.engine_devices:,} devices"


def named(run: SimulatedRun) -> str:
    """Describe the schedule by rule, staleness and window: ``refresh, 4, 0.3``."""
    return _schedule_text(run, ", {:g}", ", {:g}")


def in_words(run: SimulatedRun) -> str:
    """Describe the schedule for a sentence: ``refresh with max_staleness 4 and window 0.3``."""
    return _schedule_text(run, " with max_staleness {:g}", " and window {:g}")


def _schedule_text(run: SimulatedRun, staleness: str, window: str) -> str:
    """Return the rule with its staleness and window in these formats. A synchronous run has neither, drain no window."""
    setting = run.setting
    if setting.name == "sync":
        return "sync"
    text = setting.name + staleness.format(setting.max_staleness)
    return text if setting.rule == "drain" else text + window.format(setting.window)


def described(run: SimulatedRun) -> str:
    """Describe a run in a sentence."""
    outcome = run.outcome
    where = "engines and trainers share all devices" if run.setting.colocated else divided(run)
    gain = f"{run.gain:.2f} x sync, " if run.gain is not None else ""
    return (
        f"{in_words(run)}; {where}: {gain}{short_seconds(outcome.step_seconds)} s a step ({3600 / outcome.step_seconds:.1f} an "
        f"hour), lag {outcome.lag_mean:.1f}, at most {run.schedule.max_lag}"
    )


def remarks(result: Study) -> list[str]:
    """Return remarks on the recommended run."""
    return [*_on_shared_devices(result), *_beside_keep(result), *_on_oversampling(result), *_on_missing(result)]


def _on_shared_devices(result: Study) -> list[str]:
    """Name the recommended schedule of colocated engines, for a colocated recipe."""
    best = result.best_colocated
    if best is None or result.best.setting.colocated:
        return []
    settings = " ".join(result.colocated_settings) or "unchanged"
    return [f"On shared devices, as in the recipe: {described(best)}. Settings: {settings}"]


def _beside_keep(result: Study) -> list[str]:
    best = result.best.setting
    if best.rule != "keep":
        return []
    same = (best.max_staleness, best.window)
    for run in result.runs:
        if run.name == "refresh" and (run.setting.max_staleness, run.setting.window) == same:
            gain = (
                f"{run.gain:.2f} x sync"
                if run.gain is not None
                else f"{short_seconds(run.outcome.step_seconds)} s a step"
            )
            return [
                f"keep reads caches that older weights computed; its effect on learning was not measured. refresh: {gain}."
            ]
    return []


def _on_oversampling(result: Study) -> list[str]:
    """Name the recommended factor of each schedule, and compare it with the recipe's."""
    lines = []
    for each in result.oversampled:
        recipes_run = next((run for run in each.runs if run.setting.oversample is None), None)
        best, outcome = each.best, each.best.outcome
        text = f"oversample for {in_words(best)}: {best.schedule.oversample:g}"
        if recipes_run is best:
            text += ", as in the recipe"
        elif recipes_run is not None:
            ratio = outcome.step_seconds / recipes_run.outcome.step_seconds
            text += f", {ratio:.2f} times the step of the recipe's {recipes_run.schedule.oversample:g}"
        lines.append(f"{text}; {outcome.tried:.2f} groups sampled per trained one, {outcome.unused:.1%} unused")
    return lines


def _on_missing(result: Study) -> list[str]:
    missing = result.best.outcome.missing
    if not missing:
        return []
    return [
        f"{missing:.1%} of the groups of batches are missing: steps reach algorithm.dynamic_sampling.max_attempts. Raise it, or choose "
        "other prompts. With when_exhausted=fail the run would stop."
    ]


def cells(result: Study, run: SimulatedRun) -> list[str]:
    """Return the cells of a run for `HEAD`."""
    outcome = run.outcome
    return [
        named(run),
        *_speed(run),
        f"{outcome.lag_mean:.1f}",
        str(outcome.lag_max),
        f"{outcome.running:.0f}",
        f"{outcome.pending_samples:,}",
        sized(result.pending_bytes(run)),
        f"{outcome.length_bias:+.1%}",
    ]


def _speed(run: SimulatedRun) -> list[str]:
    outcome = run.outcome
    return [
        short_seconds(outcome.step_seconds),
        "" if run.gain is None else f"{run.gain:.2f}",
        f"{outcome.engines_idle:.0%}",
        f"{outcome.trainers_idle:.0%}",
    ]


def schedule_columns(result: Study) -> Columns:
    return transposed([list(HEAD), *(cells(result, run) for run in result.runs)])


def split_columns(result: Study) -> Columns:
    head = ["trainers", "engines", "on devices", "step, s", "gain", "E idle", "T idle", "lag", "requests"]
    rows = [
        [
            f"{run.setting.trainers:,}",
            f"{run.engines:,}",
            f"{run.engine_devices:,}",
            *_speed(run),
            f"{run.outcome.lag_mean:.1f}",
            f"{run.outcome.running:.0f}",
        ]
        for run in result.splits
    ]
    return transposed([head, *rows])


def oversampling_columns(result: Study) -> Columns:
    head = ["rule, S, window", "oversample", "step, s", "gain", "sampled", "unused", "missing", "lag", "most"]
    rows = []
    for each in result.oversampled:
        for run in each.runs:
            outcome, speed = run.outcome, _speed(run)
            shares = [f"{outcome.tried:.2f}", f"{outcome.unused:.1%}", f"{outcome.missing:.1%}"]
            lag = [f"{outcome.lag_mean:.1f}", str(outcome.lag_max)]
            rows.append([named(run), f"{run.schedule.oversample:g}", *speed[:2], *shares, *lag])
    return transposed([head, *rows])
