"""Groups of one process that share calls: each arrives once, with its own vectors or its own error."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import CallFailed, Failure, ProcessInfo, Raised, ServiceDied
from megarl.engines.base import EngineDead, GenerationAborted
from megarl.rollout.collect.collector import MOST_GROUPS, GroupCollector
from megarl.rollout.collect.finished import FinishedGroups
from megarl.rollout.engine_handle import EngineHandle
from megarl.types import Group, InlineData
from tests.rollout.test_source import ManualService

PLACE = ProcessInfo("service engine0", "host", 7)


class Calls:
    """The calls of a collector, answered by the test."""

    def __init__(self) -> None:
        self.most: list[int] = []
        self.open: list[Future[Any]] = []
        service: Any = SimpleNamespace(known_place=PLACE)
        self.collector = GroupCollector(service, self._start)

    def _start(self, most: int) -> Future[Any]:
        self.most.append(most)
        self.open.append(Future())
        return self.open[-1]

    def collect(self, *numbers: int) -> list[Future[Any]]:
        return [self.collector.collect(number) for number in numbers]

    def reply(self, *numbers: int, errors: dict[int, Raised] | None = None) -> None:
        errors = errors or {}
        control = [(number, errors.get(number) or group(number)) for number in numbers]
        data = [InlineData([f"vectors of {number}"]) for number in numbers if number not in errors]
        self.open.pop().set_result((control, data))


def group(number: int) -> Group:
    return Group(number, f"row/{number}", "test", [])


def test_groups_of_a_reply_get_their_own_vectors() -> None:
    calls = Calls()
    results = calls.collect(1, 2, 3)
    assert calls.most == [1], "one call for all of them"
    calls.reply(3)
    calls.reply(2, 1)
    for number, result in zip((1, 2, 3), results, strict=True):
        collected, data = result.result(0)
        assert (collected.number, data.get()) == (number, [f"vectors of {number}"])
    assert calls.most == [1, 2] and not calls.open, "no call without a group to wait for"


def test_calls_have_places_for_twice_the_groups_of_the_last_reply() -> None:
    calls = Calls()
    calls.collect(*range(100))
    first = 0
    for size in (1, 2, 4, 8, 16, MOST_GROUPS, 3):
        calls.reply(*range(first, first + size))
        first += size
    assert calls.most == [1, 2, 4, 8, 16, MOST_GROUPS, MOST_GROUPS, 6]
    calls.reply(*range(first, first + 1))
    assert calls.most[-1] == 2


def test_the_error_of_a_group_names_it_and_leaves_the_others() -> None:
    """An error of the engine itself does not name one of its groups: its cause is the same for all."""
    calls = Calls()
    first, bad, dead = calls.collect(1, 2, 3)
    errors = {2: Raised("ValueError", "no number", "the traceback"), 3: Raised("EngineDead", "out of memory", "")}
    calls.reply(2, 3, 1, errors=errors)
    assert first.result(0)[1].get() == ["vectors of 1"], "its vectors are the only ones of the reply"
    with pytest.raises(
        CallFailed, match=r"service engine0 on host .* failed: ValueError: group 2: no number"
    ) as caught:
        bad.result(0)
    assert caught.value.failure.traceback == "the traceback"
    with pytest.raises(CallFailed) as caught:
        dead.result(0)
    assert caught.value.failure.cause == "EngineDead: out of memory"


def test_a_death_ends_the_waiting_groups_once_and_later_ones_at_once() -> None:
    calls = Calls()
    arrived, *lost = calls.collect(1, 2, 3)
    calls.reply(1)
    ends: list[int] = []
    for number, result in enumerate(lost):
        result.add_done_callback(lambda _, number=number: ends.append(number))  # type: ignore[misc]
    died = ServiceDied(Failure.death(PLACE, "killed"))
    calls.open.pop().set_exception(died)
    assert arrived.result(0) and ends == [0, 1]
    assert all(isinstance(each.exception(0), ServiceDied) for each in lost)
    (later,) = calls.collect(4)
    calls.open.pop().set_exception(died)
    assert isinstance(later.exception(0), ServiceDied)


def test_the_error_of_a_whole_reply_names_the_engine_and_the_groups_that_it_had_not_returned() -> None:
    calls = Calls()
    arrived, *lost = calls.collect(3, 12, 4, 31, 5, 40, 8)
    calls.reply(3)
    unreadable = Raised("MemoryError", "the reply does not fit", "the traceback")
    calls.open.pop().set_exception(CallFailed(Failure.raised(PLACE, unreadable), "\nTry again."))
    assert arrived.result(0)
    named = "service engine0 on host (pid 7) had not returned 6 groups: 4, 5, 8, 12, 31 and 1 more"
    for each in lost:
        error = each.exception(0)
        assert isinstance(error, CallFailed) and error.failure.traceback == "the traceback"
        assert (
            str(error)
            == f"service engine0 on host (pid 7) failed: MemoryError: the reply does not fit\nTry again.\n{named}"
        )
    (later,) = calls.collect(9)
    calls.open.pop().set_exception(ServiceDied(Failure.death(PLACE, "killed")))
    with pytest.raises(
        ServiceDied, match=r"died: killed\nservice engine0 on host \(pid 7\) had not returned 1 group: 9$"
    ):
        later.result(0)


def test_a_call_that_cannot_start_ends_the_waiting_groups() -> None:
    calls = Calls()
    _, waiting = calls.collect(1, 2)

    def fail(most: int) -> Any:
        raise OSError("no memory")

    start, calls.collector._start_call = calls.collector._start_call, fail
    calls.reply(1)
    with pytest.raises(OSError, match="no memory") as caught:
        waiting.result(0)
    assert caught.value.__notes__ == ["service engine0 on host (pid 7) had not returned 1 group: 2"]  # type: ignore[attr-defined]
    (first,) = calls.collect(3)
    with pytest.raises(OSError, match="no memory"):
        first.result(0)
    calls.collector._start_call = start
    (later,) = calls.collect(4)
    calls.reply(4)
    assert later.result(0)[0].number == 4


def test_a_group_that_is_waited_for_cannot_be_cancelled() -> None:
    """A cancelled one would lose the groups behind it in the reply."""
    calls = Calls()
    first, second = calls.collect(1, 2)
    assert not first.cancel()
    calls.reply(1, 2)
    assert first.result(0)[0].number == 1 and second.result(0)[0].number == 2


def test_a_group_may_arrive_before_it_is_collected() -> None:
    """It was submitted while a call waited for other groups."""
    calls = Calls()
    (first,) = calls.collect(1)
    calls.reply(2)
    (second,) = calls.collect(2)
    assert second.result(0)[0].number == 2 and not first.done()
    calls.reply(1)
    assert first.result(0)[0].number == 1


def test_results_of_a_group_that_came_back_arrive_in_order() -> None:
    """It was handed over and returned to its first engine before the error of the hand-over arrived."""
    calls = Calls()
    moved, again = calls.collect(5, 5)
    calls.reply(5, errors={5: Raised("EngineRefused", "it was handed over", "")})
    assert isinstance(moved.exception(0), CallFailed) and not again.done()
    calls.reply(5)
    assert again.result(0)[0].number == 5


def test_groups_that_start_while_a_reply_is_handled_wait_for_the_next_call() -> None:
    calls = Calls()
    started: list[Future[Any]] = []
    first, second = calls.collect(1, 2)
    first.add_done_callback(lambda _: started.extend(calls.collect(3)))
    calls.reply(1)
    assert len(calls.open) == 1
    calls.reply(3, 2)
    assert second.done() and started[0].done()


def test_a_new_process_has_a_collector_of_its_own() -> None:
    old, new = ManualService(), ManualService()
    handle: Any = EngineHandle(old)  # type: ignore[arg-type]
    before = handle.collect(1)
    handle.service = new
    after = handle.collect(1)
    answer: Future[Any] = Future()
    new.promise(1, answer)
    answer.set_result((group(1), InlineData([])))
    assert after.done() and not before.done()
    died = ServiceDied(Failure.death(PLACE, "killed"))
    end: Future[Any] = Future()
    old.promise(1, end)
    end.set_exception(died)
    assert isinstance(before.exception(0), ServiceDied)


def test_groups_arrive_once_from_threads_that_collect_and_reply() -> None:
    """Replies of random sizes arrive in a thread of the transport while two threads submit groups."""
    order, finished, lock = random.Random(1), list[int](), threading.Lock()
    arrived: list[int] = []
    service: Any = SimpleNamespace(known_place=PLACE)
    calls: list[tuple[int, Future[Any]]] = []

    def start(most: int) -> Future[Any]:
        calls.append((most, Future()))
        return calls[-1][1]

    collector = GroupCollector(service, start)

    def submit(first: int) -> None:
        for number in range(first, first + 300):
            with lock:
                finished.append(number)
            collector.collect(number).add_done_callback(lambda done: arrived.append(done.result()[0].number))

    threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(arrived) < 600 and time.monotonic() < deadline:
        if not calls or not finished:
            continue
        most, call = calls.pop()
        assert not calls, "one call at a time"
        with lock:
            order.shuffle(finished)
            taken = [finished.pop() for _ in range(min(most, len(finished)))]
        call.set_result(([(number, group(number)) for number in taken], [InlineData([])] * len(taken)))
    for thread in threads:
        thread.join(10)
    assert sorted(arrived) == [*range(300), *range(1000, 1300)]


class TestFinished:
    """The queue in the rollout process."""

    def test_groups_and_errors_in_order(self) -> None:
        async def live() -> None:
            finished = FinishedGroups()
            waiting = asyncio.create_task(finished.take(8))
            await asyncio.sleep(0)
            finished.add(4, (group(4), ["four"]))  # type: ignore[list-item]
            finished.fail(2, EngineDead("out of memory"))
            finished.add(1, (group(1), ["one"]))  # type: ignore[list-item]
            control, vectors = await waiting
            assert [number for number, _ in control] == [4, 2, 1] and vectors == [["four"], ["one"]]
            assert isinstance(control[1][1], Raised) and control[1][1].message == "out of memory"
            for number in range(5):
                finished.add(number, (group(number), []))
            assert [number for number, _ in (await finished.take(3))[0]] == [0, 1, 2]
            assert [number for number, _ in (await finished.take(3))[0]] == [3, 4]

        asyncio.run(live())

    def test_a_dead_controllers_call_takes_no_group_of_the_next(self) -> None:
        """Its call has been woken by a group, and has not run yet, when the process is released."""

        async def live() -> None:
            finished = FinishedGroups()
            dead = asyncio.create_task(finished.take(8))
            await asyncio.sleep(0)
            finished.add(1, (group(1), []))
            finished.forget()
            finished.add(2, (group(2), []))
            with pytest.raises(GenerationAborted, match="its controller has died"):
                await dead
            assert [number for number, _ in (await finished.take(8))[0]] == [2]

        asyncio.run(asyncio.wait_for(live(), 10))
