"""After a rollback a run goes on with the weights of a run that has never seen the batches since the checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.assembly import Run
from megarl.checkpoint.graceful_stop import StopRequested
from megarl.checkpoint.rollbacks import Rollbacks
from megarl.errors import RecipeError, SpoiledWeights
from megarl.preflight.recipe.general import spike_errors
from megarl.recipe.schema import Recipe, TrainConfig
from megarl.recipe.trainers import ActorConfig
from megarl.rollout.source import Batch
from megarl.types import Group, InlineData, Metrics, Sample, SampleTokens
from tests.support.slow import slow_except
from tests.test_recovery import Failing, LearningWorkers, SendingPlacement, fit

SPIKE = 500.0  # the stand-in trainers skip norms above 100


class SpikingWorkers(LearningWorkers):
    """Stand-in trainers. Their weights are the list of updates so far; a batch with "spike" in its texts causes a spike."""

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "update_actor":
            before, spike = len(self.weights), "spike" in self.texts[0]
            answer = super().call(method, *args)
            if spike:
                assert self.highest < SPIKE, "the trainers would apply it"
                del self.weights[before:]
                answer[1][0].update({"actor/grad_norm": SPIKE, "actor/skipped_updates": 1.0})
            return answer
        if method == "refresh_reference" and self.weights and str(self.weights[-1]).startswith("reference"):
            self.weights.pop()  # the same weights once more
        return super().call(method, *args)


class SomeBatches:
    """Batches of one group, named by their step. Steps in `spiking` cause a spike; steps in `without` have an empty batch."""

    def __init__(self, spiking: Collection[int], without: Collection[int] = ()) -> None:
        self.spiking, self.without, self.taken = spiking, without, 0
        self.checkpoints: Any = None

    def take(self, count: int) -> Batch:
        assert self.checkpoints.trained_step == self.taken, "at SIGTERM, the step would not be saved"
        self.taken += 1
        if self.taken in self.without:
            return Batch([])
        mask, zeros = np.array([False, True, True]), np.zeros(3, np.float32)
        text = f"{'spike' if self.taken in self.spiking else 'batch'} {self.taken}"
        vectors = [SampleTokens(np.arange(3, dtype=np.int32), mask, zeros, f"{text}.{i}") for i in range(2)]
        samples = [Sample(self.taken, i, InlineData(vectors), 1, 2, 2, reward=i) for i in range(2)]
        return Batch([Group(self.taken, "row", "test", samples)])

    def admit(self, version: int) -> None:
        assert version == self.taken, "versions grow by one"

    def drain(self) -> None: ...

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def go(
    folder: Path,
    spiking: Collection[int],
    *,
    without: Collection[int] = (),
    failing: Failing | None = None,
    kind: type[SendingPlacement] = SendingPlacement,
    **train: int,
) -> tuple[Run, list[Metrics]]:
    """Run to the end with `train.on_spike: rollback`; returns the run and its metrics without times."""

    def change(recipe: Recipe) -> None:
        recipe.train.on_spike, recipe.train.steps, recipe.train.stop_after_skipped = "rollback", 12, 0
        for key, value in train.items():
            setattr(recipe.train, key, value)

    parts = {"change": change, "batches": SomeBatches(spiking, without), "workers": SpikingWorkers}
    return fit(folder, 2, failing or Failing(set(), after=False), kind, **cast(Any, parts))


def dropped_steps(spiking: Collection[int], steps: int, save_every: int, before: int, limit: int) -> dict[int, int]:
    """Return the checkpoint to which each dropped step goes back, worked out from the rule alone. limit: `stop_after_skipped`."""
    saved, counted, dropped = [0], list[int](), dict[int, int]()
    for step in range(1, steps + 1):
        counted = [earlier for earlier in counted if earlier > step - save_every] + [step] * (step in spiking)
        rolls_back = step in spiking and len(counted) >= before
        if rolls_back:
            saved_before = [earlier for earlier in saved if earlier < counted[0]]
            counted = []
            if checkpoint := saved_before[-1]:
                saved = saved_before
                dropped |= dict.fromkeys(range(checkpoint + 1, step + 1), checkpoint)
        if step % save_every == 0 and dropped.get(step) is None and not (limit and step in spiking):
            saved.append(step)
    return dropped


def notices(folder: Path, event: str) -> list[str]:
    lines = [json.loads(line) for line in (folder / "notices.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line.get("event") == event]


@pytest.mark.parametrize("limit", [0, 5])
@pytest.mark.parametrize("seed", slow_except(lambda seed: seed < 10, range(40)))
def test_a_run_equals_one_without_the_dropped_batches(seed: int, limit: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    save_every, before = choose.choice([2, 3, 4]), choose.choice([1, 1, 2, 3])
    before = min(before, save_every)  # others are refused: a step has one update
    first = save_every + 1 if limit else 2  # with a limit, spikes before the first checkpoint may end the run
    spiking = {step for step in range(first, 13) if choose.random() < (0.8 if limit else 0.4)}
    dropped = dropped_steps(spiking, 12, save_every, before, limit)
    settings = {"save_every": save_every, "spikes_before_rollback": before, "rollbacks": 12}
    run, lines = go(tmp_path / "a", spiking, stop_after_skipped=limit, **settings)
    clean, expected = go(tmp_path / "b", spiking - set(dropped), without=dropped, **settings)
    assert weights(run) == weights(clean)
    assert not any(f" {step}." in str(weights(run)) for step in dropped)
    assert run.kl_weight.value == clean.kl_weight.value
    assert run.skipped.norms["actor"].state() == clean.skipped.norms["actor"].state()
    kept = [step for step in range(1, 13) if step not in dropped]
    assert [lines[step - 1] for step in kept] == [expected[step - 1] for step in kept]
    ends = [step for step in dropped if step + 1 not in dropped or dropped[step + 1] != dropped[step]]
    sent, clean_sent = versions(run), versions(clean)
    for step in {*kept, *ends} - {12}:
        assert sent[step] == clean_sent[step], f"weights of version {step}"
    for step, checkpoint in dropped.items():  # the reference policy aside, the weights of the checkpoint
        if step in ends and step != 12:
            assert updates(sent[step]) == updates(sent[checkpoint])


def weights(run: Run) -> list[Any]:
    return list(cast(Any, run.actor.workers).weights)


def versions(run: Run) -> dict[int, list[Any]]:
    return dict(cast(Any, run.devices).versions)


def updates(parts: list[Any]) -> list[Any]:
    return [part for part in parts if not str(part).startswith("reference")]


def test_a_rollback_is_said_counted_and_reported(tmp_path: Path) -> None:
    go(tmp_path, {8, 9}, save_every=3, spikes_before_rollback=2)
    assert notices(tmp_path, "rollback") == [
        "step 9: 2 spikes in steps 8 to 9. The trainers go back to the checkpoint of step 6, and the samples of steps 7 to 9 are "
        "not trained on again"
    ]
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "dropped" in line]
    assert line["step"] == 9 and line["recovery/rollbacks"] == 1 and line["recovery/dropped_steps"] == 3
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [fault["event"] for fault in summary["faults"]] == ["rollback"] and summary["ettr"]["dropped"] > 0


@pytest.mark.parametrize("after", [False, True], ids=["before its effect", "after it"])
@pytest.mark.parametrize("number", slow_except(lambda number: number % 10 == 1, range(1, 60, 2)))
def test_trainers_that_fail_leave_a_rollback_equal(number: int, after: bool, tmp_path: Path) -> None:
    settings = {"save_every": 3, "spikes_before_rollback": 2}
    expected, lines = go(tmp_path / "a", {5, 7, 8}, **settings)
    run, repeated = go(tmp_path / "b", {5, 7, 8}, failing=Failing({number, number + 1}, after=after), **settings)
    assert run.trainer_restarts is not None and run.trainer_restarts.restarts == 2
    assert weights(run) == weights(expected) and repeated == lines
    assert versions(run) == versions(expected)
    assert len(notices(tmp_path / "b", "rollback")) == 1


def test_without_a_checkpoint_spikes_are_skipped_and_the_run_goes_on(tmp_path: Path) -> None:
    run, _ = go(tmp_path, {2, 3}, save_every=6, spikes_before_rollback=2)
    assert notices(tmp_path, "rollback") == []
    assert any(
        text == "step 3: 2 spikes in steps 2 to 3, and no checkpoint before them: their updates were skipped"
        for text in notices(tmp_path, "update")
    )
    assert len(updates(weights(run))) == 10


def test_a_checkpoint_of_undone_steps_displaces_no_other(tmp_path: Path) -> None:
    go(tmp_path, {6}, save_every=3, spikes_before_rollback=1, save_at_end=0)
    texts = (tmp_path / "notices.jsonl").read_text()
    assert "step 6: no checkpoint, since the trainers went back to an earlier one" in texts
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000003",
        "step_000009",
        "step_000012",
    ]


def test_sigterm_after_a_rollback_names_the_checkpoint_of_a_resume(tmp_path: Path) -> None:
    class Stopping(SendingPlacement):
        def update_engines(self, version: int) -> Metrics:
            if version == 8:
                raise StopRequested
            return super().update_engines(version)

    with pytest.raises(StopRequested):
        go(tmp_path, {8}, save_every=3, spikes_before_rollback=1, kind=Stopping)
    texts = (tmp_path / "notices.jsonl").read_text()
    assert (
        "stopped by SIGTERM after step 8: the trainers went back to the checkpoint of step 6, from which a resume continues; it "
        "repeats the steps left out"
    ) in texts
    assert "no weight has changed" not in texts and not (tmp_path / "checkpoints" / "step_000008").exists()


def test_too_many_rollbacks_to_a_checkpoint_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(SpoiledWeights) as raised:
        go(tmp_path, {8, 9, 11}, save_every=3, spikes_before_rollback=1, rollbacks=2)
    text = str(raised.value)
    assert text.startswith(
        "step 11: 1 spike in step 11, after the trainers have gone back to the checkpoint of step 6 2 times (train.rollbacks)"
    )
    assert f"train.resume={tmp_path}/checkpoints/step_000003" in text and "steps 7 to 11" in text
    assert len(notices(tmp_path, "rollback")) == 2


def test_steps_before_a_rollback_do_not_count_for_stop_after_skipped(tmp_path: Path) -> None:
    """Each step from 7 on has a spike. The rollback at step 9 begins a new streak, and so does the one at step 12."""
    spiking = set(range(7, 13))
    go(tmp_path / "rollback", spiking, save_every=6, spikes_before_rollback=3, stop_after_skipped=5)
    assert len(notices(tmp_path / "rollback", "rollback")) == 2
    with pytest.raises(SpoiledWeights, match="nothing was learned in 5 consecutive steps, 7 to 11"):
        go(tmp_path / "none", spiking, save_every=6, spikes_before_rollback=6, stop_after_skipped=5)


def test_a_later_checkpoint_allows_further_rollbacks(tmp_path: Path) -> None:
    go(tmp_path, {5, 8, 11}, save_every=3, spikes_before_rollback=1, rollbacks=1)
    assert len(notices(tmp_path, "rollback")) == 3


def test_a_checkpoint_among_the_spikes_is_set_aside(tmp_path: Path) -> None:
    """It neither hides the spike before it, nor is a target: its weights may be the cause of the spike after it."""
    go(tmp_path, {5, 7}, save_every=3, spikes_before_rollback=2)
    (text,) = notices(tmp_path, "rollback")
    assert (
        "2 spikes in steps 5 to 7. The trainers go back to the checkpoint of step 3" in text and "steps 4 to 7" in text
    )
    assert f"is kept as {tmp_path}/checkpoints/discarded/step_000006" in (tmp_path / "notices.jsonl").read_text()
    assert not (tmp_path / "checkpoints" / "step_000006").exists()


def test_spikes_of_the_last_steps_count_since_the_newest_rollback() -> None:
    rollbacks = Rollbacks(2, 1, window=3)
    rollbacks.note(3, 1)
    rollbacks.note(6, 1)
    assert not rollbacks.is_due and rollbacks.first_step == 6, "step 3 is too old"
    rollbacks.note(8, 1)
    assert rollbacks.is_due and rollbacks.first_step == 6
    rollbacks.record(2)
    assert not rollbacks.is_due and not rollbacks.is_allowed(2) and rollbacks.is_allowed(3)
    rollbacks.note(9, 2)
    assert rollbacks.is_due, "two updates of one step"


def test_settings_that_have_no_effect_or_no_checkpoint_are_refused() -> None:
    def keys(updates: int = 1, **train: Any) -> list[str]:
        errors = list(spike_errors(Recipe(train=TrainConfig(**train), actor=ActorConfig(mini_batches=updates))))
        assert all(isinstance(error, RecipeError) for error in errors)
        return [cast(RecipeError, error).key for error in errors]

    assert keys(on_spike="rollback", save_every=20, rollbacks=1, spikes_before_rollback=1, spike_factor=5.0) == []
    assert keys(on_spike="rollback") == ["train.on_spike"]
    assert keys(on_spike="skip", rollbacks=1) == ["train.rollbacks"]
    assert keys(spikes_before_rollback=1) == ["train.spikes_before_rollback"]
    limited = {"on_spike": "rollback", "save_every": 20, "spikes_before_rollback": 5}
    assert keys(**limited) == ["train.stop_after_skipped"]
    assert keys(**limited, stop_after_skipped=0) == keys(**limited, stop_after_skipped=6) == []
    frequent = {"on_spike": "rollback", "save_every": 2}
    assert keys(**frequent) == ["train.spikes_before_rollback"] and keys(updates=2, **frequent) == []
    assert keys(on_spike="rollback", save_every=20, keep_checkpoints=1) == ["train.keep_checkpoints"]
    (error,) = spike_errors(Recipe(train=TrainConfig(on_spike="rollback")))
    assert "set train.save_every" in str(error)
    assert Rollbacks.of(TrainConfig(on_spike="skip")) is None
