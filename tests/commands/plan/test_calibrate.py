"""`plan --calibrate RUN`: it recovers the factors in a run's measurements, and refuses runs of other recipes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.batching.flops import model_flops
from megarl.commands.plan.count.types import Estimate, Links
from megarl.commands.plan.time.calibrate import calibrate_run
from megarl.commands.plan.time.calibration import read_calibration
from megarl.commands.plan.time.estimate import estimate
from megarl.commands.plan.time.lengths import Lengths
from megarl.errors import InputError
from megarl.platform.device_table import Device, device_named
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from tests.support import plans
from tests.support.estimate_cases import QWEN, rank, recipe

H100 = device_named("H100")
TRUE = replace(H100, train_share=0.21, prefill_share=0.175, decode_share=0.3, link_share=0.35)
LENGTHS = Lengths.around(prompt=80, mean=200, limit=380, assumed="")
SHARES = ("train_share", "prefill_share", "decode_share")
LINKS = ("link", "network", "host_link", "host_network")
MODELS = {"rollout": QWEN}
ORDINARY = {"algorithm__kl_coef": 0.1, "megatron__tensor_parallel": 2, "cluster__trainers": 2}

COUNTED = replace(plans.BARE, engine=None, weight_sync=None)

Change = Callable[[dict[str, float]], dict[str, float]]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing: estimates use formulas only."""
    monkeypatch.setattr("megarl.commands.plan.time.calibrate.make_plan", lambda *_, **__: COUNTED)


def write_run(path: Path, recipe: Recipe, times: Estimate, steps: int = 5, change: Change = lambda line: line) -> Path:
    """Write a run with phases that took the seconds of `times`, and ten times as long in the first two steps."""
    path.mkdir()
    (path / "recipe.resolved.yaml").write_text(to_yaml(replace(recipe, name=path.name)))
    samples = recipe.data.prompts_per_step * recipe.rollout.samples_per_prompt
    lengths = LENGTHS.samples(samples)
    flops = float(model_flops(QWEN).of_update(lengths).sum())
    line: dict[str, float] = {f"timing_s/{phase.name}": phase.seconds for phase in times.phases}
    line |= {"prompt_length/mean": 80, "response_length/mean": 200, "response_length/max": 380, "timing_s/save": 7.0}
    line |= {"perf/total_num_tokens": float(lengths.sum()), "rollout/prompts_tried": recipe.data.prompts_per_step}
    line["perf/tflops_per_device/actor"] = flops / line["timing_s/update_actor"] / recipe.cluster.trainers / 1e12
    line["timing_s/step"] = times.seconds + 7.5
    slow = {name: 10 * value if name.startswith("timing_s/") else value for name, value in line.items()}
    slow["perf/tflops_per_device/actor"] /= 10
    lines = [slow] * 2 + [change(dict(line))] * (steps - 2)
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": n} | line) + "\n" for n, line in enumerate(lines)))
    return path


def of(recipe: Recipe, device: Device) -> Estimate:
    return estimate(recipe, {"rollout": QWEN}, device, lengths=LENGTHS)


def fitted(recipe: Recipe, run: Path, tmp_path: Path) -> tuple[Device, str]:
    out = tmp_path / f"{run.name}.yaml"
    lines = calibrate_run(recipe, MODELS, H100, run, out)
    assert max(map(len, lines[1:-1])) <= 100
    return read_calibration(out).apply(H100), "\n".join(lines)


def assert_rates(device: Device, true: Device) -> None:
    """Compare the shares of peak rates and the achieved link rates."""
    for name in SHARES:
        assert getattr(device, name) == pytest.approx(getattr(true, name), rel=0.02), name
    for name in LINKS:
        reached = getattr(device, name) * device.link_share
        assert reached == pytest.approx(getattr(true, name) * true.link_share, rel=0.02), name


