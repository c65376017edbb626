"""SIGTERM during training: the run saves the last trained step and ends; a second SIGTERM, or the end of the grace time, ends it at once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megarl.checkpoint.graceful_stop import GracefulStop, StopRequested
from megarl.cluster.outage_watch import ServiceOutage
from megarl.exit_status import Terminated
from megarl.observe.log import RunLog
from megarl.recipe.schema import Recipe
from megarl.train import run_steps
from tests.test_train import build


@pytest.fixture(autouse=True)
def terminates() -> Iterator[None]:
    """The command line's handler of SIGTERM."""

    def terminate(number: int, frame: Any) -> NoReturn:
        raise Terminated

    former = signal.signal(signal.SIGTERM, terminate)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def recipe() -> Recipe:
    recipe = Recipe()
    recipe.train.steps, recipe.train.save_every = 8, 0
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt = 1, 2
    recipe.observe.console, recipe.observe.samples_per_step = "plain", 0
    recipe.observe.tensorboard = recipe.observe.report = False
    return recipe


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Stopped:
    """A run of stand-ins that receives SIGTERM in step 3, in the call `during` of trainers or source."""

    def __init__(self, recipe: Recipe, folder: Path, during: str, *, saves: bool = True) -> None:
        with pytest.raises(Terminated) as raised, RunLog(recipe, folder, 1, 8) as log:
            run = build(recipe, folder, log, [])
            run.checkpoints.stop.grace_seconds = recipe.train.grace_seconds
            source: Any = run.source
            take, call = source.take, run.actor.workers.call

            def take_batch(count: int) -> Any:
                if during == "take" and source.taken == 2:
                    sigterm()
                    run.checkpoints.stop.after(lambda: None)()  # as the source does while it waits
                return take(count)

            def call_trainers(method: str, *args: Any) -> Any:
                if method == during and source.taken == 3:
                    sigterm()
                if not saves:
                    run.checkpoints.saver.save = fails  # type: ignore[method-assign]
                return call(method, *args)

            source.take, run.actor.workers.call = take_batch, call_trainers  # type: ignore[method-assign]
            run_steps(run)
        self.error, self.state = raised.value, getattr(run.checkpoints.saver, "state", None)
        self.checkpoints = [path.name for path in folder.glob("checkpoints/*")]
        self.steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.notices = (folder / "notices.jsonl").read_text()
        self.status = json.loads((folder / "summary.json").read_text())["status"]


