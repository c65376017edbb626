"""`train.on_spike` in the controller: notices, counts, the end of a run with only skipped updates, and resumed runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.spikes import GradNorms
from megarl.checkpoint.next_commands import Repetition
from megarl.observe.log import RunLog
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe, TrainConfig
from megarl.train import run_steps
from megarl.trainer.step_metrics import unusual_updates
from tests.test_train import build

NAN = float("nan")
CALM = [1.0, 3.0] * 8  # the first sixteen updates; their median is 2


@pytest.fixture
def recipe() -> Recipe:
    recipe = Recipe()
    recipe.train.steps, recipe.train.on_spike = 20, "skip"
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt = 1, 2
    recipe.observe.console, recipe.observe.samples_per_step = "plain", 0
    recipe.observe.tensorboard = recipe.observe.report = False
    return recipe


def run(recipe: Recipe, folder: Path, norms: Sequence[float | list[float]], **further: Any) -> Any:
    """Train to the end and return the run. `norms`: see the stand-in `Workers`, which skips norms above 100."""
    with RunLog(recipe, folder, 1, recipe.train.steps) as log:
        run = build(recipe, folder, log, norms, **further)
        run_steps(run)
    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def notices(folder: Path) -> list[str]:
    texts = [json.loads(line)["text"] for line in (folder / "notices.jsonl").read_text().splitlines()]
    return [text for text in texts if "update " in text]


def test_a_skipped_spike_is_counted_and_reported(recipe: Recipe, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    trained = run(recipe, tmp_path, [*CALM, [1.0, 500.0], 2.0], calls=calls)
    (notice,) = notices(tmp_path)
    assert notice.startswith(
        "step 17: update 2 of 2 of the actor was skipped, and left the weights unchanged: its gradient norm 500 is above "
        "10 times the median 1 of the 17 updates before (train.spike_factor). To repeat the step: python -m megarl train "
    )
    line = lines(tmp_path)[16]
    assert line["actor/spikes"] == 1 and line["actor/skipped_updates"] == 1 and line["actor/grad_norm"] == 250.5
    assert lines(tmp_path)[15]["actor/spikes"] == 0
    assert trained.skipped.norms["actor"].state() == [*CALM, 1.0, 2.0, 1.0, 1.0], "only norms of applied updates"
    sent = [arguments for name, *arguments in calls if name == "actor.skip_spikes"]
    assert sent[0] == [[]] and sent[17] == [[*CALM, 1.0]], "the norms of the steps before go to the trainers"


def test_with_warn_a_spike_is_applied_and_reported(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.on_spike, calls = "warn", list[tuple[Any, ...]]()
    trained = run(recipe, tmp_path, [*CALM, 500.0], calls=calls)
    (notice,) = notices(tmp_path)
    assert json.loads((tmp_path / "notices.jsonl").read_text())["event"] == "update", "alerts can select it"
    assert (
        "step 17: update 1 of 1 of the actor was applied: its gradient norm 500 is above 10 times the median 2"
        in notice
    )
    line = lines(tmp_path)[16]
    assert line["actor/spikes"] == 1 and line["actor/skipped_updates"] == 0
    assert 500.0 in trained.skipped.norms["actor"].state(), "an applied update counts in the median"
    assert "actor.skip_spikes" not in {name for name, *_ in calls}


def test_without_the_key_norms_are_not_compared(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.on_spike = None
    run(recipe, tmp_path, [*CALM, 500.0])
    assert notices(tmp_path) == [] and not any("actor/spikes" in line for line in lines(tmp_path))


def test_a_norm_that_is_not_finite_has_a_notice_and_is_no_spike(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path, [*CALM, [NAN, 1.0]])
    (notice,) = notices(tmp_path)
    assert (
        "step 17: update 1 of 2 of the actor was skipped, and left the weights unchanged: its gradient norm is nan. "
        in notice
    )
    assert lines(tmp_path)[16]["actor/spikes"] == 0 and lines(tmp_path)[16]["actor/skipped_updates"] == 1


def test_a_notice_names_only_the_first_updates(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path, [*CALM, [400.0, 500.0, 600.0, 700.0, 1.0]])
    (notice,) = notices(tmp_path)
    assert "update 2 of 5" in notice and "update 3 of 5" not in notice and "; and 2 more. To repeat" in notice
    assert lines(tmp_path)[16]["actor/spikes"] == 4


def test_actor_and_critic_are_compared_with_their_own_norms(recipe: Recipe, tmp_path: Path) -> None:
    recipe.algorithm.advantage = "gae"
    run(recipe, tmp_path, CALM, critic=[90.0] * 16 + [101.0, 950.0])
    assert [line["critic/spikes"] for line in lines(tmp_path)[15:18]] == [0, 1, 1], "as the stand-in skips them"
    assert not any(line["actor/spikes"] for line in lines(tmp_path))
    assert "update 1 of 1 of the critic was skipped" in notices(tmp_path)[0]


def test_a_run_of_spikes_stops_and_names_the_cause(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.stop_after_skipped = 2
    with pytest.raises(RuntimeError) as raised:
        run(recipe, tmp_path, [*CALM, [400.0, 500.0], [600.0, NAN]])
    assert (
        "actor was skipped (actor/skipped_updates), because actor/grad_norm was above 10 times the median 2 of the 16 updates "
        "before (train.spike_factor) (1 of them), actor/grad_norm was above 10 times the median 2 of the 16 updates before "
        "(train.spike_factor) and actor/grad_norm was nan (1 of them)."
    ) in str(raised.value)


def test_a_resumed_run_compares_with_the_same_norms(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the norms of the checkpoint, no update of the resumed run would be a spike."""
    recipe.train.steps = 16
    saved = json.loads(json.dumps(run(recipe, tmp_path, [*CALM[:-1], 0.1 + 0.2]).checkpoints.saver.state))
    saved["metrics"] = {}
    monkeypatch.setattr("megarl.checkpoint.run_checkpoints.load_state", lambda path: saved)
    monkeypatch.setattr("megarl.checkpoint.run_checkpoints.set_aside_later", lambda folder, step: [])
    recipe.train.steps = 17
    with RunLog(recipe, tmp_path / "resumed", 17, 17) as log:
        resumed = build(recipe, tmp_path / "resumed", log, [500.0])
        resumed.source.restore = lambda state: None  # type: ignore[method-assign]
        run_steps(resumed, tmp_path)
    assert resumed.skipped.norms["actor"].state() == [*CALM[:-1], 0.1 + 0.2], "bitwise equal"
    assert lines(tmp_path / "resumed")[0]["actor/spikes"] == 1