def test_fitting_recovers_the_shares_of_the_device(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE))
    device, printed = fitted(run_recipe, run, tmp_path)
    assert_rates(device, TRUE)
    assert device.factors == {} and "fitted to 3 steps of run" in device.source
    assert "save" in printed and "between phases       0.500 s" in printed
    wider = recipe(**ORDINARY, data__prompts_per_step=96)
    assert of(wider, device).seconds == pytest.approx(of(wider, TRUE).seconds, rel=0.02), "another batch is foretold"


def test_a_deviation_that_no_share_explains_becomes_a_factor(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)

    def odd(line: dict[str, float]) -> dict[str, float]:
        return line | {"timing_s/reference": 3 * line["timing_s/reference"], "timing_s/weight_sync": 50.0}

    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, H100), change=odd)
    device, printed = fitted(run_recipe, run, tmp_path)
    after = {phase.name: phase.seconds for phase in of(run_recipe, device).phases}
    measured = {phase.name: phase.seconds for phase in of(run_recipe, H100).phases}
    measured |= {"reference": 3 * measured["reference"], "weight_sync": 50.0}
    assert after == pytest.approx(measured, rel=0.01)
    assert device.factors["reference"] > 1.5 and device.factors["weight_sync"] > 10
    assert device.link_share == H100.link_share and "the links are not its bottleneck" in " ".join(printed.split())


def test_a_run_with_a_former_phase_name_is_read(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)

    def former(line: dict[str, float]) -> dict[str, float]:
        seconds = line.pop("timing_s/weight_sync")
        return line | {"timing_s/weight_exchange": seconds}

    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE), change=former)
    assert_rates(fitted(run_recipe, run, tmp_path)[0], TRUE)


def test_decode_share_of_async_sampling_is_fitted_if_trainers_waited(tmp_path: Path) -> None:
    run_recipe = recipe(rollout__max_staleness=1, cluster__placement="disaggregated", cluster__trainers=8)
    times = of(run_recipe, TRUE)
    seconds = {phase.name: phase.seconds for phase in times.phases}
    waited = seconds["gen"] - seconds["old_log_prob"] - seconds["update_actor"]
    assert waited > 0.1 * times.seconds
    run = write_run(
        tmp_path / "run", run_recipe, times, change=lambda line: line | {"timing_s/gen": 0.0, "timing_s/drain": waited}
    )
    assert fitted(run_recipe, run, tmp_path)[0].decode_share == pytest.approx(TRUE.decode_share, rel=0.02)
    hidden = write_run(
        tmp_path / "hidden", run_recipe, times, change=lambda line: line | {"timing_s/gen": 0.0, "timing_s/drain": 0.0}
    )
    device, printed = fitted(run_recipe, hidden, tmp_path)
    assert device.decode_share == H100.decode_share and "gen is not fitted" in printed


