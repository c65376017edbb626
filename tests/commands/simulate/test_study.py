"""Costs and splits of recipes, the recommended schedule, and the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.commands.plan.time.estimate import estimate
from megarl.commands.simulate.command import as_dict
from megarl.commands.simulate.lengths import DrawnLengths, LogNormal, parse_lengths
from megarl.commands.simulate.planned import SimulatedRecipe
from megarl.commands.simulate.show.console import HEAD, remarks, schedule_columns, show
from megarl.commands.simulate.show.page import draw, render
from megarl.commands.simulate.simulation import AsyncSchedule, Simulation
from megarl.commands.simulate.study import Runner, SimulatedRun, Study, recommended, study
from megarl.errors import InputError
from megarl.platform.device_table import device_named
from megarl.preflight.load import load_recipe
from megarl.preflight.models import POLICY, config_of
from megarl.recipe.derived.at_update import max_lag, update_rule
from megarl.recipe.schema import RolloutConfig
from megarl.recipe.text import settings_of, to_yaml
from tests.support.estimate_cases import QWEN, recipe

ROOT = Path(__file__).parents[3]
H100 = device_named("H100")
LENGTHS = LogNormal(300, 3000, 4000, prompt=100.0)


def subject(devices: int = 16, **settings: Any) -> SimulatedRecipe:
    changed = recipe(
        **{
            "model__path": "model",
            "data__train_files": ["rows.parquet"],
            "cluster__trainers": 8,
            "cluster__device": "cuda",
            "rollout__engines": 4,
            "rollout__tensor_parallel": 2,
            "rollout__samples_per_prompt": 4,
            "rollout__max_response_length": 4000,
            "data__prompts_per_step": 16,
            "actor__max_tokens_per_micro_batch": 8192,
            **settings,
        }
    )
    return SimulatedRecipe(changed, {"rollout": QWEN}, H100, devices, LENGTHS)


def test_drain_and_the_synchronous_run_have_no_window_of_the_recipe() -> None:
    """A run with drain refuses a window, and the recipe has one for refresh."""
    simulated = subject(rollout__window=0.5, rollout__max_staleness=2.0, cluster__placement="disaggregated")
    for layout in (simulated.colocated(), simulated.split(8, "drain", 2, 0.0), simulated.split(8, "refresh", 2, 0.5)):
        assert simulated.refusal(layout) is None


def test_rules_that_train_refuses_are_refused() -> None:
    plain = subject(cluster__placement="disaggregated", rollout__max_staleness=1.0)
    images = replace(plain, models={"rollout": QWEN | {"model_type": "qwen2_5_vl", "vision_config": {}}})
    assert plain.refusal(plain.split(8, "keep", 1, 0.3)) is None
    assert "encoded images" in str(images.refusal(images.split(8, "keep", 1, 0.3)))


@pytest.fixture(scope="module")
def result() -> Study:
    return study(subject(), steps=12)


def test_costs_are_the_planners() -> None:
    """A batch of mean length takes the plan's seconds; a decode step rises with the number of requests."""
    case = subject(data__max_prompt_length=200)  # the plan assumes prompts of half of it
    layout = case.split(8, "refresh", 2, 0.3)
    costs, mean = case.costs(layout), case.mean
    expected = estimate(layout, {"rollout": QWEN}, H100, response=mean)
    seconds = {phase.name: phase.seconds for phase in expected.phases}
    trained = seconds["old_log_prob"] + seconds["update_actor"]
    tokens = 16 * 4 * (mean + costs.prompt)
    assert costs.training * tokens == pytest.approx(trained)
    assert costs.weight_sync == pytest.approx(seconds["weight_sync"]) and costs.hand_over == 0
    assert costs.engines == 4 and len(costs.decode) == 128 + 1  # vLLM runs 128 requests at most
    assert (np.diff(costs.decode[1:]) >= 0).all() and costs.decode[1] > 0
    assert case.costs(case.colocated()).hand_over > 0


def test_a_measured_factor_of_sampling_slows_engines() -> None:
    case = subject()
    slow = replace(case, device=replace(H100, factors={"gen": 2.0}))
    layout = case.split(8, "keep", 1, 0.0)
    before, after = case.costs(layout), slow.costs(layout)
    assert after.decode == pytest.approx(2 * before.decode) and after.prefill == pytest.approx(2 * before.prefill)
    assert after.training == pytest.approx(before.training)


