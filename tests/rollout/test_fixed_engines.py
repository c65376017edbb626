"""Engines of a teacher or the judge that die while the run goes on: their calls are made again, none is lost or answered twice."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from megarl.cluster.failures import CallFailed, ServiceDied, TooFewEngines
from megarl.errors import ProcessFailure
from megarl.recipe import Recipe
from megarl.rollout.fleet import fixed
from megarl.rollout.fleet.fixed import death_metrics
from tests.support.fixed_engines import Fixed


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which tests change."""
    time = [1000.0]
    monkeypatch.setattr(fixed.time, "monotonic", lambda: time[0])
    return time


def test_the_calls_of_a_dead_engine_go_to_another() -> None:
    engines = Fixed(2)
    answers = [engines.ask(number) for number in range(4)]
    assert engines.asked(0) == [0, 2] and engines.asked(1) == [1, 3]
    engines.processes[0].die()
    assert engines.asked(1) == [1, 3, 0, 2] and not any(answer.done() for answer in answers)
    for number in (1, 3, 0, 2):
        engines.processes[1].answer(f"answer {number}")
    assert [answer.result(0) for answer in answers] == [f"answer {number}" for number in range(4)]


def test_calls_wait_while_the_only_engine_starts_again() -> None:
    engines = Fixed(1)
    answer = engines.ask(3)
    engines.processes[0].die()
    later = engines.ask(4)
    engines.engines.poll()
    assert engines.restarted == ["judge0"] and engines.asked(0) == [] and not answer.done()
    (text, event) = engines.notices[0]
    assert "service judge0 on host (pid 7) died: killed" in text and event == "death"
    assert "0 engines of the judge left; it starts again (death 1 of at most 2" in text
    engines.load(0)
    assert engines.asked(0) == [3, 4] and engines.notices[1] == ("judge0 has loaded, and answers", None)
    engines.processes[0].answer("a")
    engines.processes[0].answer("b")
    assert (answer.result(0), later.result(0)) == ("a", "b")


def test_an_idle_engine_that_dies_starts_again() -> None:
    engines = Fixed(2)
    engines.processes[1].dead = engines.processes[0].dead
    engines.processes[1].die()
    engines.engines.poll()
    assert engines.restarted == ["judge1"]
    assert engines.ask(1) and engines.ask(2) and engines.asked(0) == [1, 2], "none goes to a process that loads"


def test_without_restarts_a_death_is_an_error_of_the_call() -> None:
    engines = Fixed(2, restarts=0)
    answer = engines.ask(1)
    engines.processes[0].die()
    with pytest.raises(ServiceDied, match="judge0"):
        answer.result(0)
    engines.engines.poll()
    assert engines.restarted == [] and engines.notices == []


def test_an_engine_that_failed_in_a_living_process_counts_as_dead() -> None:
    engines = Fixed(2)
    answer = engines.ask(1)
    engines.processes[0].fail("EngineDead")
    assert engines.asked(1) == [1] and not answer.done()
    engines.engines.poll()
    assert engines.restarted == ["judge0"]


def test_another_error_of_a_call_is_passed_on() -> None:
    engines = Fixed(2)
    answer = engines.ask(1)
    engines.processes[0].fail("ValueError")
    with pytest.raises(CallFailed, match="ValueError: of the test"):
        answer.result(0)
    engines.engines.poll()
    assert engines.restarted == [] and engines.asked(1) == []


def test_an_engine_that_dies_too_often_stays_dead_and_the_others_go_on() -> None:
    engines = Fixed(2, restarts=2)
    for _ in range(3):
        engines.processes[0].die()
        engines.engines.poll()
        if engines.processes[0].dead is None:
            engines.load(0)
    assert engines.restarted == ["judge0"] * 2
    assert engines.notices[-1][1] == "given_up" and "judge0 does not start again" in engines.notices[-1][0]
    engines.ask(1)
    assert engines.asked(1) == [1]
    engines.processes[1].die()
    engines.engines.poll()
    engines.processes[1].die()
    engines.engines.poll()
    engines.processes[1].die()
    with pytest.raises(TooFewEngines, match=r"judge1 .* died(.|\n)*No engine of the judge is left"):
        engines.engines.poll()


def test_an_answer_starts_the_count_of_deaths_again() -> None:
    engines = Fixed(1, restarts=1)
    for number in range(4):
        answer = engines.ask(number)
        engines.processes[0].die()
        engines.engines.poll()
        engines.load(0)
        engines.processes[0].answer(number)
        assert answer.result(0) == number
    assert len(engines.restarted) == 4


