"""Filtered groups: the simulated run against megarl's source of batches, and the share from options and runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.dynamic_sampling import LENGTHS, WARM_UP, Case, costs
from benchmarks.dynamic_sampling import simulate as run_source
from megarl.commands.simulate.group_filter import DrawnFilter, FilteredShare, parse_filtered
from megarl.commands.simulate.lengths import DrawnLengths
from megarl.commands.simulate.simulation import AsyncSchedule, Simulation
from megarl.errors import InputError
from megarl.recipe.algorithm import DynamicSamplingConfig
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from tests.support.estimate_cases import recipe

ENGINES, PROMPTS, SAMPLES, STEPS = 8, 64, 4, 6

CASES = [
    Case("no filter, refresh", filtered=False, max_staleness=1),
    Case("on policy", filtered=True),
    Case("on policy, replacements at once", filtered=True, admission="continuous"),
    Case("on policy, oversample 2.2", filtered=True, oversample=2.2),
    Case("drain, 0.2", filtered=True, max_staleness=0.2, at_update="drain", oversample=2.0),
    Case("refresh, 0.2", filtered=True, max_staleness=0.2, oversample=2.0),
    Case("refresh, 1", filtered=True, max_staleness=1),
    Case("refresh, 1, oversample 2.2", filtered=True, max_staleness=1, oversample=2.2),
    Case("refresh, 4, oversample 3", filtered=True, max_staleness=4, oversample=3.0),
]


def simulated(settings: Recipe, share: float, seed: int = 0) -> Simulation:
    lengths, drawn = DrawnLengths(LENGTHS, SAMPLES, seed), DrawnFilter(share, seed)
    return Simulation(costs(ENGINES), AsyncSchedule.of(settings), lengths, SAMPLES, drawn)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_simulated_run_has_the_steps_and_groups_of_the_real_source(case: Case) -> None:
    """The same lengths and filtered groups; `EnginesSource` with its threads' calls, under the benchmark's clock."""
    real = run_source(case, STEPS, ENGINES, PROMPTS, SAMPLES)
    simulation = simulated(case.recipe(PROMPTS, SAMPLES, WARM_UP + STEPS + 50), 0.5 if case.filtered else 0.0)
    outcome = simulation.run(STEPS, WARM_UP)
    assert outcome.step_seconds == pytest.approx(real.step, rel=0.01)
    assert (outcome.tried, outcome.unused) == (pytest.approx(real.tried), pytest.approx(real.unused))
    assert outcome.lag_max == real.most
    assert simulation.trained == [number for batch in real.trained for number in batch]


@pytest.mark.parametrize("oversample", [1.0, 2.5])
@pytest.mark.parametrize(
    ("rule", "staleness"), [("drain", 0), ("drain", 1), ("finish", 1), ("refresh", 0.5), ("keep", 2)]
)
def test_every_group_is_trained_filtered_unused_or_kept(rule: str, staleness: float, oversample: float) -> None:
    case = Case("", filtered=True, max_staleness=staleness, oversample=oversample, at_update=rule)
    settings = case.recipe(16, SAMPLES, 100)
    simulation = simulated(settings, 0.4, seed=3)
    simulation.run(12, 0)
    admission, records = simulation.admission, simulation.records
    assert all(simulation.group_filter.passes(number) for number in simulation.trained)  # type: ignore[union-attr]
    assert len(simulation.trained) == len(set(simulation.trained)) == 12 * 16 == sum(each.groups for each in records)
    kept = [*admission.waiting(), *admission.tried, *(item for batch in admission.closed for item in batch)]
    ended = sum(each.tried + each.unused for each in records) + simulation._unused
    assert ended + len(kept) + admission.running == admission.state.admitted
    waiting = [simulation._groups[item.group.number] for item in kept if item.accepted]
    parts = [simulation._groups[number] for number in admission.unfinished()]
    finished = sum(SAMPLES - group.left for group in [*waiting, *parts])
    assert simulation._pending.samples == finished, "filtered and unused groups take no memory"
    tokens = sum(group.tokens for group in [*waiting, *parts])
    assert simulation._pending.tokens == pytest.approx(tokens + finished * LENGTHS.prompt)


def test_trainers_wait_and_train_with_a_filter() -> None:
    """Half of the groups filtered: with slow trainers, engines that run ahead hide it; on policy they cannot."""
    steps = {}
    for staleness, share in ((0.0, 0.0), (0.0, 0.5), (4.0, 0.0), (4.0, 0.5)):
        settings = Case("", filtered=True, max_staleness=staleness).recipe(PROMPTS, SAMPLES, 100)
        simulation = simulated(settings, share)
        simulation.costs = replace(simulation.costs, training=600 / (PROMPTS * SAMPLES * 2500))
        steps[staleness, share] = simulation.run(8, 4).step_seconds
    assert steps[0.0, 0.5] > 1.5 * steps[0.0, 0.0]
    assert steps[4.0, 0.5] == pytest.approx(steps[4.0, 0.0], rel=0.1)


def test_on_policy_training_begins_after_the_surplus() -> None:
    """Engines on the trainers' devices sleep during the update, so training does not overlap surplus groups."""
    settings = Case("", filtered=True, oversample=3.0).recipe(16, SAMPLES, 100)
    free, slow = simulated(settings, 0.5), simulated(settings, 0.5)
    slow.costs = replace(slow.costs, training=0.01)
    without, outcome = free.run(4, 1), slow.run(4, 1)
    assert outcome.step_seconds == pytest.approx(without.step_seconds + outcome.training, rel=1e-6)