def test_splits_are_whole_layouts() -> None:
    assert subject(16).trainer_counts() == [2, 4, 6, 8, 10, 12, 14]
    assert subject(16, megatron__tensor_parallel=4).trainer_counts() == [4, 8, 12]
    apart = subject(24, megatron__tensor_parallel=4, rollout__data_parallel=4)
    assert apart.blocks == (4, 8) and apart.trainer_counts() == [8, 16]
    assert subject(16, megatron__pipeline_parallel=2, megatron__expert_parallel=8).trainer_counts() == []
    unusual = subject(64, cluster__trainers=52, cluster__placement="disaggregated")
    assert 52 in unusual.trainer_counts()


def test_bytes_of_samples() -> None:
    assert subject().bytes_per_token == 13
    experts = QWEN | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "model_type": "qwen3_moe",
    }
    routed = replace(subject(megatron__routing_replay="rollout"), models={"rollout": experts})
    assert routed.bytes_per_token == 13 + 2 * 8 * 2


# --- the study -------------------------------------------------------------------------------------------------------


def test_a_study_has_every_rule_staleness_and_window(result: Study) -> None:
    names = {(run.name, run.setting.max_staleness, run.setting.window) for run in result.runs}
    in_flight = {
        (rule, s, w) for rule in ("colocated", "finish", "refresh", "keep") for s in (1, 2, 4, 8) for w in (0.0, 0.3)
    }
    assert names == {("sync", 0, 0.0), *(("drain", s, 0.0) for s in (1, 2, 4, 8)), *in_flight}
    assert all(run.gain is not None for run in result.runs)
    assert result.runs[0].gain == 1 and result.runs[0].name == "sync"
    apart = [run for run in result.runs if not run.setting.colocated]
    assert {run.setting.trainers for run in apart} == {result.trainers}
    for run in apart:
        layout = subject().split(run.setting.trainers, run.setting.rule, run.setting.max_staleness, run.setting.window)
        assert run.outcome.lag_max <= run.schedule.max_lag == max_lag(layout)
        assert run.setting.trainers + run.engine_devices == 16
        assert result.pending_bytes(run) == run.outcome.pending_tokens * 13


def test_the_recommended_run_is_near_the_fastest_with_the_least_lag(result: Study) -> None:
    best = result.best.outcome
    fastest = max(run.outcome.tokens_per_second for run in [*result.runs, *result.splits])
    assert best.tokens_per_second >= 0.95 * fastest
    of_table = recommended(result.runs, None)
    for run in result.runs:
        if run.outcome.tokens_per_second >= 0.95 * max(other.outcome.tokens_per_second for other in result.runs):
            assert run.outcome.lag_mean >= of_table.outcome.lag_mean


def test_the_largest_lag_is_respected(result: Study) -> None:
    assert recommended(result.runs, 0).name == "sync"
    assert recommended(result.runs, 2).schedule.max_lag <= 2
    with pytest.raises(InputError, match="--max-lag 0"):
        recommended(result.runs[1:], 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rollout__at_update": "keep", "rollout__refresh_after": 2},
        {"rollout__min_engines": 2, "rollout__step_timeout": 600.0},
    ],
)
def test_printed_settings_turn_the_recipe_into_the_simulated_layout(settings: dict[str, Any], tmp_path: Path) -> None:
    """They are read as `megarl train` reads them."""
    shares = not settings
    apart: dict[str, Any] = {} if shares else {"cluster__placement": "disaggregated", "rollout__max_staleness": 2.0}
    case = subject(**{**apart, **settings})
    assert case.refusal(case.recipe) is None
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(case.recipe))
    result, runner = study(case, steps=1), Runner(case, 1)
    for run in [*result.runs[::5], *result.splits]:
        layout = load_recipe(path, runner.settings(run), check=False)
        assert settings_of(layout) == settings_of(runner.layout(run.setting)), run.setting
        assert case.refusal(layout) is None, run.setting
    assert result.settings == runner.settings(result.best)
    assert bool(result.colocated_settings) == shares


