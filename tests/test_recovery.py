"""Trainers that fail at any call start again, and the run ends with the weights and metrics of a run without the failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megarl.algorithms.kl import KLWeight
from megarl.assembly import Run
from megarl.checkpoint.folder import checkpoint_name
from megarl.checkpoint.graceful_stop import GracefulStop
from megarl.checkpoint.kept_batches import KeptBatches
from megarl.checkpoint.next_commands import Repetition
from megarl.checkpoint.run_checkpoints import Checkpoints
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.cluster.failures import Failure, ProcessInfo, Raised, SamplesLost, WorkerFailed
from megarl.errors import ProcessFailure
from megarl.observe.log import RunLog
from megarl.observe.profiling import Profiling
from megarl.recipe.schema import Recipe
from megarl.recovery import recovered_text
from megarl.rollout.source import Batch
from megarl.train import run_steps
from megarl.trainer.group import ActorGroup
from megarl.trainer.repeatable_steps import RepeatableSteps, is_rounding, norms_text
from megarl.trainer.restarts import TrainerRestarts
from megarl.types import Group, InlineData, Metrics, Sample, SampleTokens
from megarl.weight_sync.placement import Placement
from tests.support.training_stand_ins import Saver, Workers

STEPS = 6


class Failing:
    """Fails the calls with these numbers, counted over all processes. `after`: when the call has had its effect."""

    def __init__(self, numbers: set[int], *, after: bool) -> None:
        self.numbers, self.after, self.calls = numbers, after, 0
        self.failure: WorkerFailed | None = None  # of the present processes
        self.start_error: ProcessFailure | None = None  # of the start of others

    def raise_if_due(self) -> None:
        if self.calls in self.numbers:
            place = ProcessInfo("trainer rank 0", "host", 7)
            self.failure = WorkerFailed(Failure.death(place, f"killed at call {self.calls}"))
            raise self.failure

    def check(self) -> None:
        """Raise the failure until new processes start, as the cluster does."""
        if self.failure is not None:
            raise self.failure


class LearningWorkers(Workers):
    """Stand-in trainers with the list of all updates so far as their weights. The last two steps are skipped."""

    failure = None

    def __init__(self, failing: Failing) -> None:
        super().__init__("actor", [])
        self.failing, self.weights = failing, list[Any]()

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "describe":
            return super().call(method)
        self.failing.calls += 1
        if not self.failing.after:
            self.failing.raise_if_due()
        if method == "update_actor":
            skipped = any(text.startswith(("answer 5", "answer 6")) for text in self.texts)
            self.norms = iter([math.inf if skipped else 1.0 + len(self.weights)])
            self.weights += [] if skipped else [(self.texts, args[0])]
        if method == "refresh_reference" and self.weights[-1] != f"reference {args[0]}":  # the same weights once more
            self.weights.append(f"reference {args[0]}")
        answer = super().call(method, *args)
        self.failing.raise_if_due()
        return answer


class Batches:
    """Batches of one group; the third and the fourth have none."""

    def __init__(self) -> None:
        self.taken, self.checkpoints = 0, cast(Any, None)

    def take(self, count: int) -> Batch:
        assert self.checkpoints.trained_step == self.taken, "at SIGTERM, the step would not be saved"
        self.taken += 1
        if self.taken in (3, 4):
            return Batch([])
        mask, zeros = np.array([False, True, True]), np.zeros(3, np.float32)
        vectors = [
            SampleTokens(np.arange(3, dtype=np.int32), mask, zeros, f"answer {self.taken}.{i}") for i in range(2)
        ]
        samples = [Sample(self.taken, i, InlineData(vectors), 1, 2, 2, reward=i) for i in range(2)]
        return Batch([Group(self.taken, "row", "test", samples)])

    def admit(self, version: int) -> None: ...

    def drain(self) -> None: ...

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class SendingPlacement(Placement):
    """Records the weights that each version has. Sending is a call to the trainers."""

    def __init__(self, actor: ActorGroup) -> None:
        self.actor, self.versions = actor, dict[Any, Any]()

    def update_engines(self, version: int) -> Metrics:
        self.actor._call(ActorGroup.send_weights, version)  # type: ignore[arg-type]
        weights = list(cast(Any, self.actor.workers).weights)
        assert self.versions.get(version, weights) == weights, "one version has two sets of weights"
        self.versions[version] = weights
        return {}


class SavingWeights(Saver):
    """Keeps the weights of each checkpoint."""

    def __init__(self, folder: Path, actor: ActorGroup) -> None:
        super().__init__(folder)
        self.actor, self.saved = actor, dict[str, Any]()

    def save(self, step: int, state: dict[str, Any]) -> dict[str, float]:
        self.actor._call(ActorGroup.stage_save, "folder", False)  # type: ignore[arg-type]
        self.saved[checkpoint_name(step)] = list(cast(Any, self.actor.workers).weights), state["kl_weight"]
        path = self.folder / checkpoint_name(step)
        path.mkdir(parents=True)
        (path / "controller.json").write_text(
            json.dumps({"step": step, **{name: state[name] for name in ("kl_weight", "grad_norms")}, "source": EMPTY})
        )
        np.savez(path / "waiting.npz")
        return {}

    def give_up(self) -> None: ...


EMPTY: dict[str, Any] = {"gathered": [], "waiting": [], "begun": []}


def fit(
    folder: Path,
    most: int,
    failing: Failing,
    kind: type[SendingPlacement] = SendingPlacement,
    *,
    change: Callable[[Recipe], None] = lambda recipe: None,
    batches: Any = None,
    workers: type[LearningWorkers] = LearningWorkers,
) -> tuple[Run, list[Metrics]]:
    """Run to the end; returns the run and its metrics without times. change: of the recipe."""
    recipe = Recipe()
    recipe.train.steps, recipe.train.save_every, recipe.train.trainer_restarts = STEPS, 3, most
    recipe.train.stop_after_skipped, recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt = 5, 1, 2
    recipe.algorithm.kl_coef, recipe.algorithm.kl_target, recipe.algorithm.refresh_reference_every = 0.1, 0.2, 2
    recipe.observe.console, recipe.observe.samples_per_step = "plain", 2
    recipe.observe.tensorboard = recipe.observe.report = False
    change(recipe)
    with RunLog(recipe, folder, 1, recipe.train.steps) as log:
        actor = ActorGroup(cast(Any, workers(failing)), recipe)
        actor.describe()
        source, saver = cast(Any, batches or Batches()), cast(Any, SavingWeights(folder / "checkpoints", actor))
        skipped = SkippedSteps(recipe.train, Repetition(log.run_dir, False, None))
        kl_weight = KLWeight(0.1, 0.2, 10)
        placement = kind(actor)

        def load(path: Path) -> list[None]:
            actor.workers.call("load", str(path))
            cast(Any, actor.workers).weights = list(saver.saved[path.name][0])
            return [None]

        def start() -> None:
            if failing.start_error is not None:
                raise failing.start_error
            failing.failure = None
            actor.workers = cast(Any, workers(failing))

        restarts = TrainerRestarts(most, start, failing.check)
        checkpoints = Checkpoints(
            recipe.train, saver, source, kl_weight, skipped, {}, load, log, GracefulStop(60.0)
        )  # fmt: skip
        source.checkpoints = checkpoints
        profiling = Profiling(recipe.observe, actor, [], log, folder / "profile", 1.0, lambda: None)
        tokenizer: Any = SimpleNamespace(decode=lambda ids, special=False: str(ids))
        run = Run(
            recipe, actor, None, None, source, placement, None, checkpoints, skipped, kl_weight, tokenizer, profiling,
            log, 1, None, RepeatableSteps(KeptBatches(folder / "batches")), restarts,
        )  # fmt: skip
        run_steps(run)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    apart = ("timing_s", "perf", "recovery", "run", "host")
    return run, [{name: value for name, value in line.items() if not name.startswith(apart)} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Metrics], int]:
    failing = Failing(set(), after=False)
    return *fit(tmp_path_factory.mktemp("undisturbed"), 1, failing), failing.calls


CALLS = 32  # of the undisturbed run, see the first test


def test_the_number_of_calls(undisturbed: tuple[Run, list[Metrics], int]) -> None:
    assert undisturbed[2] == CALLS, "set CALLS, so that each of them fails once below"


@pytest.mark.parametrize("after", [False, True], ids=["before its effect", "after it"])
@pytest.mark.parametrize("number", range(1, CALLS + 1))
def test_a_failure_at_any_call_changes_no_number(
    number: int, after: bool, undisturbed: tuple[Run, list[Metrics], int], tmp_path: Path
) -> None:
    expected, metrics, _ = undisturbed
    run, repeated = fit(tmp_path, 1, Failing({number}, after=after))
    assert cast(Any, run.devices).versions == cast(Any, expected.devices).versions
    assert cast(Any, run.actor.workers).weights == cast(Any, expected.actor.workers).weights
    assert repeated == metrics
    assert run.kl_weight.value == expected.kl_weight.value
    assert run.skipped.streaks() == expected.skipped.streaks()
    norms = run.skipped.norms["actor"].state()
    assert norms == expected.skipped.norms["actor"].state() and len(norms) == 2, "later spikes are judged by them"
    notices = (tmp_path / "notices.jsonl").read_text()
    assert f"killed at call {number}" in notices and "gradient norms differ" not in notices
    summary = json.loads((tmp_path / "summary.json").read_text())
    (death,) = summary["faults"]
    assert death["event"] == "death" and f"killed at call {number}" in death["cause"]
    assert summary["ettr"]["recovery"] > 0
    samples = [path.read_text() for path in sorted((tmp_path / "samples").iterdir())]
    assert len(samples) == STEPS - 2 and all(text.count("answer") == 2 for text in samples), "written once"


class OnceReadable:
    """Vectors that are lost with their machine after they were read once: for the kept batch, or by the trainers."""

    is_lost = False

    def __init__(self, vectors: list[SampleTokens]) -> None:
        self.vectors: list[SampleTokens] | None = vectors

    def get(self) -> list[SampleTokens]:
        vectors, self.vectors = self.vectors, None
        if vectors is None:
            raise SamplesLost("samples of service engine0 on node7 are lost")
        return vectors


class LostBatches(Batches):
    """The samples of the second batch are lost before the trainers fetch them."""

    def take(self, count: int) -> Batch:
        batch = super().take(count)
        if self.taken == 2:
            data = OnceReadable(batch.groups[0].samples[0].data.get())
            for sample in batch.groups[0].samples:
                sample.data = data
        return batch


class FetchingWorkers(LearningWorkers):
    """Trainers fetch samples in their processes."""

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        try:
            return super().scatter(method, per_rank)
        except SamplesLost as error:
            raise WorkerFailed(Failure.raised(ProcessInfo("trainer rank 0"), Raised.of(error))) from error


def test_a_step_whose_samples_are_lost_is_repeated_with_the_kept_batch(
    undisturbed: tuple[Run, list[Metrics], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = KeptBatches.keep

    def keep_first(batches: KeptBatches, step: int, groups: Sequence[Group]) -> None:
        keep(batches, step, groups)
        batches.wait()

    monkeypatch.setattr(KeptBatches, "keep", keep_first)
    failing = Failing(set(), after=False)
    run, metrics = fit(tmp_path, 1, failing, batches=LostBatches(), workers=FetchingWorkers)
    assert metrics == undisturbed[1] and run.trainer_restarts is not None and run.trainer_restarts.restarts == 1
    assert "SamplesLost: samples of service engine0" in (tmp_path / "notices.jsonl").read_text()


def test_failures_while_trainers_recover(undisturbed: tuple[Run, list[Metrics], int], tmp_path: Path) -> None:
    """Each restart fails at another of its calls, until the limit."""
    run, repeated = fit(tmp_path, 5, Failing({14, 15, 17, 20}, after=True))
    assert repeated == undisturbed[1] and run.trainer_restarts is not None and run.trainer_restarts.restarts == 4


def test_an_error_that_occurs_each_time_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="killed at call 14"):
        fit(tmp_path, 0, Failing({14}, after=False))
    failing = Failing(set(range(14, 200)), after=False)
    with pytest.raises(WorkerFailed, match="killed at call 16") as ended:
        fit(tmp_path / "again", 2, failing)
    assert "this is failure 3 without a new step, and train.trainer_restarts is 2" in ended.value.__notes__[0]
    lines = [json.loads(line) for line in (tmp_path / "again" / "notices.jsonl").read_text().splitlines()]
    counts = [line["text"].splitlines()[-1] for line in lines if line.get("event") == "death"]
    assert counts == [
        f"The trainers start again (failure {number} of at most 2 without a new step; train.trainer_restarts)"
        for number in (1, 2)
    ]


def test_other_numbers_of_a_repeated_step_are_said() -> None:
    steps = RepeatableSteps(cast(Any, None))
    steps.record(3, {"actor/grad_norm": 2.0})
    steps.record(4, {"actor/grad_norm": math.nan})
    assert steps.differences(3, {"actor/grad_norm": 2.0}) == [0.0]
    assert steps.differences(3, {"actor/grad_norm": 2.5}) == [0.2]
    assert steps.differences(3, {"actor/grad_norm": math.nan}) == [math.inf], "the hardware may be faulty"
    assert steps.differences(4, {"actor/grad_norm": math.nan}) == [0.0]
    assert steps.differences(5, {"actor/grad_norm": 1.0}) == [], "it is trained for the first time"
    assert recovered_text(0, 2, 7.4) == (
        "the trainers have the weights after step 2 again, in 7 s, from the starting model; steps 1 to 2 were trained again on "
        "their batches"
    )
    assert recovered_text(6, 6, 7.4).endswith("from the checkpoint of step 6")


def test_norms_that_differ_are_rounding_or_other_weights() -> None:
    assert norms_text([0.0, 0.0], "float32") == ", with the same gradient norms"
    assert norms_text([0.0, 2.5e-6], "float32") == (
        "; their gradient norms differ by up to 0.00025 %: rounding, as from kernels that do not repeat their sums"
    )
    changed = ["cluster.trainers 2 -> 1"]
    assert norms_text([0.02], "bfloat16", changed).endswith(
        " 2 %: rounding, as from a layout that has changed (cluster.trainers 2 -> 1)"
    )
    assert "stays below 0.1 % in float32, so the trainers have other weights" in norms_text([0.02], "float32", changed)
    assert is_rounding([], "float32") and not is_rounding([0.001, math.inf], "bfloat16")


def test_an_engine_that_fails_because_a_trainer_has_died_ends_no_run(
    undisturbed: tuple[Run, list[Metrics], int], tmp_path: Path
) -> None:
    class FailingEngine(SendingPlacement):
        def update_engines(self, version: int) -> Metrics:
            failing = cast(Any, self.actor.workers).failing
            if version == 2 and not self.versions.get("failed"):
                self.versions["failed"] = True
                failing.failure = WorkerFailed(Failure.death(ProcessInfo("trainer rank 0"), "killed"))
                raise ProcessFailure("engine0 cannot connect to the trainers")
            return super().update_engines(version)

    run, repeated = fit(tmp_path, 1, Failing(set(), after=False), FailingEngine)
    assert repeated == undisturbed[1] and run.trainer_restarts is not None and run.trainer_restarts.restarts == 1


def test_trainers_that_cannot_start_again_end_the_run_at_once(tmp_path: Path) -> None:
    """No machine has devices for them, or their old processes do not end: another attempt would find the same."""
    failing = Failing({14}, after=False)
    failing.start_error = ProcessFailure("killed trainers do not end")
    with pytest.raises(ProcessFailure, match="killed trainers do not end"):
        fit(tmp_path, 5, failing)


def test_a_failure_in_an_update_ends_a_run_whose_engines_cannot_restart(tmp_path: Path) -> None:
    class Interrupted(SendingPlacement):
        outlives_trainers = False  # type: ignore[assignment]

    with pytest.raises(WorkerFailed, match="killed at call 1") as raised:
        fit(tmp_path, 3, Failing({1}, after=False), Interrupted)
    assert "rollout.min_engines" in raised.value.__notes__[0]