def test_a_silent_engine_is_replaced_and_its_late_failure_changes_nothing(now: list[float]) -> None:
    """The time counts from the last answer, and only while calls run."""
    engines = Fixed(2, timeout=5)
    now[0] += 100
    engines.engines.poll()
    answers = [engines.ask(1), engines.ask(2), engines.ask(3)]
    now[0] += 4
    engines.processes[0].answer("a")
    engines.processes[1].answer("b")
    now[0] += 4
    engines.engines.poll()
    assert engines.restarted == []
    now[0] += 2
    engines.engines.poll()
    assert engines.restarted == ["judge0"] and engines.asked(1) == [2, 3]
    assert "it has answered no call for 6 s (judge.timeout = 5); 1 call wait" in engines.notices[0][0]
    engines.processes[1].answer("c")
    assert [answer.result(0) for answer in answers] == ["a", "b", "c"]


def test_a_silent_engine_ends_the_run_without_restarts(now: list[float]) -> None:
    engines = Fixed(1, restarts=0, timeout=5)
    engines.ask(1)
    now[0] += 6
    with pytest.raises(
        ProcessFailure, match=r"judge0 has answered no call for 6 s .* logs/judge0\.log; raise judge\.timeout"
    ):
        engines.engines.poll()


def test_a_process_that_does_not_load_is_replaced(now: list[float]) -> None:
    engines = Fixed(1)
    engines.processes[0].die()
    engines.engines.poll()
    now[0] += 51
    engines.engines.poll()
    assert engines.restarted == ["judge0"] * 2 and "it has not loaded within" in engines.notices[1][0]
    engines.load(0)
    engines.ask(1)
    assert engines.asked(0) == [1]


def test_a_run_without_a_machine_for_the_engine_ends_after_the_timeout(now: list[float]) -> None:
    engines = Fixed(1, timeout=60)
    engines.has_machine = False
    engines.ask(1)
    engines.processes[0].die()
    for _ in range(3):
        engines.engines.poll()
        now[0] += 15
    assert [event for _, event in engines.notices] == ["death", "warning"], "one message, not one a poll"
    now[0] += 31
    with pytest.raises(TooFewEngines, match="No engine of the judge has had a machine for 76 s"):
        engines.engines.poll()


def test_a_machine_that_comes_back_is_used(now: list[float]) -> None:
    engines = Fixed(1, timeout=600)
    engines.has_machine = False
    answer = engines.ask(1)
    engines.processes[0].die()
    engines.engines.poll()
    engines.has_machine = True
    engines.engines.poll()
    assert engines.restarted == []
    now[0] += fixed.MACHINE_SECONDS
    engines.engines.poll()
    engines.load(0)
    engines.processes[0].answer("a")
    assert answer.result(0) == "a"


@pytest.mark.parametrize("seed", range(20))
def test_every_call_is_answered_once_after_any_deaths(seed: int) -> None:
    chance = random.Random(seed)
    engines = Fixed(3, restarts=1000)
    answers: list[Future[Any]] = []
    for number in range(300):
        engine = chance.randrange(3)
        process, event = (
            engines.processes[engine],
            chance.choice(["ask", "ask", "answer", "answer", "die", "poll", "load"]),
        )
        if event == "ask":
            answers.append(engines.ask(len(answers)))
        elif event == "answer" and process.running:
            number = next(args[0] for _, args, answer in process.calls if not answer.done())
            process.answer(number)
        elif event == "die" and process.dead is None:
            process.die()
        elif event == "load" and process.dead is None and not process.loading.done():
            process.loading.set_result({})
        elif event == "poll":
            engines.engines.poll()
    for _ in range(len(answers) + 10):
        engines.engines.poll()
        for process in engines.processes:
            if not process.loading.done() and process.dead is None:
                process.loading.set_result({})
            if process.running:
                process.answer(next(args[0] for _, args, answer in process.calls if not answer.done()))
    assert [answer.result(0) for answer in answers] == [*range(len(answers))]


def test_deaths_are_a_metric_if_the_run_survives_them() -> None:
    judge, code, mathematics = Fixed(1), Fixed(2, "teacher"), Fixed(1, "teacher")
    for process in (code.processes[0], code.processes[1], mathematics.processes[0]):
        process.die()
    for each in (judge, code, mathematics):
        each.engines.poll()
    recipe, all_engines = Recipe(), [each.engines for each in (judge, code, mathematics)]
    assert death_metrics(recipe, all_engines) == {}
    recipe.judge.restarts = recipe.teacher.restarts = 1
    assert death_metrics(recipe, all_engines) == {"fleet/judge_deaths": 0.0, "fleet/teacher_deaths": 3.0}
