"""Ranges of seconds from published runs, and a calibrated estimate next to the raw one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from docs.generate.planner import ratios
from megarl.commands.plan.count.types import Estimate, PhaseTime, RecipePlan
from megarl.commands.plan.show.estimate_table import remarks, seconds, seconds_columns
from megarl.commands.plan.show.tables import transposed
from megarl.commands.plan.time.estimate import estimate, with_estimate
from megarl.commands.plan.time.spread import RATIOS, Ratios, published_ratios, ratios_of, spreads
from megarl.hf import published
from tests.support import plans
from tests.support.estimate_cases import DEVICE, QWEN, recipe

KNOWN = [
    Ratios("a", True, {"gen": 2.0, "update_actor": 1.5}),
    Ratios("b", True, {"gen": 8.0}),
    Ratios("c", True, {"step": 4.0}),
    Ratios("dense", False, {"step": 1.0}),
]


def of(*phases: tuple[str, float, float | None]) -> Estimate:
    times = [PhaseTime(name, seconds, "x", "y", begin) for name, seconds, begin in phases]
    return Estimate(times, 0.0, 1.0, 1, 1.0, 0.0, 1.0)


def test_a_run_published_only_by_its_step_counts_for_each_phase() -> None:
    assert ratios_of("gen", experts=True, ratios=KNOWN) == [2.0, 8.0, 4.0]
    assert ratios_of("update_actor", experts=True, ratios=KNOWN) == [1.5, 4.0]
    assert ratios_of("gen", experts=True, ratios=[KNOWN[0], *KNOWN[2:]]) == [2.0, 4.0]
    assert ratios_of("gen", experts=False, ratios=KNOWN) == [1.0]


def test_the_range_of_a_step_is_the_sum_of_its_phases() -> None:
    """gen x 4 (2, 8, 4) and the update x sqrt(6) (1.5, 4); hand_over has the ratio of the run that published its step."""
    gen, hand_over, update, step = spreads(
        of(("gen", 10, None), ("hand_over", 1, None), ("update_actor", 10, None)), experts=True, ratios=KNOWN[:3]
    )
    assert (gen.low, gen.typical, gen.high, gen.runs) == (20, pytest.approx(40), 80, 3)
    assert update.typical == pytest.approx(10 * 6**0.5)
    assert hand_over.name == "hand_over" and hand_over.runs == 1, "by the run that published its step alone"
    assert (step.low, step.high) == (20 + 4 + 15, 80 + 4 + 40)
    assert step.typical == pytest.approx(40 + 4 + 10 * 6**0.5)
    assert spreads(of(("gen", 10, None)), experts=False, ratios=KNOWN[:3]) == []


def test_overlapping_phases_do_not_add_up() -> None:
    overlapped = of(("gen", 10, None), ("update_actor", 6, 0.0), ("weight_sync", 1, 10.0))
    step = spreads(overlapped, experts=True, ratios=[Ratios("one", True, {"update_actor": 5.0})])[-1]
    assert step.typical == pytest.approx(31), "30 of the update, behind which weight sync waits"


def test_the_package_has_the_ratios_of_the_published_runs() -> None:
    """`python -m docs.generate.planner` regenerates them."""
    assert yaml.safe_load(RATIOS.read_text()) == ratios()
    (deepseek,) = [run for run in published_ratios() if "910C" in run.run]
    assert deepseek.experts and deepseek.of["gen"] == pytest.approx(482.2 / 94.1, rel=0.01)


def table(plan: RecipePlan) -> dict[str, dict[str, str]]:
    """Cells of the table of seconds, by phase and head."""
    head, *rows = transposed(seconds_columns(plan))
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_table_has_raw_and_expected_seconds_factor_and_range() -> None:
    """The expected seconds are raw x factor; the report names the runs of the factor."""
    estimate = replace(of(("gen", 10, None), ("update_actor", 10, None)), seconds=20.0)
    spread = spreads(estimate, experts=True, ratios=KNOWN[:3])
    plan = replace(plans.LARGE, estimate=estimate, spread=spread, compared=["a", "b", "c"], model_kind="with experts")
    cells = table(plan)
    assert list(cells["gen"].values()) == ["gen", "10.0 s", "4.00", "40.0 s", "20.0 s to 80.0 s", "3", "x"]
    assert cells["step"]["raw"] == "20.0 s" and cells["step"]["range"] == "35.0 s to 120 s"
    text = " ".join(remarks(plan))
    assert (
        "3 published runs of models with experts: a; b; c." in text
        and "Neither this layout nor this device was measured" in text
    )
    assert "From the other runs" not in text


def test_one_run_gives_no_range_and_the_models_runs_are_also_excluded() -> None:
    """Qwen3-32B is the only dense run; DeepSeek-V3 was published twice."""
    run_recipe = recipe()
    dense = with_estimate(plans.BARE, run_recipe, {"rollout": QWEN}, DEVICE, DEVICE, None)
    assert table(dense)["gen"]["range"] == "–" and table(dense)["gen"]["runs"] == "1" and dense.without_own is None
    deepseek = published.read("DeepSeek-V3")
    plan = with_estimate(plans.BARE, run_recipe, {"rollout": deepseek}, DEVICE, DEVICE, None)
    assert plan.own_runs == [run for run in plan.compared if run.startswith("DeepSeek-V3")] and len(plan.own_runs) == 2
    assert plan.without_own is not None and plan.without_own.high < plan.spread[-1].high
    (line,) = (line for line in remarks(plan) if "From the other runs (2 runs or more per phase)" in line)
    assert seconds(plan.without_own.typical) in line and plan.own_runs[0] in line


def test_a_calibrated_plan_shows_raw_and_calibrated_seconds() -> None:
    run_recipe = recipe()
    plan = with_estimate(plans.BARE, run_recipe, {"rollout": QWEN}, DEVICE, DEVICE, None)
    assert plan.estimate is not None and plan.spread[-1].name == "step"
    fast = replace(DEVICE, factors={"update_actor": 2.0})
    calibrated = with_estimate(plans.BARE, run_recipe, {"rollout": QWEN}, fast, DEVICE, None)
    assert calibrated.estimate is not None and calibrated.estimate.uncalibrated == plan.estimate
    raw = next(
        phase.seconds
        for phase in estimate(run_recipe, {"rollout": QWEN}, DEVICE).phases
        if phase.name == "update_actor"
    )
    cells = table(calibrated)["update_actor"]
    assert (cells["raw"], cells["calibrated"]) == (seconds(raw), seconds(2 * raw)) and "factor" not in cells
    assert calibrated.spread == [] and "was measured" not in " ".join(remarks(calibrated))


def test_a_plan_without_a_published_run_has_a_remark() -> None:
    text = " ".join(remarks(replace(plans.LARGE, spread=[])))
    assert "no published run with such a model is available" in text and "--calibration FILE" in text


def test_seconds_with_a_users_factors_are_not_labelled_raw() -> None:
    calibrated = replace(plans.LARGE, device=replace(plans.DEVICE, factors={"gen": 2.0}))
    assert "estimate" in table(calibrated)["gen"] and "raw" not in table(calibrated)["gen"]
    assert "with the factors of 910B in --devices" in " ".join(remarks(calibrated))
