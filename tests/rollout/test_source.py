"""The source around its engines: its calls of the engines; no failure of an engine leaves the controller waiting."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest

from megarl.cluster.failures import CallFailed
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.source_engines import EnginesSource
from megarl.types import GenerationRequest, Group, InlineData, Partial, Prompt, Sample, SampleFailure
from tests.support.collecting import CollectedService


class FakeService(CollectedService):
    """Answer each request with a group; `spread` sets whether its rewards differ."""

    def __init__(self, spread: Any = lambda number: True):
        super().__init__()
        self.spread = spread
        self.waves: list[list[int]] = []
        self.requests: dict[int, GenerationRequest] = {}
        self.fail: BaseException | None = None
        self.silent = False
        self.unscored: Any = lambda number: False
        self.partials: dict[int, tuple[Partial, ...]] = {}  # for `copy_partials`

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        if method == "copy_partials":
            copied: Future[Any] = Future()
            copied.set_result(self.partials)
            return copied
        assert method == "submit"
        (requests,) = arguments
        self.with_greedy = [request.with_greedy for request in requests]
        self.waves.append([request.group for request in requests])
        self.requests |= {request.group: request for request in requests}
        for request in requests:
            self.promise(request.group, self.answer_to(request.group))
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def answer_to(self, number: int) -> Future[Any]:
        done: Future[Any] = Future()
        if not self.silent:
            threading.Timer(0.01, self._answer, (done, number)).start()
        return done

    def requests_of(self, *numbers: int) -> list[GenerationRequest]:
        return [self.requests[number] for number in numbers]

    def _answer(self, done: Future[Any], number: int) -> None:
        if self.fail is not None:
            done.set_exception(self.fail)
            return
        rewards = (0.0, 1.0) if self.spread(number) else (1.0, 1.0)
        samples = [Sample(number, i, InlineData([]), 3, 10 + i, 10 + i, reward=rewards[i]) for i in range(2)]
        failures: tuple[SampleFailure, ...] = ()
        if self.unscored(number):
            samples[1].reward = math.nan
            failures = (SampleFailure("scorer 'mine'", f"row/{number}", "timeout", "it ran for longer than 5 s", 2),)
        group = Group(number, f"row/{number}", "test", samples, None, failures, scoring_retries=len(failures))
        done.set_result((group, InlineData([])))


class Prompts(list[Prompt]):
    """The part of a data set that the source reads."""

    sets: ClassVar = {"train": 7}
    difficulty = None


def source(
    service: FakeService,
    check: Any = lambda: None,
    advantage: str = "grpo",
    outages: Any = None,
    **dynamic: Any,
) -> EnginesSource:
    recipe = Recipe()
    recipe.algorithm.advantage = advantage
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.train.steps = 4, 2, 10
    recipe.rollout.max_response_length, recipe.rollout.timeout = 20, 1.5
    for name, value in dynamic.items():
        setattr(recipe.algorithm.dynamic_sampling, name, value)
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    return EnginesSource(recipe, prompts, [EngineHandle(service)], [0], check, outages=outages)  # type: ignore[arg-type]


def test_a_wave_is_one_message_and_a_batch_is_in_admission_order() -> None:
    service = FakeService()
    engines_source = source(service)
    engines_source.admit(0)
    batch = engines_source.take(4)
    assert service.waves == [[0, 1, 2, 3]]
    assert [group.number for group in batch.groups] == [0, 1, 2, 3]
    assert batch.metrics["rollout/groups_filtered"] == 0


@pytest.mark.parametrize(("advantage", "expected"), [("grpo", False), ("remax", True)])
def test_a_greedy_sample_is_requested_if_the_advantage_needs_it(advantage: str, expected: bool) -> None:
    service = FakeService()
    engines_source = source(service, advantage=advantage)
    engines_source.admit(0)
    engines_source.take(4)
    assert service.with_greedy == [expected] * 4


def test_filtered_groups_are_replaced_and_counted() -> None:
    service = FakeService(spread=lambda number: number % 2 == 1)
    engines_source = source(service, enabled=True)
    engines_source.admit(0)
    batch = engines_source.take(4)
    assert [group.number for group in batch.groups] == [1, 3, 5, 7]
    assert batch.metrics["rollout/prompts_tried"] == 8 and batch.metrics["rollout/groups_filtered"] == 4
    assert batch.metrics["rollout/rewards/mean"] == pytest.approx((4 * 0.5 + 4 * 1.0) / 8)  # the filtered ones count


def test_exhausted_attempts_give_a_smaller_batch_or_fail() -> None:
    smaller = source(FakeService(spread=lambda number: number == 2), enabled=True, max_attempts=2)
    smaller.admit(0)
    batch = smaller.take(4)
    assert [group.number for group in batch.groups] == [2] and "1 of 4" in batch.notices[0]
    strict = source(FakeService(spread=lambda number: False), enabled=True, max_attempts=2, when_exhausted="fail")
    strict.admit(0)
    with pytest.raises(RuntimeError, match="max_attempts"):
        strict.take(4)


def test_a_scorer_that_fails_is_raised() -> None:
    service = FakeService()
    service.fail = ZeroDivisionError("scorer")
    engines_source = source(service)
    engines_source.admit(0)
    with pytest.raises(CallFailed, match=r"service engine0 on .* failed: ZeroDivisionError: group \d: scorer"):
        engines_source.take(4)


def test_trainers_wait_for_scorers_until_sampled_groups_are_scored() -> None:
    """Groups that arrive are scored and judged for longer than the trainers wait: engines have almost no part of the wait."""
    service = FakeService()
    answer = service._answer

    def slowly_scored(done: Future[Any], number: int) -> None:
        scored: Future[Any] = Future()
        answer(scored, number)
        group, data = scored.result()
        group.scoring_seconds, group.judge_seconds = 50.0, 50.0
        done.set_result((group, data))

    service._answer = slowly_scored  # type: ignore[method-assign]
    engines_source = source(service)
    engines_source.admit(0)
    metrics = engines_source.take(4).metrics
    assert metrics["rollout/wait_seconds/scorers"] > 5 * metrics["rollout/wait_seconds/engines"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_unscored_groups_are_replaced_counted_and_named(dynamic: bool) -> None:
    """Four of eight groups (rewards 0 and 1) have a sample without a reward, which counts neither as 0 nor as filtered."""
    service = FakeService()
    service.unscored = lambda number: number in (0, 2, 5, 6)
    engines_source = source(service, enabled=dynamic)
    engines_source.admit(0)
    batch = engines_source.take(4)
    assert [group.number for group in batch.groups] == [1, 3, 4, 7]
    expected = {"prompts_tried": 8, "groups_unscored": 4, "groups_filtered": 0, "groups_missing": 0}
    scoring = {
        "scoring_failed": 4,
        "scoring_timeouts": 4,
        "scoring_crashes": 0,
        "scoring_errors": 0,
        "scoring_unavailable": 0,
        "scoring_retries": 4,
    }
    expected |= scoring
    assert {name: batch.metrics[f"rollout/{name}"] for name in expected} == expected
    of_source = {"groups_tried": 8, "groups_accepted": 4, "samples": 16, **scoring}
    assert {name: batch.metrics[f"source/test/{name}"] for name in of_source} == of_source
    assert batch.metrics["rollout/rewards/mean"] == pytest.approx(4 / 12)  # four groups of 0 and 1, four of 0 alone
    (notice,) = batch.notices
    assert "4 samples of 4 groups" in notice and "'mine' failed on row 'row/0'" in notice and "and 1 more" in notice
    assert "longer than 5 s (2 attempts)" in notice


def test_a_scorer_that_always_fails_ends_the_run() -> None:
    """More than half of the last eight: after the fifth group, in the second wave of four."""
    service = FakeService()
    service.unscored = lambda number: True
    engines_source = source(service)
    engines_source.admit(0)
    with pytest.raises(RuntimeError, match=r"5 of the last 5 groups .*max_failed_share = 0\.5.*'mine' failed on row"):
        engines_source.take(4)
    assert len(service.waves) == 2


def test_a_filter_that_fails_is_raised() -> None:
    engines_source = source(FakeService(), enabled=True, metric="acuracy")
    engines_source.admit(0)
    with pytest.raises(ValueError, match="acuracy"):
        engines_source.take(4)


def test_a_failure_while_starting_replacements_is_raised() -> None:
    service = FakeService(spread=lambda number: False)
    engines_source = source(service, enabled=True)
    engines_source.admit(0)
    engines_source.engines = []  # as if the engine were gone when the next wave is due
    with pytest.raises((ValueError, IndexError)):
        engines_source.take(4)


def test_a_process_death_is_raised_while_waiting() -> None:
    service = FakeService()
    service.silent = True

    def check() -> None:
        raise ChildProcessError("trainer rank 1 was killed")

    engines_source = source(service, check)
    engines_source.admit(0)
    with pytest.raises(ChildProcessError, match="rank 1"):
        engines_source.take(4)


def test_engines_without_progress_are_named() -> None:
    service = FakeService()
    service.silent = True
    engines_source = source(service)
    engines_source.admit(0)
    with pytest.raises(RuntimeError, match=r"rollout\.timeout.*4 are running, the oldest is number 0"):
        engines_source.take(4)


class Outage:
    """The watch over services during an outage."""

    is_down = True

    def take_metrics(self) -> dict[str, float]:
        return {"rollout/outage_seconds": 2.5}


def test_groups_wait_for_a_service_for_longer_than_the_time_without_a_group() -> None:
    """The time without a finished group ends a run after 1.5 s, unless a service is down."""
    service, outage = ManualService(), Outage()
    engines_source = source(service, outages=outage)
    engines_source.admit(0)

    def come_back() -> None:
        outage.is_down = False
        service.finish(0, 1, 2, 3)

    threading.Timer(3.0, come_back).start()
    batch = engines_source.take(4)
    assert [group.number for group in batch.groups] == [0, 1, 2, 3]
    assert batch.metrics["rollout/outage_seconds"] == 2.5 and batch.metrics["rollout/groups_unscored"] == 0
    engines_source.admit(1)
    with pytest.raises(RuntimeError, match=r"rollout\.timeout"):
        engines_source.take(4)


def test_a_restored_source_continues_at_its_position() -> None:
    first = source(FakeService())
    first.admit(0)
    first.take(4)
    first.drain()
    service = FakeService()
    second = source(service)
    second.restore(first.state())
    second.admit(1)
    assert [group.number for group in second.take(4).groups] == [4, 5, 6, 7]
    assert service.waves == [[4, 5, 6, 7]]


class ManualService(FakeService):
    """Answers a request only when `finish` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, Future[Any]] = {}

    def answer_to(self, number: int) -> Future[Any]:
        self.running[number] = Future()
        return self.running[number]

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self._answer(self.running.pop(number), number)


