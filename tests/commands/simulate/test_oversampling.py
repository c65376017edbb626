"""Factors of over-sampling: their rows, the recommended one, and the output."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megarl.commands.plan.search.layouts import overrides
from megarl.commands.plan.show.tables import transposed
from megarl.commands.simulate.group_filter import FilteredShare
from megarl.commands.simulate.planned import SimulatedRecipe
from megarl.commands.simulate.show.console import oversampling_columns, remarks, show
from megarl.commands.simulate.show.page import draw, render
from megarl.commands.simulate.study import KEYS, Runner, Study, factors, study
from megarl.errors import InputError
from megarl.recipe.algorithm import DynamicSamplingConfig
from tests.commands.simulate.test_study import ROOT, run_command, subject


def filtering(share: float = 0.5, **settings: Any) -> SimulatedRecipe:
    settings = {"algorithm__dynamic_sampling": DynamicSamplingConfig(enabled=True, max_attempts=10), **settings}
    return replace(subject(**settings), filtered=FilteredShare(share, f"{share:.0%} filtered"))


@pytest.fixture(scope="module")
def filtered() -> Study:
    return study(filtering(), steps=12)


@pytest.mark.slow
def test_dynamic_sampling_has_a_row_for_each_factor_of_over_sampling(filtered: Study) -> None:
    synchronous, best = filtered.oversampled
    assert [run.schedule.oversample for run in synchronous.runs] == [1.0, 1.6, 2.0, 2.2, 2.5, 3.0]
    assert {run.name for run in synchronous.runs} == {"sync"} and synchronous.runs[0] is filtered.runs[0]
    steps = [run.outcome.step_seconds for run in synchronous.runs]
    assert steps[3] < 0.6 * steps[0], "no step waits for replacements"
    assert synchronous.runs[0].outcome.unused == 0 and synchronous.runs[-1].outcome.unused > 0.2
    for each in (synchronous, best):
        fastest = max(run.outcome.tokens_per_second for run in each.runs)
        near = [run for run in each.runs if run.outcome.tokens_per_second >= 0.95 * fastest]
        assert each.best is near[0]
        assert all(run.gain == pytest.approx(run.outcome.tokens_per_second / filtered.runs[0].outcome.tokens_per_second)
                   for run in each.runs)  # fmt: skip
    assert synchronous.best.schedule.oversample > 1.5
    assert filtered.best is best.best and {run.setting.rule for run in best.runs} == {filtered.best.setting.rule}
    for run in filtered.runs:
        assert run.outcome.tried == pytest.approx(2, rel=0.15) and run.outcome.missing == 0
    assert study(subject(), steps=2).oversampled == []


def test_the_recipes_own_schedule_has_rows_and_its_factor_is_named() -> None:
    dynamic = DynamicSamplingConfig(enabled=True, max_attempts=10, oversample=2.7)
    case = filtering(
        cluster__placement="disaggregated", rollout__max_staleness=0.5, algorithm__dynamic_sampling=dynamic
    )
    result = study(case, steps=2)
    of_recipe = result.oversampled[1]
    assert {(run.name, run.setting.max_staleness, run.setting.trainers) for run in of_recipe.runs} == {
        ("refresh", 0.5, 8)
    }
    assert [run.schedule.oversample for run in of_recipe.runs if run.setting.oversample is None] == [2.7]
    lines = [line for line in remarks(result) if line.startswith("oversample for ")]
    assert len(lines) == len(result.oversampled) == 3 and lines[1].startswith(
        f"oversample for refresh with max_staleness 0.5 and window 0.3: {of_recipe.best.schedule.oversample:g}, "
    )
    runner = Runner(case, 1)
    for each in (of_recipe, result.oversampled[2]):  # the settings have the factor if it is not the recipe's
        changed = overrides(case.recipe, runner.layout(each.best.setting), KEYS)
        names = [text for text in changed if text.startswith("algorithm.dynamic_sampling.")]
        factor = each.best.schedule.oversample
        assert names == ([] if factor == 2.7 else [f"algorithm.dynamic_sampling.oversample={factor}"])
    assert result.settings == changed


def test_more_requests_run_with_over_sampling() -> None:
    """Engines of 128 requests at most, and 16 groups of 4: a decode step is known for the surplus, too."""
    case = filtering()
    layout = case.colocated()
    plain, over = case.costs(layout), case.costs(case.oversampled(layout, 1.5))
    assert (len(plain.decode), len(over.decode)) == (64 + 1, 96 + 1)


def test_factors_lie_around_the_groups_of_a_place_within_the_attempts() -> None:
    settings = filtering().recipe.algorithm.dynamic_sampling
    assert factors(settings, 0.5) == [1.0, 1.6, 2.0, 2.2, 2.5, 3.0]
    assert factors(settings, 0.0) == [1.0, 1.1, 1.2, 1.5]
    assert factors(settings, 0.95) == [1.0, 10.0]


def test_steps_that_reach_the_attempts_are_remarked() -> None:
    dynamic = DynamicSamplingConfig(enabled=True, max_attempts=2)
    result = study(filtering(0.7, algorithm__dynamic_sampling=dynamic), steps=4)
    assert 0.2 < result.best.outcome.missing < 0.6
    assert any("max_attempts. Raise it" in line for line in remarks(result))
    with pytest.raises(
        InputError, match=r"no group passed the filter in 4 simulated steps\. Give a smaller --filtered"
    ):
        study(filtering(0.9999), steps=4)


def test_the_page_and_the_console_have_the_table_of_over_sampling(
    filtered: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    show(filtered)
    printed, html = capsys.readouterr().out, render(filtered)
    for text in ("Over-sampling, simulated", "50% filtered, in each step alike"):
        assert text in printed and text in html
    head, *rows = transposed(oversampling_columns(filtered))
    assert dict(zip(head, rows[0], strict=True)) | {"oversample": "1", "unused": "0.0%", "missing": "0.0%"} == dict(
        zip(head, rows[0], strict=True)
    )
    assert sum(point.best for line in draw(filtered).lines for point in line.points) == 1


def test_the_command_takes_the_share_of_filtered_groups() -> None:
    arguments = [str(ROOT / "recipes/dapo_qwen3_30b.yaml"), "--steps", "2", "--json"]
    done = run_command(*arguments, "algorithm.dynamic_sampling.oversample=2.0", "--filtered", "0.25")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert any(note.startswith("25% of the groups are filtered, in each step") for note in content["notes"])
    (row, *_) = content["oversampled"]
    assert [run["oversample"] for run in row["runs"]] == [1.0, 1.1, 1.3, 1.5, 1.7, 2.0]
    assert 1.1 < row["runs"][0]["tried"] < 1.7 and row["recommended"] in (1.1, 1.3, 1.5, 1.7, 2.0)
    assert content["runs"][0]["oversample"] == 2.0 and content["runs"][0]["unused"] > 0.1
