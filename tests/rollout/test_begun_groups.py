"""Groups that run when a checkpoint is saved, or when their engine leaves: their tokens are continued."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.checkpoint.controller_state import load_state, write_state
from megarl.cluster.failures import CallFailed
from megarl.recipe.schema import Recipe
from megarl.rollout.begun_groups import cannot_continue_groups, copy_in_time
from megarl.rollout.engine_handle import EngineHandle
from megarl.types import Partial, Span
from tests.rollout.test_source import ManualService, refreshing


def partial(length: int, reason: str | None = None) -> Partial:
    """Tokens of version 0, and from the third on of version 1."""
    tokens = np.arange(100, 100 + length, dtype=np.int32)
    log_probs = np.linspace(-0.1, -7.3, length, dtype=np.float32)
    spans = tuple(span for span in (Span(0, 0), Span(2, 1)) if span.start < length)
    return Partial(tokens, log_probs, spans, reason)


def equal(first: tuple[Partial, ...], second: tuple[Partial, ...]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.log_probs, b.log_probs, equal_nan=True)
        and (a.tokens.dtype, a.log_probs.dtype) == (b.tokens.dtype, b.log_probs.dtype) == (np.int32, np.float32)
        and (a.spans, a.finish_reason) == (b.spans, b.finish_reason)
        for a, b in zip(first, second, strict=True)
    )


def saved(service: ManualService, folder: Path) -> dict[str, Any]:
    """The state of a checkpoint that is saved while groups 2, 3, 4 and 7 run, written and read again."""
    source = refreshing(service)
    source.admit(0)
    service.finish(0, 1, 5, 6)
    service.partials = {
        1: (partial(3), partial(4)),  # arrived
        2: (partial(3), partial(5)),
        3: (partial(8, "stop"), partial(1)),
        4: (partial(0), partial(0)),  # in the engine's queue
        7: (partial(2), partial(20, "length")),
    }
    write_state(folder, {"source": source.state()})
    return load_state(folder)["source"]


def test_a_resumed_run_continues_unfinished_groups(tmp_path: Path) -> None:
    """Checkpoints hold the tokens of groups that run, and only of these."""
    first, second = ManualService(), ManualService()
    state = saved(first, tmp_path)
    assert list(state["begun"]) == [2, 3, 7]
    resumed = refreshing(second)
    resumed.restore(state)
    resumed.admit(0)
    for number in (2, 3, 4, 7):
        request = second.requests[number]
        assert equal(request.partials, first.partials[number] if number != 4 else ())
        assert (request.seed, request.sampling) == (first.requests[number].seed, first.requests[number].sampling)
    second.finish(2, 3)
    batch = resumed.take(4)
    assert batch.metrics["rollout/tokens_taken_over"] == 3 + 5 + 8 + 1 + 2 + 20 and batch.notices == []
    resumed.admit(1)
    assert all(second.requests[number].partials == () for number in (8, 9, 10, 11))
    second.finish(4, 7)
    assert "rollout/tokens_taken_over" not in resumed.take(4).metrics


def test_greedy_samples_have_no_log_probs(tmp_path: Path) -> None:
    service = ManualService()
    source = refreshing(service)
    source.admit(0)
    greedy = Partial(np.arange(3, dtype=np.int32), np.full(3, np.nan, np.float32), (Span(0, 0),))
    service.partials = {0: (partial(3), partial(2), greedy)}
    write_state(tmp_path, {"source": source.state()})
    assert equal(load_state(tmp_path)["source"]["begun"][0].partials, service.partials[0])


@pytest.mark.parametrize("change", ["temperature", "seed", "prompts"])
def test_groups_are_sampled_again_if_their_requests_have_changed(tmp_path: Path, change: str) -> None:
    state = saved(ManualService(), tmp_path)
    service = ManualService()
    resumed = refreshing(service, **({"temperature": 0.5} if change == "temperature" else {}))
    if change == "seed":
        resumed.recipe.train.seed = 99
    if change == "prompts":
        resumed.requests.prompts = [*reversed(resumed.requests.prompts)]  # type: ignore[assignment]
    resumed.restore(state)
    resumed.admit(0)
    again = [number for number, request in service.requests.items() if not request.partials]
    assert again == [2, 3, 4, 7] if change != "prompts" else 4 in again
    service.finish(2, 3)
    (notice,) = resumed.take(4).notices
    assert "of which the checkpoint has tokens" in notice and "prompts, seeds or sampling settings differ" in notice


def test_checkpoints_without_begun_groups_are_read(tmp_path: Path) -> None:
    saved(ManualService(), tmp_path)
    plain = json.loads((tmp_path / "controller.json").read_text())
    del plain["source"]["begun"]
    (tmp_path / "controller.json").write_text(json.dumps(plain))
    assert load_state(tmp_path)["source"]["begun"] == {}


class Recipes:
    """Recipes with groups that cannot be continued."""

    @staticmethod
    def of(name: str) -> Recipe:
        recipe = Recipe()
        recipe.cluster.placement, recipe.rollout.max_staleness = "disaggregated", 1
        if name == "tools":
            recipe.agent.tools = ["mine:tool"]
        elif name == "routing":
            recipe.megatron.routing_replay = "rollout"
        else:
            recipe.rollout.at_update = "finish"
        return recipe


@pytest.mark.parametrize(
    ("name", "reason"), [("tools", "state of their tools"), ("routing", "experts of all"), ("finish", "single version")]
)
def test_groups_that_cannot_be_continued(name: str, reason: str) -> None:
    because = cannot_continue_groups(Recipes.of(name))
    assert because is not None and reason in because
    assert cannot_continue_groups(Recipe()) is None


def test_with_finish_no_tokens_are_saved_or_continued(tmp_path: Path) -> None:
    """A sample with tokens of two versions would break the rule."""
    state = saved(ManualService(), tmp_path)
    service = ManualService()
    resumed = refreshing(service, at_update="finish")
    resumed.restore(state)
    resumed.admit(0)
    assert all(request.partials == () for request in service.requests.values())
    service.partials = {2: (partial(3), partial(3))}
    assert resumed.state()["begun"] == {}


class MovingService(ManualService):
    """Hands over the groups that are not in `scoring`. `early`: the groups' `collect` fails before the reply arrives."""

    def __init__(self, early: bool = True) -> None:
        super().__init__()
        self.early = early
        self.scoring: set[int] = set()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method != "hand_over":
            return super().call(method, *arguments)
        done: Future[Any] = Future()
        numbers = [number for number in arguments[0] if number in self.running and number not in self.scoring]
        ended = [self.running.pop(number) for number in numbers]

        def fail_collects() -> None:
            for number, call in zip(numbers, ended, strict=True):
                call.set_exception(RuntimeError(f"group {number} was handed over"))

        if self.early:
            fail_collects()
        done.set_result({number: self.partials.get(number, ()) for number in numbers})
        if not self.early:
            threading.Timer(0.05, fail_collects).start()
        return done