def refreshing(*services: FakeService, **rollout: Any) -> EnginesSource:
    """A source with four prompts a step, staleness 1 and a window of 5 groups: 3, rounded up to a batch."""
    plain = source(services[0]).recipe
    plain.cluster.placement, plain.rollout.max_staleness, plain.rollout.window = "disaggregated", 1, 0.4
    for name, value in rollout.items():
        setattr(plain.rollout, name, value)
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    return EnginesSource(plain, prompts, [EngineHandle(each) for each in services], [0], lambda: None)  # type: ignore[arg-type]


def test_groups_of_a_window_overtake_while_others_run() -> None:
    service = ManualService()
    engines_source = refreshing(service)
    engines_source.admit(0)
    service.finish(1, 2, 5, 4, 3, 0)  # 3 waits for group 0, which four groups have overtaken
    assert [group.number for group in engines_source.take(4).groups] == [1, 2, 5, 4]
    engines_source.drain()  # returns, although 6 and 7 run
    engines_source.admit(1)
    assert sorted(service.running) == [6, 7, 8, 9, 10, 11]


def test_a_resumed_run_samples_the_groups_again_that_ran_at_the_checkpoint() -> None:
    first = ManualService()
    saved_source = refreshing(first)
    saved_source.admit(0)
    first.finish(1, 2, 4, 5, 6)
    saved_source.drain()
    state = saved_source.state()
    assert state["unfinished"] == [0, 3, 7]
    assert [item.group.number for item in state["waiting"]] == [6]
    second = ManualService()
    resumed = refreshing(second)
    resumed.restore(state)
    resumed.admit(0)
    assert second.waves == [[0, 3, 7]] and first.requests_of(0, 3, 7) == second.requests_of(0, 3, 7)
    assert [group.number for group in resumed.take(4).groups] == [1, 2, 4, 5]
    second.finish(0, 3, 7)
    assert [group.number for group in resumed.take(4).groups] == [0, 6, 3, 7]
    resumed.admit(1)
    assert second.waves[1] == [8, 9, 10, 11]
    second.finish(11, 8, 9, 10)
    assert [group.number for group in resumed.take(4).groups] == [11, 8, 9, 10]