def test_an_update_is_compared_with_the_earlier_ones_of_its_step() -> None:
    """A norm of 30 is a spike after sixteen norms of 1, and none after the step's other updates have raised the median."""
    norms = GradNorms(TrainConfig(on_spike="warn", spike_window=16), [1.0] * 16)
    updates = [{"actor/grad_norm": norm, "actor/skipped_updates": 0.0} for norm in [30.0, *[9.0] * 9, 30.0]]
    assert [update.name for update in unusual_updates(updates, "actor", norms)] == ["update 1 of 11 of the actor"]


def test_the_advice_names_a_command_that_can_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "runs" / "mine")
    begin = tmp_path / "runs" / "mine" / "checkpoints" / "step_000010"
    begin.mkdir(parents=True)
    bundle = "python -m megarl replay runs/mine --bundle step.tar --step 12"
    for checkpoint in (None, begin):
        assert bundle in Repetition(directory, has_tape=True, checkpoint=checkpoint).advice(12)
    without_tape = Repetition(directory, has_tape=False, checkpoint=None)
    command = "python -m megarl train runs/mine/recipe.resolved.yaml name=repeated train.resume="
    assert f"{command}runs/mine/checkpoints/step_000010" in without_tape.advice(12)
    assert f"{command}never" in without_tape.advice(10), "the checkpoint of a step begins after it"
    shutil.rmtree(begin)
    advice = Repetition(directory, has_tape=True, checkpoint=begin).advice(12)
    assert "cannot be repeated" in advice and str(begin) in advice and "train.keep_every" in advice
