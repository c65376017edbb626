"""Table and remarks of an estimate: raw seconds, calibrated or expected ones, and their range."""

from __future__ import annotations

from megarl.commands.plan.count.types import Estimate, RecipePlan, Spread
from megarl.commands.plan.show.tables import Columns
from megarl.errors import pluralize

TITLE = "Estimated seconds of a step"
STEP = "step"
_OVERLAPS = "overlaps the next phases"


def seconds_columns(plan: RecipePlan) -> Columns:
    """Return columns with a row per phase and for the step: raw seconds; with a calibration the calibrated ones, else factor,
    expected seconds and range from published runs, if any. Raises ValueError for a plan without an estimate."""
    estimate = _estimate(plan)
    raw = estimate.uncalibrated or estimate
    columns = [["phase", *(phase.name for phase in estimate.phases), STEP]]
    if estimate.uncalibrated is not None:
        columns.append(["calibrated", *_each(estimate)])
    columns.append([_raw_name(plan), *_each(raw)])
    if plan.spread:
        columns += _spread_columns(estimate, {spread.name: spread for spread in plan.spread})
    overlaps = sum(phase.seconds for phase in estimate.phases) > estimate.seconds * (1 + 1e-9)
    bounds = [
        f"{phase.bound}, {_OVERLAPS}" if phase.name == "gen" and overlaps else phase.bound for phase in estimate.phases
    ]
    return [*columns, ["bound by", *bounds, ""]]


def remarks(plan: RecipePlan) -> list[str]:
    """Return sentences for below the table: tokens per second, the columns, the assumptions of each phase."""
    estimate = _estimate(plan)
    return [_speed(plan, estimate), *_meanings(plan), *assumptions(estimate)]


def assumptions(estimate: Estimate) -> list[str]:
    """Return the assumptions, each once, with the names of its phases."""
    of: dict[str, list[str]] = {}
    for phase in estimate.phases:
        for part in phase.assumed.split("; "):
            of.setdefault(part, []).append(phase.name)
    by_phases: dict[str, list[str]] = {}
    for part, names in of.items():
        by_phases.setdefault(", ".join(names), []).append(part)
    return [f"assumed for {phases}: {'; '.join(parts)}" for phases, parts in by_phases.items()]


def seconds(value: float) -> str:
    """Format seconds with three digits."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value:.4f} s"


def _estimate(plan: RecipePlan) -> Estimate:
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
        if value and (phase_spread := spread.get(name)) is not None:
            between = f"{seconds(phase_spread.low)} to {seconds(phase_spread.high)}" if phase_spread.runs > 1 else "–"
            cells = [
                f"{phase_spread.typical / value:.2f}",
                seconds(phase_spread.typical),
                between,
                str(phase_spread.runs),
            ]
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    return columns


def _speed(plan: RecipePlan, estimate: Estimate) -> str:
    expected = next((spread.typical for spread in plan.spread if spread.name == STEP), None)
    of = "calibrated" if estimate.uncalibrated is not None else _raw_name(plan)
    speeds = f"{estimate.tokens_per_second:,.0f} tokens/s (prompts and responses) {of}"
    if expected is not None:
        speeds += f", {estimate.tokens / expected:,.0f} expected"
    return (
        f"a step after the first ones, without evaluation and checkpoints: {speeds}; micro batches of a mini batch and data-parallel rank: {estimate.micro_batches}, of "
        f"{estimate.tokens_per_micro_batch:,.0f} tokens; bubble {estimate.bubble:.0%}"
    )


def _raw_name(plan: RecipePlan) -> str:
    """Return the column name: a device from the user's file may have factors already."""
    factors = plan.device.factors if plan.device is not None else {}
    return "estimate" if factors and _estimate(plan).uncalibrated is None else "raw"


def _meanings(plan: RecipePlan) -> list[str]:
    """Return sentences on the meaning and origin of each column, and on how to replace it by measurements."""
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
            f"{raw}; no published run with such a model is available, and nothing was measured on this device. {replace_it}"
        ]
    runs = pluralize(len(plan.compared), "published run")
    sentences = [
        f"{raw}. Neither this layout nor this device was measured",
        f"factor: measured / raw seconds, the geometric mean over {runs} of models {plan.model_kind}: {'; '.join(plan.compared)}. "
        "If only the step of a run was published, its ratio counts for each phase",
    ]
    if len(plan.compared) > 1:
        sentences.append(
            "expected: raw x factor. range: raw x the smallest and the largest ratio. docs/planner.md shows how well these runs predict "
            f"each other. {replace_it}"
        )
    else:
        sentences.append(f"expected: raw x factor. One run gives no range. {replace_it}")
    if (without := plan.without_own) is not None:
        sentences.append(
            f"{'; '.join(plan.own_runs)} had this recipe's model. From the other runs ({pluralize(without.runs, 'run')} or more per "
            f"phase), a step is expected to take {seconds(without.typical)}, range {seconds(without.low)} to {seconds(without.high)}"
        )
    return sentences