def test_a_resumed_run_may_drain_instead() -> None:
    """Nothing runs before the first admission, so weights may change at once; then the unfinished groups run again."""
    saved_source = refreshing(first := ManualService())
    saved_source.admit(0)
    first.finish(0, 1)
    state = saved_source.state()
    resumed = refreshing(second := ManualService(), at_update="drain")
    resumed.restore(state)
    resumed.drain()
    resumed.admit(0)
    assert second.waves == [[2, 3, 4, 5, 6, 7]]
    second.finish(7, 6, 5, 4, 3, 2)
    resumed.drain()
    assert [[group.number for group in resumed.take(4).groups] for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_evaluation_starts_no_group_with_the_other_rules() -> None:
    """A replay repeats the starts of groups at new versions and arrivals, and at no other moments."""
    service = ManualService()
    engines_source = refreshing(service)
    engines_source.admit(0)
    engines_source.load_newest(1)
    service.finish(0)
    assert len(service.waves) == 1


def test_a_stop_with_drain_samples_the_whole_batch_again() -> None:
    """The state equals a regular checkpoint's, so the resumed run has the same numbers as one that was not stopped."""
    first = ManualService()
    stopped = source(first)
    stopped.admit(0)
    first.finish(0, 1, 2, 3)
    stopped.take(4)
    regular = stopped.state()
    stopped.admit(1)
    first.finish(4, 6)
    assert stopped.state(interrupted=True) == regular
    first.finish(5, 7)
    stopped.take(4)
    assert stopped.state(interrupted=True)["counters"] == {"admitted": 8, "closed": 2}, "the batch is trained on"


def test_engines_are_not_idle_while_the_run_starts() -> None:
    """The first step counts from its first group: loading a model takes minutes."""
    service = ManualService()
    engines_source = source(service)
    time.sleep(0.4)
    engines_source.admit(0)
    time.sleep(0.2)
    service.finish(0, 1, 2, 3)
    assert engines_source.take(4).metrics["rollout/engines_idle"] < 0.5
