"""An estimate as a table and remarks: raw seconds, those that published runs or a calibration make of them, and their range."""

from __future__ import annotations

from megarl.commands.plan.count.types import Estimate, Plan, Spread
from megarl.commands.plan.show.tables import Columns
from megarl.text import pluralize

TITLE = "Estimated seconds of a step"
STEP = "step"
_BESIDE = "beside the next phases"


def seconds_columns(plan: Plan) -> Columns:
    """A row a phase, and the step: raw seconds, and with a calibration the calibrated ones, else factor, expected seconds
    and range by published runs, where there are such. Raises ValueError for a plan without an estimate."""
    estimate = _estimate(plan)
    raw = estimate.uncalibrated or estimate
    columns = [["phase", *(phase.name for phase in estimate.phases), STEP]]
    if estimate.uncalibrated is not None:
        columns.append(["calibrated", *_each(estimate)])
    columns.append([_raw_name(plan), *_each(raw)])
    if plan.spread:
        columns += _spread_columns(estimate, {one.name: one for one in plan.spread})
    overlaps = sum(phase.seconds for phase in estimate.phases) > estimate.seconds * (1 + 1e-9)
    bounds = [
        f"{phase.bound}, {_BESIDE}" if phase.name == "gen" and overlaps else phase.bound for phase in estimate.phases
    ]
    return [*columns, ["bound by", *bounds, ""]]


def remarks(plan: Plan) -> list[str]:
    """Sentences below the table: tokens a second, the meaning of its columns, the assumptions of each phase."""
    estimate = _estimate(plan)
    return [_speed(plan, estimate), *_meanings(plan), *assumptions(estimate)]


def assumptions(estimate: Estimate) -> list[str]:
    """What phases stand on, each once, behind the names of those that do."""
    of: dict[str, list[str]] = {}
    for phase in estimate.phases:
        for part in phase.assumed.split("; "):
            of.setdefault(part, []).append(phase.name)
    by_phases: dict[str, list[str]] = {}
    for part, names in of.items():
        by_phases.setdefault(", ".join(names), []).append(part)
    return [f"assumed for {phases}: {'; '.join(parts)}" for phases, parts in by_phases.items()]


def seconds(value: float) -> str:
    """Three digits of it, in seconds."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value:.4f} s"


def _estimate(plan: Plan) -> Estimate:
    if plan.estimate is None:
        raise ValueError("the plan has no estimate")
    return plan.estimate


def _each(estimate: Estimate) -> list[str]:
    return [*(seconds(phase.seconds) for phase in estimate.phases), seconds(estimate.seconds)]


def _spread_columns(estimate: Estimate, spread: dict[str, Spread]) -> Columns:
    raw = {phase.name: phase.seconds for phase in estimate.phases} | {STEP: estimate.seconds}
    columns: Columns = [["factor"], ["expected"], ["range"], ["runs"]]
    for name, value in raw.items():
        cells = ["–"] * len(columns)
        if value and (one := spread.get(name)) is not None:
            between = f"{seconds(one.low)} to {seconds(one.high)}" if one.runs > 1 else "–"
            cells = [f"{one.typical / value:.2f}", seconds(one.typical), between, str(one.runs)]
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    return columns


def _speed(plan: Plan, estimate: Estimate) -> str:
    expected = next((one.typical for one in plan.spread if one.name == STEP), None)
    of = "calibrated" if estimate.uncalibrated is not None else _raw_name(plan)
    speeds = f"{estimate.tokens_per_second:,.0f} tokens/s (prompts and responses) {of}"
    if expected is not None:
        speeds += f", {estimate.tokens / expected:,.0f} expected"
    return (
        f"a step past the first ones, without evaluation and checkpoints: {speeds}; micro batches of a mini batch and data-parallel rank: {estimate.micro_batches}, of "
        f"{estimate.tokens_per_micro_batch:,.0f} tokens; bubble {estimate.bubble:.0%}"
    )


def _raw_name(plan: Plan) -> str:
    """The head of the estimate's column: a device of the user's file may have factors already."""
    factors = plan.device.factors if plan.device is not None else {}
    return "estimate" if factors and _estimate(plan).uncalibrated is None else "raw"


def _meanings(plan: Plan) -> list[str]:
    """What each column of seconds is, where it comes from, and how to replace it by measurements."""
    name = plan.device.name if plan.device is not None else "the device"
    replace_it = (
        "megarl accept, or plan --calibrate RUN after a run, measures this device; --calibration FILE applies it"
    )
    if _raw_name(plan) == "estimate":
        return [f"estimate: with the factors of {name} in --devices"]
    raw = f"raw: computed from {name}'s data sheet and the shares of it that are assumed below"
    if _estimate(plan).uncalibrated is not None:
        return [f"calibrated: with the rates and factors of --calibration. {raw}"]
    if not plan.spread:
        return [
            f"{raw}; no published run of such a model is known, and nothing was measured on this device. {replace_it}"
        ]
    runs = pluralize(len(plan.compared), "published run")
    found = [
        f"{raw}. Nothing was measured: neither this layout nor this device",
        f"factor: measured / raw seconds, the geometric mean over {runs} of models {plan.alike}: {'; '.join(plan.compared)}. "
        "A run that was published by its step alone counts for each phase with the step's ratio",
    ]
    if len(plan.compared) > 1:
        found.append(
            "expected: raw x factor. range: raw x the smallest and the largest ratio. How well these runs foretell each other is in "
            f"docs/planner.md. {replace_it}"
        )
    else:
        found.append(f"expected: raw x factor. One run gives no range. {replace_it}")
    if (without := plan.without_own) is not None:
        found.append(
            f"{'; '.join(plan.own_runs)} had this recipe's model. By the others alone ({pluralize(without.runs, 'run')} a phase or more), "
            f"a step is expected to take {seconds(without.typical)}, range {seconds(without.low)} to {seconds(without.high)}"
        )
    return found
