"""The training loop over stand-ins for trainers, engines and saver: stop conditions, checkpoints and freed memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.algorithms.kl import KLWeight
from megarl.assembly import Run
from megarl.checkpoint.graceful_stop import GracefulStop
from megarl.checkpoint.next_commands import Repetition
from megarl.checkpoint.run_checkpoints import Checkpoints
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.observe.log import RunLog
from megarl.observe.profiling import Profiling
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples
from megarl.observe.token_values import read_token_values
from megarl.recipe.schema import Recipe
from megarl.step import training_step
from megarl.train import run_steps
from megarl.trainer.group import ActorGroup, CriticGroup
from megarl.types import Group, InlineData, Metrics, SampleTokens
from megarl.weight_sync.placement import Placement
from tests.support.training_stand_ins import Saver, Source, Workers


@pytest.fixture
def recipe() -> Recipe:
    recipe = Recipe()
    recipe.train.steps, recipe.train.save_every, recipe.train.stop_after_skipped = 8, 1, 3
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt = 1, 2
    recipe.observe.console, recipe.observe.samples_per_step = "plain", 0
    recipe.observe.tensorboard = recipe.observe.report = False
    return recipe


def fit(
    recipe: Recipe,
    folder: Path,
    actor: Sequence[float | list[float]],
    *,
    critic: list[float] | None = None,
    without: tuple[int, ...] = (),
) -> int:
    """Run to the end; returns the number of steps."""
    with RunLog(recipe, folder, 1, recipe.train.steps) as log:
        run = build(recipe, folder, log, actor, critic, without)
        run_steps(run)
    return run.source.taken  # type: ignore[attr-defined]


def build(
    recipe: Recipe,
    folder: Path,
    log: RunLog,
    actor: Sequence[float | list[float]],
    critic: list[float] | None = None,
    without: tuple[int, ...] = (),
    calls: list[tuple[Any, ...]] | None = None,
) -> Run:
    """Build a run of stand-ins. `calls` collects the calls to actor and critic, in order."""
    trainers: Any = Workers("actor", actor, calls)
    actor_group = ActorGroup(trainers, recipe)
    actor_group.describe()
    critic_group = None
    if critic is not None:
        workers: Any = Workers("critic", critic, calls)
        critic_group = CriticGroup(workers, recipe)
        critic_group.describe()
    source: Any = Source(without)
    saver: Any = Saver(folder / "checkpoints")
    algorithm, tokenizer = recipe.algorithm, cast(Any, None)
    skipped = SkippedSteps(recipe.train, Repetition(RunDirectory(folder), has_tape=False, checkpoint=None))
    kl_weight = KLWeight(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    return Run(
        recipe=recipe,
        actor=actor_group,
        critic=critic_group,
        teacher=None,
        source=source,
        devices=Placement(),
        evaluate=None,
        checkpoints=Checkpoints(
            recipe.train, saver, source, kl_weight, skipped, {}, lambda path: [None], log, GracefulStop(60.0)
        ),
        skipped=skipped,
        kl_weight=kl_weight,
        tokenizer=tokenizer,
        profiling=Profiling(recipe.observe, actor_group, [], log, folder / "profile", 1.0, lambda: None),
        log=log,
        started_devices=1,
        device_peak=None,
    )


NAN = math.nan


def test_a_run_with_only_skipped_updates_stops_and_names_the_resume(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(recipe, tmp_path, [1.0, 1.0, 1.0, NAN, NAN, math.inf, 1.0])
    text = str(raised.value)
    for words in (
        "in 3 consecutive steps, 4 to 6", "actor/skipped_updates", "actor/grad_norm was nan (2 of them)",
        "actor/grad_norm was inf (1 of them)", f"train.resume={tmp_path}/checkpoints/step_000002", "stop_after_skipped=0",
    ):  # fmt: skip
        assert words in text, (words, text)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000003"], "a checkpoint of the same weights took a better one's place"
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 6, "the last step has its line"
    assert "no weight has changed" in (tmp_path / "notices.jsonl").read_text()


def test_a_successful_update_resets_the_count_of_skipped_steps(recipe: Recipe, tmp_path: Path) -> None:
    assert fit(recipe, tmp_path, [NAN, NAN, 1.0, NAN, NAN, 1.0, NAN, NAN]) == 8


def test_steps_without_a_group_count_as_skipped(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"2 to 4.*grad_norm was nan \(1 of them\), no group with spread.*\(2 of them"
    ):
        fit(recipe, tmp_path, [1.0, NAN], without=(3, 4))
    assert "The only earlier checkpoint" in (tmp_path / "summary.json").read_text(), "its weights are not known good"


def test_a_step_that_is_not_traced_has_a_notice(recipe: Recipe, tmp_path: Path) -> None:
    recipe.observe.profile_steps = [2, 3]
    fit(recipe, tmp_path, [], without=(3, 4))
    notices = (tmp_path / "notices.jsonl").read_text()
    assert "step 2 was traced" in notices and "step 3 was not traced" in notices and "step 4 was not" not in notices


def test_stop_after_skipped_0_never_stops(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.stop_after_skipped = 0
    assert fit(recipe, tmp_path, [NAN] * 8) == 8
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000007", "step_000008"]


def test_skipped_critic_updates_stop_the_run(recipe: Recipe, tmp_path: Path) -> None:
    """Holds also in critic warm-up. `Source.admit` checks that the batch is freed before the next is sampled."""
    recipe.algorithm.advantage, recipe.critic.warmup_steps = "gae", 2
    with pytest.raises(RuntimeError, match=r"1 to 3: every update of the critic.*critic/grad_norm was nan"):
        fit(recipe, tmp_path, [], critic=[NAN] * 8)


def calls_of_a_step(recipe: Recipe, folder: Path, *, critic: bool = False) -> list[tuple[Any, ...]]:
    recipe.train.steps, calls = 1, list[tuple[Any, ...]]()
    with RunLog(recipe, folder, 1, 1) as log:
        run_steps(build(recipe, folder, log, [1.0], [1.0] if critic else None, calls=calls))
    return calls


def names(calls: list[tuple[Any, ...]]) -> list[str]:
    return [name for name, *_ in calls]


def test_the_console_reports_the_first_weights(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.observe.console = "plain"
    calls_of_a_step(recipe, tmp_path)
    _, start, *_ = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("run", "start", "step")))
    assert start.endswith("| engines have the trainers' weights")


def test_order_of_a_step(recipe: Recipe, tmp_path: Path) -> None:
    assert names(calls_of_a_step(recipe, tmp_path)) == [
        "actor.load_shard", "actor.compute_old_log_probs", "actor.update_actor"
    ]  # fmt: skip


class Pieces:
    """A tokenizer that writes tokens as numbers."""

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return "".join(f" {token}" for token in ids)


@pytest.mark.parametrize(("kept", "recorded"), [(1, 1), (0, 0)])
def test_tokens_of_the_first_samples_are_written_with_the_trainers_values(
    recipe: Recipe, tmp_path: Path, kept: int, recorded: int
) -> None:
    recipe.observe.samples_per_step, recipe.observe.token_samples_per_step = 2, kept
    calls = list[tuple[Any, ...]]()
    with RunLog(recipe, tmp_path, 1, 1) as log:
        run = build(recipe, tmp_path, log, [], calls=calls)
        run.tokenizer = cast(Any, Pieces())
        batch = run.source.take(1)
        vectors = SampleTokens(np.arange(5), np.arange(5) > 1, np.zeros(5), "three tokens")
        for sample in batch.groups[0].samples:
            sample.data = InlineData([vectors] * 2)
        training_step(run, batch, 1)
    assert names(calls).count("actor.take_recorded_tokens") == recorded
    run_dir = RunDirectory(tmp_path)
    records = [read_token_values(run_dir, 1, sample) for sample in read_samples(run_dir, 1)]
    written = [record["tokens"] for record in records if record is not None]
    assert len(records) == 2 and written == [[" 2", " 3", " 4"]] * recorded
    assert [record["values"]["entropy"] for record in records if record] == [[2.0, 3.0, 4.0]] * recorded


def test_a_kl_loss_needs_the_reference_and_keeps_the_advantages(recipe: Recipe, tmp_path: Path) -> None:
    recipe.algorithm.kl_coef = 0.5
    calls = calls_of_a_step(recipe, tmp_path)
    assert names(calls)[1:] == [
        "actor.compute_old_log_probs", "actor.compute_reference_log_probs", "actor.update_actor"
    ]  # fmt: skip
    assert calls[-1][1:] == (0.5, None)


def test_the_reference_is_refreshed_before_the_checkpoint_of_its_step(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed from that checkpoint would otherwise continue with the reference before."""
    recipe.algorithm.kl_coef, recipe.algorithm.refresh_reference_every, recipe.train.steps = 0.5, 2, 5
    calls = list[tuple[Any, ...]]()
    with RunLog(recipe, tmp_path, 1, 5) as log:
        run = build(recipe, tmp_path, log, [1.0], calls=calls)
        save = run.checkpoints.saver.save

        def record(step: int, state: dict[str, Any]) -> Metrics:
            calls.append(("save", step))
            return save(step, state)

        run.checkpoints.saver.save = record  # type: ignore[method-assign]
        run_steps(run)
    order = [call for call in calls if call[0] in ("save", "actor.refresh_reference")]
    refresh = "actor.refresh_reference"
    assert order == [("save", 1), (refresh, 2), ("save", 2), ("save", 3), (refresh, 4), ("save", 4), ("save", 5)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor/reference_step"] for line in lines] == [0.0] * 5, "as the trainers report it"
    notices = [line for line in capsys.readouterr().out.splitlines() if "the reference policy is now" in line]
    assert len(notices) == 2 and "step 2:" in notices[0] and "step 4:" in notices[1]


def test_a_kl_in_the_reward_is_subtracted_before_advantages(recipe: Recipe, tmp_path: Path) -> None:
    """Rewards 0 and 1 minus 1/2 of KL 2 and 0 give -1 and 1, with mean 0."""
    recipe.algorithm.kl_coef, recipe.algorithm.kl_in_reward = 0.5, True
    recipe.algorithm.normalize_by_std = False
    calls = calls_of_a_step(recipe, tmp_path)
    assert names(calls)[1:] == [
        "actor.compute_old_log_probs", "actor.compute_reference_log_probs", "actor.compute_kl", "actor.set_advantages",
        "actor.update_actor",
    ]  # fmt: skip
    (advantages,) = (
        arguments for name, arguments in [call[:2] for call in calls if len(call) > 1] if name == "actor.set_advantages"
    )
    assert advantages == [-1.0, 1.0]
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["actor/reward_kl_penalty"] == pytest.approx(2 / 6), "two samples of three tokens"
    assert line["critic/rewards/mean"] == 0.5, "the scores before the KL"


class Teacher:
    """Stand-in teacher: replaces the vectors of each sample."""

    def score(self, groups: list[Group]) -> None:
        for sample in (sample for group in groups for sample in group.samples):
            sample.data = InlineData([SampleTokens(None, None, None, text="read")] * 2)  # type: ignore[arg-type]


def test_trainers_receive_the_teachers_scores(recipe: Recipe, tmp_path: Path) -> None:
    with RunLog(recipe, tmp_path, 1, 1) as log:
        run = build(recipe, tmp_path, log, [])
        run.teacher = Teacher()  # type: ignore[assignment]
        training_step(run, run.source.take(1), 1)
    assert run.actor.workers.texts == ["read", "read"]  # type: ignore[attr-defined]


def test_the_critic_is_updated_first_unless_the_kl_is_in_the_reward(recipe: Recipe, tmp_path: Path) -> None:
    recipe.algorithm.advantage = "gae"
    critic_calls = ["critic.load_shard", "critic.compute_values", "critic.collect_advantages", "critic.update_critic"]
    passes = ["actor.load_shard", "actor.compute_old_log_probs"]
    end = ["actor.load_advantages", "actor.update_actor"]
    assert names(calls_of_a_step(recipe, tmp_path / "a", critic=True)) == [*critic_calls, *passes, *end]
    recipe.algorithm.kl_coef, recipe.algorithm.kl_in_reward = 0.5, True
    calls = calls_of_a_step(recipe, tmp_path / "b", critic=True)
    passes += ["actor.compute_reference_log_probs", "actor.compute_kl"]
    assert names(calls) == [*passes, critic_calls[0], "actor.collect_kl", *critic_calls[1:], *end]
    (weight,) = (call[2] for call in calls if call[0] == "critic.compute_values")
    assert weight == 0.5


@pytest.mark.parametrize("target", [None, 0.1])
def test_only_an_adaptive_kl_weight_is_resumed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: float | None
) -> None:
    recipe.algorithm.kl_coef, recipe.algorithm.kl_target, recipe.algorithm.kl_in_reward = 0.5, target, True
    recipe.algorithm.kl_horizon, recipe.train.steps = 2, 1
    with RunLog(recipe, tmp_path, 1, 1) as log:
        first = build(recipe, tmp_path, log, [1.0])
        run_steps(first)
    saved = first.checkpoints.saver.state["kl_weight"]  # type: ignore[attr-defined]
    # KL 1/3 a token is far above the target: one step of two samples moves it by a fifth.
    assert saved == (None if target is None else pytest.approx(0.5 * 1.2))
    recipe.algorithm.kl_coef = 0.25
    monkeypatch.setattr(
        "megarl.checkpoint.run_checkpoints.load_state",
        lambda path: {"step": 1, "metrics": {}, "source": {}, "kl_weight": saved},
    )
    monkeypatch.setattr("megarl.checkpoint.run_checkpoints.set_aside_later", lambda folder, step: [])
    with RunLog(recipe, tmp_path / "resumed", 2, 2) as log:
        second = build(recipe, tmp_path, log, [1.0])
        second.source.restore = lambda state: None  # type: ignore[method-assign]
        second.checkpoints.resume(tmp_path)
    assert second.kl_weight.value == (0.25 if target is None else pytest.approx(0.6))


