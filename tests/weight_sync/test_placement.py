"""An engine that does not answer a call ends the run, with its name in the error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.assembly import Started, connect_engines
from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer.group import ActorGroup
from megarl.trainer.start import Learners
from megarl.weight_sync.placement import Colocated, Occupant
from megarl.weight_sync.publish import publish
from megarl.weight_sync.session import WeightSyncError


class Engine:
    """A stand-in engine that answers every method except one, in which it hangs."""

    def __init__(self, name: str, hangs_in: str | None = None) -> None:
        self.name, self.hangs_in = name, hangs_in

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method != self.hangs_in:
            future.set_result(None)
        return future


def colocated(engines: list[Any]) -> Any:
    recipe = Recipe()
    recipe.weight_sync.timeout, recipe.rollout.start_timeout = 0.2, 0.1
    actor = ActorGroup(Trainers(), recipe)  # type: ignore[arg-type]
    answers = [
        {"receivers": [(engine.name, "host")], "can_sleep": True, "can_update_in_flight": True} for engine in engines
    ]
    occupant = Occupant(actor, offload=False)
    started = Started(handles(engines), answers, [], [], Learners(actor, occupant, None, None), engines_asleep=False)
    return connect_engines(recipe, started, print)


def handles(engines: list[Any]) -> list[EngineHandle]:
    return [EngineHandle(engine) for engine in engines]


class Trainers:
    def call(self, method: str, *args: Any) -> list[Any]:
        return [SimpleNamespace(timeout=0.2, bytes=1)]


def update(engines: list[Any]) -> None:
    session: Any = SimpleNamespace(timeout=0.2)
    publish(ActorGroup(Trainers(), Recipe()), handles(engines), session, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hangs_in", "act", "words"),
    [
        (
            "connect_weight_sync",
            colocated,
            "engine1 did not connect to the trainers within weight_sync.timeout = 0.2 s",
        ),
        ("update_weights", update, "engine1 did not take the new weights in within weight_sync.timeout = 0.2 s"),
        (
            "sleep",
            lambda engines: colocated(engines).give_to_actor(),
            "engine1 did not go to sleep within rollout.start_",
        ),
        (
            "wake",
            lambda engines: colocated(engines).update_engines(1),
            "engine1 did not wake its weights within rollout.start_timeout = 0.1 s",
        ),
    ],
)
@pytest.mark.timeout(20)
def test_a_silent_engine_is_named(hangs_in: str, act: Callable[[list[Any]], Any], words: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        act([Engine("engine0"), Engine("engine1", hangs_in)])
    assert words in str(raised.value) and "logs/engine1.log" in str(raised.value)


def test_a_stop_ends_engines_that_sample_before_trainers_take_the_devices() -> None:
    """Engines with requests cannot go to sleep, and the trainers' tensors need their memory."""
    calls: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def call(self, method: str, *args: Any) -> Future[Any]:
            raise AssertionError(f"{self.name}.{method}")

        def stop(self) -> None:
            calls.append("engine stops")

    class Offloading:
        def call(self, method: str, *args: Any) -> list[Any]:
            calls.append(method)
            return [None]

    actor = Occupant(ActorGroup(Offloading(), Recipe()), offload=True)  # type: ignore[arg-type]
    engines = handles([Recorded("engine0"), Recorded("engine1")])
    devices = Colocated(
        actor, None, engines, lambda version: {}, engines_sleep=True, engines_asleep=False, start_timeout=1.0
    )
    devices.reclaim()
    assert calls == [], "the trainers hold their tensors: the engines may go on"
    actor.on_device = False
    devices.reclaim()
    assert calls == ["engine stops", "engine stops", "onload"] and actor.on_device


@pytest.mark.parametrize("fails_in", ["update", "offload_weights"])
def test_trainers_restart_after_a_failure_while_engines_wake(fails_in: str) -> None:
    """Engines that hold their weights alone go to sleep again, so that new trainers find the memory free."""
    calls: list[str] = []

    class Recorded(Engine):
        def call(self, method: str, *args: Any) -> Future[Any]:
            calls.append(" ".join([method, *args[0]]) if args else method)
            return super().call(method, *args)

    class Failing:
        def call(self, method: str, *args: Any) -> list[Any]:
            if method == fails_in:
                raise WorkerFailed(Failure.death(ProcessInfo("trainer rank 0"), "killed"))
            return [None]

    class Update:
        was_interrupted = False

        def __call__(self, version: int) -> Any:
            if fails_in == "update":
                raise WorkerFailed(Failure.death(ProcessInfo("trainer rank 0"), "killed"))
            return {}

        def end_session(self) -> None:
            calls.append("end session")

    actor = Occupant(ActorGroup(Failing(), Recipe()), offload=True)  # type: ignore[arg-type]
    devices = Colocated(
        actor,
        None,
        handles([Recorded("engine0")]),
        Update(),
        engines_sleep=True,
        engines_asleep=False,
        start_timeout=1.0,
    )  # type: ignore[arg-type]
    with pytest.raises(WorkerFailed):
        devices.update_engines(1)
    assert calls == ["sleep", "wake weights"]
    devices.prepare_trainers_restart()
    assert calls[2:] == ["wake kv_cache", "sleep", "end session"] and devices.engines_asleep


def test_an_engine_that_fails_beside_dead_trainers_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The store of the session has ended with trainer 0, and the call to the trainers fails with its death."""

    def abort(reason: str) -> None:
        raise WeightSyncError(f"the weight sender cannot be reached: {reason}")

    class Dead(Trainers):
        def call(self, method: str, *args: Any) -> list[Any]:
            raise WorkerFailed(Failure(ProcessInfo("trainer rank 0", "node7", 100), "died"))

    engine: Any = Engine("engine0", hangs_in="update_weights")
    receiving: Future[Any] = Future()
    receiving.set_exception(WeightSyncError("the connection to trainer 0 broke"))
    engine.call = lambda method, *args: receiving
    session: Any = SimpleNamespace(timeout=0.2, abort=abort)
    with pytest.raises(WorkerFailed):
        publish(ActorGroup(Dead(), Recipe()), handles([engine]), session, 1)  # type: ignore[arg-type]
    assert not caplog.records