def test_filtered_groups_depend_on_seed_and_number_alone() -> None:
    first, late, other = DrawnFilter(0.3, 5), DrawnFilter(0.3, 5), DrawnFilter(0.3, 6)
    last = late.passes(3999)
    drawn = [first.passes(number) for number in range(4000)]
    assert drawn[3999] == last and drawn == [late.passes(number) for number in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(0.7, abs=0.02)
    assert drawn != [other.passes(number) for number in range(4000)]
    assert all(DrawnFilter(0.0, 0).passes(number) for number in range(100))


# --- the share -------------------------------------------------------------------------------------------------------


def dynamic(metric: str = "reward") -> DynamicSamplingConfig:
    return DynamicSamplingConfig(enabled=True, metric=metric)


def write_samples(run: Path, groups: list[list[float]]) -> None:
    (run / "samples").mkdir(parents=True)
    records = [
        {"group": number, "reward": reward, "parts": {"accuracy": float(reward > 0.5)}, "response_length": 5}
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]
    (run / "samples" / "step_000001.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_metrics(run: Path, lines: list[tuple[int, int]]) -> None:
    run.mkdir()
    (run / "recipe.resolved.yaml").write_text(to_yaml(recipe(algorithm__dynamic_sampling=dynamic())))
    text = "".join(
        json.dumps({"step": step, "rollout/prompts_tried": tried, "rollout/groups_filtered": equal}) + "\n"
        for step, (tried, equal) in enumerate(lines, start=1)
    )
    (run / "metrics.jsonl").write_text(text)


def test_the_share_of_an_option_and_the_assumed_one() -> None:
    assert parse_filtered("0.25", None, dynamic()) == FilteredShare(0.25, "25% of the groups are filtered")
    assumed = parse_filtered(None, "300,3000,4000", dynamic())
    assert assumed is not None and assumed.share == 0.5 and "assumed" in assumed.assumed
    assert parse_filtered(None, None, DynamicSamplingConfig()) is None


def test_a_run_with_a_filter_has_counted_its_groups(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_metrics(run, [(20, 4), (30, 11)])
    by_lengths, by_option = parse_filtered(None, str(run), dynamic()), parse_filtered(str(run), None, dynamic())
    assert by_lengths == by_option and by_option is not None and by_option.share == pytest.approx(0.3)
    assert parse_filtered("0.5", str(run), dynamic()) == FilteredShare(0.5, "50% of the groups are filtered")


def test_a_run_without_a_filter_has_samples(tmp_path: Path) -> None:
    """10 groups of 40 have equal rewards, 20 have equal accuracies; a group of a single sample counts nowhere."""
    groups = [[0.0, 0.0]] * 10 + [[0.6, 0.9]] * 10 + [[0.2, 0.9]] * 20 + [[1.0]]
    write_samples(tmp_path, groups)
    shares = [parse_filtered(str(tmp_path), None, dynamic(metric)) for metric in ("reward", "accuracy")]
    assert [each.share for each in shares if each is not None] == [0.25, 0.5]
    with pytest.raises(InputError, match=r"step 1 .* has a sample without 'format'"):
        parse_filtered(str(tmp_path), None, dynamic("format"))


def test_a_run_that_gives_lengths_need_not_give_the_share(tmp_path: Path) -> None:
    write_metrics(tmp_path / "few", [(10, 4)])
    assumed = parse_filtered(None, str(tmp_path / "few"), dynamic())
    assert assumed is not None and assumed.share == 0.5
    assert re.search(r"assumed, because --lengths .*10 groups in .* at least 20", assumed.assumed)


def test_groups_without_a_score_were_not_filtered(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", [(50, 10)])
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(json.dumps({**json.loads(metrics.read_text()), "rollout/groups_unscored": 10}) + "\n")
    share = parse_filtered(str(tmp_path / "run"), None, dynamic())
    assert share is not None and share.share == 0.25


def test_wrong_shares_are_refused(tmp_path: Path) -> None:
    for text in ("1", "1.0", "-0.1", "nan"):
        with pytest.raises(InputError, match=rf"--filtered {text}: expected a share"):
            parse_filtered(text, None, dynamic())
    with pytest.raises(InputError, match="--filtered none/here: no such directory"):
        parse_filtered("none/here", None, dynamic())
    with pytest.raises(InputError, match="the recipe filters no group"):
        parse_filtered("0.5", None, DynamicSamplingConfig())
    write_metrics(tmp_path / "few", [(10, 4)])
    with pytest.raises(InputError, match=r"--filtered .*10 groups in .* at least 20"):
        parse_filtered(str(tmp_path / "few"), None, dynamic())
    write_metrics(tmp_path / "all", [(40, 40)])
    with pytest.raises(InputError, match="no batch would be complete"):
        parse_filtered(str(tmp_path / "all"), None, dynamic())