@pytest.mark.parametrize("early", [True, False])
def test_groups_move_to_the_other_engines(early: bool) -> None:
    """Group 4 is being scored and arrives from its first engine, to which no further group goes."""
    leaving, second, third = MovingService(early), MovingService(), MovingService()
    source = refreshing(leaving, second, third)
    source.admit(0)
    assert (sorted(leaving.running), sorted(second.running), sorted(third.running)) == ([0, 3, 6], [1, 4, 7], [2, 5])
    leaving.scoring = {3}
    leaving.partials = {0: (partial(4), partial(6)), 6: (partial(0), partial(0))}
    source.moves.move(0)
    assert (sorted(second.running), sorted(third.running)) == ([1, 4, 6, 7], [0, 2, 5])
    assert equal(third.requests[0].partials, leaving.partials[0])
    leaving.finish(3)
    third.finish(0, 2)
    second.finish(1)
    batch = source.take(4)
    assert len(batch.groups) == 4
    assert batch.metrics["rollout/tokens_taken_over"] == 10
    source.admit(1)
    assert leaving.running == {} and len(leaving.waves) == 1
    if not early:
        threading.Event().wait(0.1)
    second.finish(4, 6, 7)
    third.finish(5)
    assert sorted(group.number for group in source.take(4).groups) == [4, 5, 6, 7], "late errors of group 0 and 6 count"


def test_a_group_that_fails_while_others_move_ends_the_run() -> None:
    """Its engine did not hand it over, so its error is its own."""
    leaving, second = MovingService(), MovingService()
    source = refreshing(leaving, second)
    source.admit(0)
    leaving.scoring = {2}
    failing = leaving.running[2]
    hand_over = leaving.call

    def call(method: str, *arguments: Any) -> Future[Any]:
        if method == "hand_over":
            failing.set_exception(ZeroDivisionError("scorer"))
        return hand_over(method, *arguments)

    leaving.call = call  # type: ignore[method-assign]
    source.moves.move(0)
    with pytest.raises(CallFailed, match="ZeroDivisionError: group 2: scorer"):
        source.take(4)


def test_the_last_engine_keeps_its_groups() -> None:
    source = refreshing(MovingService())
    source.admit(0)
    with pytest.raises(ValueError, match="no engine but number 0 is open"):
        source.moves.move(0)
    finishing = refreshing(MovingService(), MovingService(), at_update="finish")
    with pytest.raises(RuntimeError, match=r"cannot move to other engines: with rollout\.at_update=finish"):
        finishing.moves.move(0)


def test_an_engine_that_dies_while_it_copies_is_raised() -> None:
    """The controller does not wait for the copy of a dead engine."""

    class Silent(ManualService):
        def call(self, method: str, *arguments: Any) -> Future[Any]:
            return Future() if method == "copy_partials" else super().call(method, *arguments)

    source = refreshing(Silent())
    source.admit(0)

    def check() -> None:
        raise ChildProcessError("engine0 was killed")

    source.check_processes = check
    with pytest.raises(ChildProcessError, match="engine0"):
        source.state()


class Unanswering(ManualService):
    """An engine that does not answer `copy_partials`, or fails in it."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method != "copy_partials":
            return super().call(method, *arguments)
        answer: Future[Any] = Future()
        if self.error is not None:
            answer.set_exception(self.error)
        return answer


@pytest.mark.parametrize("error", [None, RuntimeError("engine0 died")])
def test_a_run_that_ends_saves_without_the_tokens_of_an_engine_that_does_not_answer(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the run would lose the whole checkpoint, although its weights do not depend on the engine."""
    engines: Any = [EngineHandle(ManualService()), EngineHandle(Unanswering(error))]  # type: ignore[arg-type]
    assert copy_in_time(engines, 0, seconds=0.5) == {}
    assert (str(error) if error else "did not return them within 0.5 s") in caplog.text


def test_a_stop_of_a_draining_run_says_that_its_numbers_will_differ(caplog: pytest.LogCaptureFixture) -> None:
    """Groups of the next batch run with the weights before the update, and start again with those after it."""
    service = ManualService()
    source = refreshing(service, at_update="drain", window=0.3)
    source.admit(0)
    service.finish(0, 1, 2, 3)
    source.take(4)
    assert source.state(interrupted=True)["unfinished"] == [4, 5, 6, 7]
    assert "4 groups are sampled again after a resume, with newer weights" in caplog.text