def test_sampling_time_of_filtered_groups_is_fitted(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    times = estimate(run_recipe, {"rollout": QWEN}, TRUE, lengths=LENGTHS, tried=3.0)
    run = write_run(tmp_path / "run", run_recipe, times, change=lambda line: line | {"rollout/prompts_tried": 96.0})
    assert fitted(run_recipe, run, tmp_path)[0].decode_share == pytest.approx(TRUE.decode_share, rel=0.02)


def test_sampling_time_of_surplus_groups_is_fitted(tmp_path: Path) -> None:
    """Over-sampling by 2 started 96 groups for 32: 64 tried, and 32 that no batch took."""
    run_recipe = recipe(
        **ORDINARY, algorithm__dynamic_sampling__enabled=True, algorithm__dynamic_sampling__oversample=2.0
    )
    times = estimate(run_recipe, {"rollout": QWEN}, TRUE, lengths=LENGTHS, tried=3.0)
    counts = {"rollout/prompts_tried": 64.0, "rollout/groups_unused": 32.0}
    run = write_run(tmp_path / "run", run_recipe, times, change=lambda line: line | counts)
    assert fitted(run_recipe, run, tmp_path)[0].decode_share == pytest.approx(TRUE.decode_share, rel=0.02)


def test_a_run_is_compared_with_the_estimate_of_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is compared with an estimate that has counted engines, the counted weight sync and the teacher's model."""
    run_recipe = recipe(**ORDINARY, weight_sync__route="sharded", algorithm__reference="teacher", teacher__path="t")
    run_recipe.rollout.engine_args = {"max_num_seqs": 64}
    plan = replace(COUNTED, engine=rank(cache=4 * 1000 * 280), weight_sync=Links("sharded", 10**9, 10**9, 10**9, 0))
    monkeypatch.setattr("megarl.commands.plan.time.calibrate.make_plan", lambda *_, **__: plan)
    models = {"rollout": QWEN, "teacher": {**QWEN, "num_hidden_layers": 32}}
    times = estimate(run_recipe, models, TRUE, lengths=LENGTHS, engine=plan.engine, links=plan.weight_sync)
    assert "teacher" in {phase.name for phase in times.phases}
    run = write_run(tmp_path / "run", run_recipe, times)
    calibrate_run(run_recipe, models, H100, run, tmp_path / "own.yaml")
    device = read_calibration(tmp_path / "own.yaml").apply(H100)
    assert_rates(device, TRUE)
    assert device.factors == {}


def test_a_users_device_is_calibrated_by_its_name(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("mine: {like: H100, memory: 96, network: 1e9, factors: {gen: 5}}")
    device = device_named("mine", theirs)
    run_recipe = recipe(**ORDINARY)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, replace(device, train_share=0.2, factors={})))
    calibrate_run(run_recipe, MODELS, device, run, tmp_path / "own.yaml")
    again = read_calibration(tmp_path / "own.yaml").apply(device)
    assert again.train_share == pytest.approx(0.2, rel=0.02) and again.factors == {}, (
        "the factor was not measured again"
    )
    assert (again.memory, again.network) == (96, pytest.approx(1e9))
    with pytest.raises(InputError, match=r"the calibration is for mine, the plan for H100\. Give --device mine"):
        read_calibration(tmp_path / "own.yaml").apply(H100)


def test_an_existing_output_file_is_kept(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE))
    (tmp_path / "own.yaml").write_text("other: 1")
    with pytest.raises(InputError, match=r"--out .*own.yaml exists"):
        calibrate_run(run_recipe, MODELS, H100, run, tmp_path / "own.yaml")
    assert (tmp_path / "own.yaml").read_text() == "other: 1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__prompts_per_step": 64}, "another recipe: data.prompts_per_step is 32 in the run and 64 here"),
        ({"megatron__recompute": "full"}, "megatron.recompute is 'none' in the run and 'full' here"),
    ],
)
def test_a_run_of_another_recipe_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE))
    with pytest.raises(InputError, match=message):
        calibrate_run(recipe(**ORDINARY, **settings), MODELS, H100, run, None)


def test_settings_without_effect_on_time_may_differ(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE))
    other = recipe(**ORDINARY, train__steps=99, actor__optimizer__lr=1.0, evaluation__every=3, name="other")
    assert calibrate_run(other, MODELS, H100, run, None)


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE))
    with pytest.raises(InputError, match=r"is a run of another model: its updates had .* Give the run's model"):
        calibrate_run(run_recipe, {"rollout": {**QWEN, "num_hidden_layers": 16}}, H100, run, None)


def test_a_folder_without_a_run_and_a_short_run_are_refused(tmp_path: Path) -> None:
    run_recipe = recipe(**ORDINARY)
    with pytest.raises(InputError, match=r"is not a training run: it lacks metrics.jsonl"):
        calibrate_run(run_recipe, MODELS, H100, tmp_path, None)
    run = write_run(tmp_path / "run", run_recipe, of(run_recipe, TRUE), steps=2)
    with pytest.raises(InputError, match="has no step past the first 2"):
        calibrate_run(run_recipe, MODELS, H100, run, None)


def test_a_missing_calibration_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_calibration(tmp_path / "none.yaml")