def test_engines_may_die_in_the_layouts_that_allow_it() -> None:
    """`rollout.step_timeout` is refused without `rollout.min_engines`, so a recipe with both loses both or none."""
    apart: dict[str, Any] = {"cluster__placement": "disaggregated", "rollout__max_staleness": 2.0}
    case = subject(**apart, rollout__min_engines=2, rollout__step_timeout=600.0)
    kept, without = (2, 600.0), (None, RolloutConfig().step_timeout)
    for layout, expected in (
        (case.split(8, "refresh", 2, 0.3), kept),  # 4 engines
        (case.split(8, "drain", 2, 0.0), kept),
        (case.split(12, "refresh", 2, 0.3), without),  # 2 engines
        (case.split(8, "finish", 2, 0.3), without),
        (case.colocated(), without),
    ):
        assert (layout.rollout.min_engines, layout.rollout.step_timeout) == expected
        assert case.refusal(layout) is None


def test_rules_that_a_run_refuses_are_left_out_with_the_reason() -> None:
    result = study(subject(train__deterministic=True), steps=4)
    assert {run.name for run in result.runs} == {"sync", "drain"}
    assert any(
        note.startswith("Not simulated: colocated, finish, keep, refresh") and "train.deterministic" in note
        for note in result.notes
    )


def test_colocated_engines_run_ahead_in_a_colocated_recipe_only(result: Study) -> None:
    """The schedule has the devices, the lag and the rule of the layout that a run would have."""
    ahead = [run for run in result.runs if run.name == "colocated"]
    for run in ahead:
        layout = subject().colocated(run.setting.max_staleness, run.setting.window)
        assert subject().refusal(layout) is None and update_rule(layout) == "refresh"
        assert run.setting.trainers == run.engine_devices == 16
        assert run.outcome.lag_max <= run.schedule.max_lag == max_lag(layout)
        assert run.outcome.engines_idle >= run.outcome.training / run.outcome.step_seconds - 1e-9
    assert max(run.gain or 0 for run in ahead) > 1.2
    apart = study(subject(cluster__placement="disaggregated"), steps=2)
    assert "colocated" not in {run.name for run in apart.runs}


def test_a_colocated_recipe_has_a_recommendation_on_shared_devices(result: Study) -> None:
    """The best run has separate devices; a user who keeps the placement wants the best of the others."""
    assert not result.best.setting.colocated
    best = result.best_colocated
    assert best is not None and best.name == "colocated"
    shared = [run for run in result.runs if run.setting.colocated]
    assert best.outcome.tokens_per_second >= 0.95 * max(run.outcome.tokens_per_second for run in shared)
    settings = " ".join(result.colocated_settings)
    assert "rollout.at_update=refresh" in settings and "cluster.trainers=16" in settings
    assert any("On shared devices" in line and line.endswith(settings) for line in remarks(result))
    assert as_dict(result)["recommended_colocated"]["settings"] == result.colocated_settings
    assert study(subject(), steps=2, max_lag=1).best_colocated is not None
    assert study(subject(cluster__placement="disaggregated"), steps=2).best_colocated is None


def test_without_a_synchronous_run_no_gain_is_shown() -> None:
    case = subject(18, data__prompts_per_step=16, megatron__tensor_parallel=4)  # sync needs a multiple of 4
    result = study(case, steps=4)
    assert all(run.gain is None for run in result.runs) and "sync" not in {run.name for run in result.runs}
    assert any("No synchronous run" in note for note in result.notes)


# --- output ----------------------------------------------------------------------------------------------------------


def test_tables_and_page(result: Study, capsys: pytest.CaptureFixture[str]) -> None:
    columns = schedule_columns(result)
    assert [column[0] for column in columns] == list(HEAD) and len(columns[0]) == 38
    show(result)
    printed = capsys.readouterr().out
    assert "Recommended:" in printed and " ".join(result.settings) in printed
    html = render(result)
    assert "<script" not in html and "refresh, window 0.3" in html and result.settings[0] in html
    lines = draw(result).lines
    assert [line.name for line in lines[:2]] == ["sync", "colocated, window 0"] and sum(
        len(line.points) for line in lines
    ) == 37
    chosen: list[SimulatedRun] = [run for run in result.runs if run is result.best]
    assert sum(point.best for line in lines for point in line.points) == len(chosen)
    assert all(0 <= point.x <= 720 and 0 <= point.y <= 320 for line in lines for point in line.points)