@pytest.mark.parametrize("in_reward", [False, True])
def test_the_kl_weight_adapts_to_the_computed_and_not_the_logged_kl(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_reward: bool
) -> None:
    recipe.algorithm.kl_coef, recipe.algorithm.kl_target, recipe.algorithm.kl_in_reward = 0.5, 0.1, in_reward
    recipe.algorithm.kl_horizon, recipe.train.steps, recipe.train.save_every = 2, 1, 0
    with RunLog(recipe, tmp_path, 1, 1) as log:
        monkeypatch.setattr(log, "pending", dict)  # a log that keeps nothing
        run = build(recipe, tmp_path, log, [1.0])
        run_steps(run)
    assert run.kl_weight.value == pytest.approx(0.5 * 1.2)


def test_sft_has_no_phases_or_metrics_of_rollout(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.steps, recipe.train.save_every, recipe.train.source = 2, 0, "sft"
    recipe.train.save_at_end = False
    recipe.algorithm.advantage, recipe.algorithm.loss = "none", "sft"
    fit(recipe, tmp_path, [])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        phases = {name for name in line if name.startswith("timing_s/")}
        assert phases == {"timing_s/data", "timing_s/update_actor", "timing_s/step"}
        assert not [name for name in line if name.startswith("rollout/")]
