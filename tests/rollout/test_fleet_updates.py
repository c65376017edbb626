"""Engines that die or fail while they receive weights: repeated updates, and what ends the run."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import (
    CallFailed,
    Failure,
    ProcessInfo,
    Raised,
    ServiceDied,
    TooFewEngines,
    WorkerFailed,
)
from megarl.rollout.fleet import fleet as fleet_module
from megarl.weight_sync.placement import DisaggregatedFleet
from megarl.weight_sync.session import WeightSyncError
from tests.support.dying_engines import Engines, source_of


def test_engines_restart_after_a_trainer_has_died_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine may have parts of the weights, although none has died. The new trainers open a new session."""
    monkeypatch.setattr(fleet_module, "_POLL_SECONDS", 0.0)
    engines = Engines()
    started, sessions, sent = engines.restart, list[list[int]](), list[int]()

    def restart(engine: int) -> None:
        started(engine)
        engines.services[engine].started.set_result({"receivers": "new"})

    engines.fleet._restart = restart

    class Trainers:
        def send_weights(self, version: int) -> list[Any]:
            sent.append(version)
            if len(sent) == 1:
                raise WorkerFailed(Failure.death(ProcessInfo("trainer rank 0"), "killed"))
            return []

    def open_session(members: list[Any], indices: list[int]) -> Any:
        sessions.append(indices)
        return SimpleNamespace(timeout=1.0)

    members, trainers = engines.fleet.members(), Trainers()
    placement = DisaggregatedFleet(
        trainers, engines.handles, None, members, engines.fleet, open_session, lambda: None, 10.0
    )  # type: ignore[arg-type]
    monkeypatch.setattr("megarl.weight_sync.placement.publish", lambda trainers, *_: trainers.send_weights(1) or {})
    with pytest.raises(WorkerFailed):
        placement.update_engines(1)
    assert engines.restarts == [] and sessions == [], "the trainers restart first"
    placement.prepare_trainers_restart()
    placement.update_engines(1)
    assert engines.restarts == [0, 1] and sessions == [[0, 1]] and engines.fleet.serving == [0, 1]
    placement.prepare_trainers_restart()
    placement.update_engines(2)
    assert engines.restarts == [0, 1] and len(sessions) == 2, (
        "trainers that died elsewhere leave the engines as they are"
    )


@pytest.mark.parametrize("other_fails", [True, False])
def test_groups_wait_for_a_repeated_update(monkeypatch: pytest.MonkeyPatch, other_fails: bool) -> None:
    """An engine dies in an update. The other fails with it or is ended, with its groups: both restart, then sample all groups."""
    monkeypatch.setattr(fleet_module, "_POLL_SECONDS", 0.0)
    engines = Engines()
    source = source_of(engines)
    source.admit(0)
    sessions: list[list[int]] = []
    started = engines.restart

    def restart(engine: int) -> None:
        started(engine)
        engines.services[engine].started.set_result({"receivers": "new"})

    engines.fleet._restart = restart

    class Trainers:
        def send_weights(self, version: int) -> list[Any]:
            if not sessions:
                engines.services[1].die()
                if other_fails:
                    engines.services[0].break_down()
                assert bool(engines.services[0].running) != other_fails and engines.services[1].running == {}
                raise WeightSyncError("engine1 died in the update")
            return []

    def open_session(members: list[Any], indices: list[int]) -> Any:
        assert [member.name for member in members] == [f"engine{index}" for index in indices]
        sessions.append(indices)
        return SimpleNamespace(timeout=1.0)

    members = engines.fleet.members()
    placement = DisaggregatedFleet(
        Trainers(), engines.handles, None, members, engines.fleet, open_session, lambda: None, 10.0
    )  # type: ignore[arg-type]
    monkeypatch.setattr("megarl.weight_sync.placement.publish", lambda trainers, *_: trainers.send_weights(1) or {})
    metrics = placement.update_engines(1)
    assert 0 < metrics["fleet/restart_seconds"] < 20
    assert placement.update_engines(1)["fleet/restart_seconds"] == 0
    assert engines.restarts == [0, 1] and sessions == [[0, 1]] and engines.fleet.serving == [0, 1]
    source.admit(1)
    running = [*engines.services[0].running, *engines.services[1].running]
    assert sorted(running) == list(range(12)), "with version 1, four more groups may start"


def restart_all(engines: Engines, error: Exception) -> None:
    with engines.fleet.update():
        engines.fleet.restart_all(engines.fleet.members(), error, lambda: None, 1.0)


