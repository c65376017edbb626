"""Ranges of seconds from published runs, and a calibrated estimate beside the table's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from megarl.planner.command import with_estimate
from megarl.planner.document import ratios
from megarl.planner.estimate import estimate
from megarl.planner.estimate_table import estimate_lines, seconds, spread_lines
from megarl.planner.plan import Estimate, PhaseTime
from megarl.planner.show import seconds_lines
from megarl.planner.spread import RATIOS, Ratios, published_ratios, ratios_of, spreads
from tests import plans
from tests.estimate_cases import DEVICE, QWEN, recipe

KNOWN = [
    Ratios("a", True, {"gen": 2.0, "update_actor": 1.5}),
    Ratios("b", True, {"gen": 8.0}),
    Ratios("c", True, {"step": 4.0}),
    Ratios("dense", False, {"step": 1.0}),
]


def of(*phases: tuple[str, float, float | None]) -> Estimate:
    found = [PhaseTime(name, seconds, "x", "y", begin) for name, seconds, begin in phases]
    return Estimate(found, 0.0, 1.0, 1, 1.0, 0.0, 1.0)


def test_a_run_published_by_its_step_stands_for_each_phase() -> None:
    assert ratios_of("gen", experts=True, ratios=KNOWN) == [2.0, 8.0, 4.0]
    assert ratios_of("update_actor", experts=True, ratios=KNOWN) == [1.5, 4.0]
    assert ratios_of("gen", experts=True, ratios=KNOWN, without="b") == [2.0, 4.0]
    assert ratios_of("gen", experts=False, ratios=KNOWN) == [1.0]


def test_a_step_of_phases_one_after_the_other() -> None:
    """gen x 4 (2, 8, 4) and the update x sqrt(6) (1.5, 4); the hand-over, of which nothing is known, stays."""
    gen, hand_over, update, step = spreads(
        of(("gen", 10, None), ("hand_over", 1, None), ("update_actor", 10, None)), experts=True, ratios=KNOWN[:3]
    )
    assert (gen.low, gen.typical, gen.high, gen.runs) == (20, pytest.approx(40), 80, 3)
    assert update.typical == pytest.approx(10 * 6**0.5)
    assert hand_over.name == "hand_over" and hand_over.runs == 1, "by the run that published its step alone"
    assert (step.low, step.high) == (20 + 4 + 15, 80 + 4 + 40)
    assert step.typical == pytest.approx(40 + 4 + 10 * 6**0.5)
    assert spreads(of(("gen", 10, None)), experts=False, ratios=KNOWN[:3]) == []


def test_phases_beside_each_other_do_not_add_up() -> None:
    beside = of(("gen", 10, None), ("update_actor", 6, 0.0), ("weight_exchange", 1, 10.0))
    step = spreads(beside, experts=True, ratios=[Ratios("one", True, {"update_actor": 5.0})])[-1]
    assert step.typical == pytest.approx(31), "30 of the update, behind which the exchange waits"


def test_the_package_has_the_ratios_of_the_published_runs() -> None:
    """`python -m megarl.planner.document` writes them anew."""
    assert yaml.safe_load(RATIOS.read_text()) == ratios()
    (deepseek,) = [one for one in published_ratios() if "910C" in one.run]
    assert deepseek.experts and deepseek.of["gen"] == pytest.approx(482.2 / 94.1, rel=0.01)


def test_the_console_shows_range_and_calibration() -> None:
    made = recipe()
    plan = with_estimate(plans.BARE, made, {"rollout": QWEN}, DEVICE, DEVICE, None)
    assert plan.estimate is not None and plan.spread[-1].name == "step"
    lines = seconds_lines(plan)
    assert any(line.startswith("Never measured") for line in lines)
    assert any("1 runs" in line for line in lines), "one dense run is known"
    fast = replace(DEVICE, factors={"update_actor": 2.0})
    calibrated = with_estimate(plans.BARE, made, {"rollout": QWEN}, fast, DEVICE, None)
    assert calibrated.spread == [] and not any("Never measured" in line for line in seconds_lines(calibrated))
    assert calibrated.estimate is not None and calibrated.estimate.uncalibrated == plan.estimate
    raw = next(phase.seconds for phase in estimate(made, QWEN, None, DEVICE).phases if phase.name == "update_actor")
    (line,) = (one for one in estimate_lines(calibrated.estimate) if one.lstrip().startswith("update_actor"))
    assert f"({seconds(raw)})" in line and f" {seconds(2 * raw)} " in line
    assert spread_lines([], measured=False)[0].startswith("No published run")