def fails(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_a_stop_during_an_update_saves_that_step(recipe: Recipe, tmp_path: Path) -> None:
    """The checkpoint has the metrics of its step, which has no line yet: the resumed run writes it."""
    stopped = Stopped(recipe, tmp_path, "update_actor")
    assert isinstance(stopped.error, StopRequested) and stopped.status == "stopped"
    assert stopped.checkpoints == ["step_000003"] and stopped.steps == [1, 2]
    assert stopped.state["step"] == 3 and "actor/grad_norm" in stopped.state["metrics"]
    assert "the checkpoint of step 3 was saved before the end" in stopped.notices


def test_a_stop_while_sampling_saves_the_step_before(recipe: Recipe, tmp_path: Path) -> None:
    stopped = Stopped(recipe, tmp_path, "take")
    assert isinstance(stopped.error, StopRequested)
    assert stopped.checkpoints == ["step_000002"] and stopped.steps == [1, 2]
    assert stopped.state["metrics"] == {} and stopped.state["source"] == {"interrupted": True}


def test_a_stop_in_the_last_step_saves_it_without_save_at_end(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.steps, recipe.train.save_at_end = 3, False
    stopped = Stopped(recipe, tmp_path, "update_actor")
    assert isinstance(stopped.error, StopRequested) and stopped.checkpoints == ["step_000003"]


def test_a_stop_in_the_last_step_leaves_a_run_that_saves_at_its_end(recipe: Recipe, tmp_path: Path) -> None:
    """Neither the request nor the end of the grace time may end the evaluation and the export, after everything is saved."""
    with RunLog(recipe, tmp_path, 1, 8) as log:
        checkpoints = build(recipe, tmp_path, log, []).checkpoints
        checkpoints.stop.grace_seconds = 3.0
        with checkpoints.stop.listening():
            sigterm()
            checkpoints.save_if_due(recipe.train.steps)
            checkpoints.stop.check()
            time.sleep(3.3)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step_000008"]
    assert "SIGTERM came in the last step: the run saves it" in (tmp_path / "notices.jsonl").read_text()


def test_a_step_that_is_saved_already_is_not_saved_again(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.save_every = 1
    stopped = Stopped(recipe, tmp_path, "take")
    assert "step_000002" in stopped.checkpoints and "after step 2, which is saved already" in stopped.notices


def test_a_save_that_fails_leaves_the_exit_status_of_sigterm(recipe: Recipe, tmp_path: Path) -> None:
    stopped = Stopped(recipe, tmp_path, "update_actor", saves=False)
    assert isinstance(stopped.error, StopRequested) and stopped.status == "stopped"
    assert "step 3 could not be saved before the end: [Errno 28] No space left" in stopped.notices


def test_without_grace_time_sigterm_ends_the_run_at_once(recipe: Recipe, tmp_path: Path) -> None:
    recipe.train.grace_seconds = 0.0
    stopped = Stopped(recipe, tmp_path, "update_actor")
    assert not isinstance(stopped.error, StopRequested) and stopped.checkpoints == []


def test_a_second_sigterm_ends_the_run_at_once() -> None:
    with pytest.raises(Terminated) as raised, GracefulStop(60.0).listening():
        sigterm()
        sigterm()
        time.sleep(5)
    assert not isinstance(raised.value, StopRequested)


def test_the_end_of_the_grace_time_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(Terminated), GracefulStop(0.2).listening():
        sigterm()
        time.sleep(5)
    assert time.monotonic() - began < 2
    assert "after 0.2 s at the latest (train.grace_seconds)" in (text := capfd.readouterr().err)
    assert "A checkpoint that is being written by then is completed first." in text


def test_after_the_run_sigterm_has_its_former_handler_and_no_timer() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with GracefulStop(0.1).listening():
        sigterm()
    time.sleep(0.3)
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_handler_that_is_set_in_the_block_stays() -> None:
    """torchrun's cluster ignores SIGTERM after a failure; a handler that raises would cut its report."""
    with GracefulStop(60.0).listening():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_dead_process_is_reported_rather_than_the_stop() -> None:
    """torchrun sends SIGTERM when it notices a death, and the controller may notice it a moment later."""
    checks = iter([None, RuntimeError("rank 1 died")])

    def check() -> None:
        error = next(checks)
        if error is not None:
            raise error

    stop = GracefulStop(60.0)
    with stop.listening():
        sigterm()
        with pytest.raises(RuntimeError, match="rank 1 died"):
            stop.after(check)()


@pytest.mark.parametrize("replay", [None, "runs/recorded"])
def test_an_outage_of_a_service_saves_the_last_step_and_is_the_error_of_the_run(
    recipe: Recipe, tmp_path: Path, replay: str | None
) -> None:
    """A replay saves only what the recorded run did."""
    recipe.train.replay = replay
    with pytest.raises(ServiceOutage, match="the judge is down"), RunLog(recipe, tmp_path, 1, 8) as log:
        run = build(recipe, tmp_path, log, [])
        source: Any = run.source
        take = source.take

        def take_batch(count: int) -> Any:
            if source.taken == 2:
                raise ServiceOutage("the judge is down")
            return take(count)

        source.take = take_batch
        run_steps(run)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ([] if replay else ["step_000002"])
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    saved = "the checkpoint of step 2 was saved before the end" in (tmp_path / "notices.jsonl").read_text()
    assert saved == (replay is None)