def test_an_update_that_fails_without_a_death_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "DEATH_SECONDS", 0.1)
    engines = Engines()
    with pytest.raises(WeightSyncError, match="other bytes"):
        restart_all(engines, WeightSyncError("other bytes"))
    assert engines.restarts == []


def test_a_failure_of_another_process_in_an_update_ends_the_run() -> None:
    """The cluster has ended by then: nothing may be restarted."""
    engines = Engines()
    engines.services[1].die()
    for error in (
        ServiceDied(Failure.death(ProcessInfo("service teacher0"), "killed")),
        TooFewEngines(Failure.death(ProcessInfo("service engine1"), "killed")),
    ):
        with pytest.raises(type(error)):
            restart_all(engines, error)
    assert engines.restarts == []


def test_an_engine_that_fails_in_its_part_of_an_update_restarts_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory, say: its process lives. The abort then fails the other's part, which is not its failure."""
    monkeypatch.setattr(fleet_module, "_POLL_SECONDS", 0.0)
    engines = Engines()
    for number, kind in ((0, "WeightSyncError"), (1, "OutOfMemoryError")):
        place = ProcessInfo(f"service engine{number}", "host", 7)
        update: Future[Any] = Future()
        engines.fleet.follow_update((number, 0), update)
        update.set_exception(CallFailed(Failure.raised(place, Raised(kind, "no", ""))))
    started = engines.restart

    def restart(engine: int) -> None:
        started(engine)
        engines.services[engine].started.set_result({"receivers": "new"})

    engines.fleet._restart = restart
    restart_all(engines, WeightSyncError("aborted: engine1: out of memory"))
    assert engines.restarts == [0, 1] and engines.fleet.take_metrics()["fleet/deaths"] == 1
    assert engines.fleet.take_restarted() == [0, 1] and engines.fleet.take_restarted() == []


def test_a_new_process_that_cannot_load_in_an_update_restarts() -> None:
    engines = Engines(count=3)
    engines.services[2].die()
    with engines.fleet.update():
        engines.fleet.poll()
        place = ProcessInfo("service engine2", "host", 7)
        engines.services[2].started.set_exception(
            CallFailed(Failure.raised(place, Raised("OutOfMemoryError", "no", "")))
        )
        engines.fleet.poll()
        engines.fleet.updated(engines.fleet.members())
    assert engines.restarts == [2, 2]


@pytest.mark.parametrize(
    ("cause", "counts"),
    [
        ("OutOfMemoryError: no memory", True),
        ("WeightSyncError: engine1 got other bytes", False),
        ("RuntimeError: Worker failed with error 'weight sync was aborted: engine1 died'", False),
        ("EngineRefused: engine 'engine0' sleeps", False),
    ],
)
def test_engines_that_end_because_an_update_is_aborted_have_not_failed(cause: str, counts: bool) -> None:
    engines = Engines()
    update: Future[Any] = Future()
    engines.fleet.follow_update((0, 0), update)
    kind, _, message = cause.partition(": ")
    update.set_exception(
        CallFailed(Failure.raised(ProcessInfo("service engine0", "host", 7), Raised(kind, message, "")))
    )
    assert engines.fleet._find_failed([(0, 0), (1, 0)]) == counts


def test_a_run_that_is_stopped_while_engines_restart_can_save() -> None:
    """SIGTERM raises in the check; the checks of the save must not find too few engines."""
    engines = Engines()
    with pytest.raises(KeyboardInterrupt), engines.fleet.update():
        engines.services[0].die()
        engines.services[1].die()
        raise KeyboardInterrupt
    engines.fleet.poll()


@pytest.mark.parametrize("loads", [False, True])
def test_an_engine_that_dies_while_it_starts_does_not_interrupt_the_update(loads: bool) -> None:
    """It has no part in it: the others sample on, with the weights that they receive."""
    engines = Engines(3)
    engines.services[2].die()
    engines.fleet.poll()
    with engines.fleet.update():
        members = engines.fleet.members()
        assert members == [(0, 0), (1, 0)]
        if loads:
            engines.load(2)
            engines.services[2].break_down()
        else:
            engines.services[2].started.set_exception(
                ServiceDied(Failure.death(ProcessInfo("service engine2"), "killed"))
            )
            engines.fleet.poll()
        assert engines.fleet.serving == [0, 1]
        engines.fleet.poll()
        assert engines.restarts == [2, 2], "it starts again"
        engines.services[1].die()
        engines.fleet.poll()
        assert engines.fleet.serving == [], "a member of the update"