def test_every_line_of_the_chart_has_a_colour_and_the_recommended_schedule_a_large_point(result: Study) -> None:
    """A recipe with another window has over 12 lines. The fastest split of the recommended schedule may not be the table's."""
    setting = result.best.setting
    best = replace(result.best, setting=replace(setting, trainers=setting.trainers + 2, oversample=2.0))
    more = [replace(run, setting=replace(run.setting, window=0.5)) for run in result.runs if run.setting.window == 0.3]
    changed = replace(result, best=best, runs=[*result.runs, *more])
    html, lines = render(changed), draw(changed).lines
    assert len(lines) > 12
    assert set(re.findall(r"var\(--c(\d+)\)", html)) <= set(re.findall(r"--c(\d+): #", html))
    (point,) = [point for line in lines for point in line.points if point.best]
    assert point.label == f"{setting.max_staleness:g}"


def test_json_is_strict_and_has_every_figure(result: Study) -> None:
    content = json.loads(json.dumps(as_dict(result), allow_nan=False))
    run = content["runs"][5]
    assert math.isclose(run["steps_per_hour"] * run["step_seconds"], 3600)
    assert content["recommended"]["settings"] == result.settings and len(content["runs"]) == 37
    assert {"lag_mean", "lag_bound", "engines_idle", "trainers_idle", "pending_bytes", "length_bias"} <= set(run)


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_the_command_prints_a_recipes_schedules(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    recipe_path = str(ROOT / "recipes/one_step_off_qwen3_8b.yaml")
    done = run_command(recipe_path, "--lengths", "3000,30000,32768", "--steps", "4", "--html", str(path), "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["devices"] == 16 and content["device"] == "910C"
    assert content["recommended"]["trainers"] == 8 and content["recommended"]["gain"] > 1.2
    assert "megarl simulate" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/grpo_qwen3_8b.yaml", "--lengths", "none/here"], "no such directory"),
        (["recipes/grpo_qwen3_8b.yaml", "--lengths", "recipes"], "0 samples"),
        (["recipes/grpo_qwen3_8b.yaml", "--filtered", "0.5"], "filters no group"),
        (["recipes/dapo_qwen3_30b.yaml", "--filtered", "1.5"], "a share of the groups"),
        (["recipes/ppo_qwen3_8b.yaml"], "trains a critic"),
        (["recipes/sft_peft_qwen3_8b.yaml"], "nothing is sampled"),
        (["recipes/grpo_qwen3_8b.yaml", "--devices", "3"], "cannot be split|refuse"),
        (["recipes/quickstart.yaml"], "give --device"),
        (["recipes/grpo_qwen3_8b.yaml", "--html", "none/here/x.html"], "--html"),
    ],
)
def test_wrong_input_is_refused(arguments: list[str], message: str) -> None:
    done = run_command(str(ROOT / arguments[0]), *arguments[1:])
    assert isinstance(done.exception, InputError)
    assert re.search(message, str(done.exception)), done.exception


def test_devices_that_cannot_be_split_are_simulated_together() -> None:
    """If trainers need every device, only engines on these devices are simulated; a note says how many a split needs."""
    done = run_command(str(ROOT / "recipes/dapo_qwen3_30b.yaml"), "--steps", "2", "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert {run["rule"] for run in content["runs"]} == {"sync", "colocated"}
    assert content["recommended"]["trainers"] == 16 and "--devices 20" in content["notes"][0]
    whole = {"megatron__pipeline_parallel": 2, "megatron__tensor_parallel": 8, "cluster__placement": "disaggregated"}
    with pytest.raises(InputError, match=r"16 devices cannot be split: trainers take multiples of 16 .*--devices 18"):
        study(subject(16, **whole), steps=2)


def test_a_synchronous_run_takes_the_seconds_of_its_plan() -> None:
    """`plan` sums phases of a mean step; the simulator plays each request. They differ by the tail of the engines."""
    path = ROOT / "recipes/cuda/grpo_qwen3_8b.yaml"
    settings = load_recipe(path)
    model = config_of(settings.model.path, path, POLICY)
    case = SimulatedRecipe(settings, {"rollout": model}, H100, 8, parse_lengths(None, None, settings))
    layout = case.colocated()
    lengths = DrawnLengths(case.lengths, settings.rollout.samples_per_prompt, 0)
    simulation = Simulation(case.costs(layout), AsyncSchedule.of(layout), lengths, settings.rollout.samples_per_prompt)
    planned = estimate(layout, {"rollout": model}, H100)
    assert simulation.run(6, 1).step_seconds == pytest.approx(planned.seconds, rel=0.05)
