"""Engines that die while the run goes on: the state machine, the fleet, and groups of dead engines."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.failures import (
    CallFailed,
    Failure,
    MachineLost,
    ProcessInfo,
    Raised,
    ServiceDied,
    TooFewEngines,
    WorkerFailed,
)
from megarl.engines.tape import TapeFile
from megarl.rollout.evaluate import FIRST_EVALUATION_GROUP, _run
from megarl.rollout.fleet import fleet as fleet_module
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.fleet.states import MOST_STARTS, EngineStates
from megarl.rollout.source_engines import EnginesSource
from megarl.rollout.tape import TAPE_FORMAT, Arrivals, history, segments_of, with_deaths
from megarl.types import Prompt, Sampling
from tests.rollout.test_source import FakeService, ManualService, Prompts, refreshing
from tests.support.dying_engines import Engines, source_of

EVENTS = st.lists(
    st.tuples(st.sampled_from(["die", "end", "restart", "load", "update"]), st.integers(0, 2)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_an_engine_serves_only_with_weights_that_its_present_process_received(events: list[tuple[str, int]]) -> None:
    states = EngineStates(3)
    has_weights = {(0, 0), (1, 0), (2, 0)}
    deaths_in_a_row = [0, 0, 0]
    for event, engine in events:
        if event == "die":
            deaths_in_a_row[engine] += states.die(engine)
        elif event == "end":
            states.end(engine)
        elif event == "restart" and engine in states.due:
            assert deaths_in_a_row[engine] <= MOST_STARTS
            states.restart(engine)
        elif event == "load" and engine in states.starting:
            states.load(engine)
        elif event == "update":
            has_weights |= set(states.members)
            for joined in states.update(states.members):
                deaths_in_a_row[joined] = 0
        assert {(each, states.process(each)) for each in states.serving} <= has_weights


def test_weights_for_an_earlier_process_do_not_count() -> None:
    states = EngineStates(2)
    states.die(1)
    states.restart(1)
    states.load(1)
    old = states.members
    states.die(1)
    states.restart(1)
    states.load(1)
    assert states.update(old) == [] and states.serving == [0]
    assert states.update(states.members) == [1]


def test_engines_that_the_controller_ends_may_always_restart() -> None:
    """One bad engine that dies in each update must not exhaust the others, which end with it."""
    states = EngineStates(2)
    for _ in range(MOST_STARTS + 1):
        states.die(1)
        states.end(0)
        for engine in states.due:
            states.restart(engine)
            states.load(engine)
    assert states.due == [] and states.members == [(0, MOST_STARTS + 1)]


def test_a_dead_engine_starts_again_and_serves_after_an_update() -> None:
    engines = Engines()
    engines.services[1].die()
    engines.fleet.poll()
    assert engines.restarts == [1] and engines.fleet.serving == [0] and engines.fleet.members() == [(0, 0)]
    assert (
        "service engine1 on host (pid 7) died: killed" in engines.notices[0] and "1 engine left" in engines.notices[0]
    )
    assert engines.events == ["death", None]
    engines.load(1)
    assert engines.fleet.serving == [0] and engines.fleet.members() == [(0, 0), (1, 1)]
    assert engines.fleet.descriptions[1] == {"receivers": "new"}
    engines.update()
    engines.fleet.poll()
    assert engines.fleet.serving == [0, 1] and engines.notices[-1] == "engine1 has the run's weights, and samples"
    expected = {"fleet/serving": 2.0, "fleet/deaths": 1.0, "fleet/sampled_again": 0.0}
    assert engines.fleet.take_metrics().items() >= expected.items()


def test_too_few_engines_end_the_run() -> None:
    engines = Engines(least=2, count=3)
    engines.services[0].die()
    engines.fleet.poll()
    engines.services[2].die()
    with pytest.raises(ServiceDied, match=r"engine2(.|\n)*Fewer than rollout.min_engines = 2 engines are left"):
        engines.fleet.poll()
    assert engines.restarts == [0], "no process is started for a run that ends"


def test_a_call_that_fails_with_the_last_engines_names_all_of_them() -> None:
    """Failed calls report deaths before the controller looks at the processes."""
    engines = Engines(count=3)
    source = source_of(engines)
    source.admit(0)
    for service in engines.services:
        service.die()
    with pytest.raises(TooFewEngines, match=r"Fewer than rollout.min_engines = 1 engines are left"):
        source.take(4)
    ends = [(notice.split()[1], notice.splitlines()[-1]) for notice in engines.notices]
    assert ends == [
        ("engine0", "2 engines left that sample"),
        ("engine1", "1 engine left that sample"),
        ("engine2", "0 engines left that sample"),
    ]
    assert engines.events == ["death"] * 3 and engines.restarts == []


def test_problems_of_the_last_engines_name_all_of_them() -> None:
    engines = Engines()
    problems = [Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(4)]
    threading.Timer(0.2, lambda: [service.die() for service in engines.services]).start()
    with pytest.raises(TooFewEngines):
        _run(problems, Sampling(n=1, max_tokens=8), engines.handles, engines.fleet.poll, 5.0, engines.fleet)
    assert [notice.split()[1] for notice in engines.notices] == ["engine0", "engine1"]


def test_no_engine_restarts_while_others_that_died_with_it_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(count=3)
    handles = engines.handles
    engines.fleet = Fleet(handles, [{}] * 3, 1, engines.restart, engines.note, engines.end, together=1.0)
    first, second, third = engines.services
    late = [second, third]
    monkeypatch.setattr(fleet_module.time, "sleep", lambda _: late.pop().die() if late else None)
    first.die()
    with pytest.raises(TooFewEngines, match="engine1"):
        engines.fleet.poll()
    assert engines.restarts == [] and [notice.split()[1] for notice in engines.notices] == [
        "engine0",
        "engine2",
        "engine1",
    ]


def test_an_engine_that_never_starts_is_given_up() -> None:
    engines = Engines()
    for _ in range(MOST_STARTS + 1):
        engines.services[1].die()
        engines.fleet.poll()
        engines.fleet.poll()
    assert engines.restarts == [1] * MOST_STARTS
    (text,) = given_up(engines)
    assert text.startswith("engine1 has died 3 times before it sampled, and does not restart; see its log. A restart")
    assert commands_of(text) == [1, 2]
    for number in commands_of(text):
        engines.fleet.set_wanted(number)
        engines.fleet.poll()
    engines.load(1)
    engines.update()
    assert engines.restarts == [1] * (MOST_STARTS + 1) and engines.fleet.serving == [0, 1]


def test_the_commands_that_start_engines_again_keep_the_least_number() -> None:
    engines = Engines(count=3)
    for engine in (1, 2):
        for _ in range(MOST_STARTS + 1):
            engines.services[engine].die()
            engines.fleet.poll()
    assert [commands_of(text) for text in given_up(engines)] == [[2, 3], [1, 3]]
    engines.fleet.least = 2
    assert commands_of(engines.fleet._given_up_text(2)) == [], "megarl engines would refuse 1"


def given_up(engines: Engines) -> list[str]:
    """Return the notices of engines that do not restart."""
    return [text for text, event in zip(engines.notices, engines.events, strict=True) if event == "given_up"]


def commands_of(text: str) -> list[int]:
    """Return the numbers of engines of the commands in a notice."""
    return [int(number) for number in re.findall(r"`megarl engines RUN_DIRECTORY (\d+)`", text)]


def test_a_new_process_that_does_not_load_in_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: now[0])
    engines = Engines(load_limit=100.0)
    engines.services[1].die()
    engines.fleet.poll()
    now[0] = 100.0
    engines.fleet.poll()
    assert engines.restarts == [1], "it may still load"
    now[0] = 101.0
    engines.fleet.poll()
    assert engines.restarts == [1, 1]
    assert "died: it has not loaded within rollout.start_timeout = 100 s" in engines.notices[-2]
    now[0] = 200.0
    engines.load(1)
    engines.update()
    assert engines.fleet.serving == [0, 1], "the newer process has its own limit"


def test_only_deaths_of_the_present_process_count() -> None:
    engines = Engines()
    fleet, place = engines.fleet, ProcessInfo("service engine1", "host", 7)
    death = ServiceDied(Failure.death(place, "killed"))
    assert not fleet.lost(1, 0, ValueError("no"))
    assert not fleet.lost(1, 0, WorkerFailed(Failure.death(ProcessInfo("trainer rank 0"), "killed")))
    assert not fleet.lost(1, 0, CallFailed(Failure.raised(place, Raised("KeyError", "no such prompt", ""))))
    assert fleet.lost(1, 0, death) and fleet.serving == [0]
    fleet.poll()
    engines.load(1)
    engines.update()
    assert fleet.lost(1, 0, death) and fleet.serving == [0, 1], "a late error of the first process"


@pytest.mark.parametrize("end", ["die", "break_down"])
def test_groups_of_a_dead_engine_are_sampled_by_the_others(end: str) -> None:
    engines = Engines()
    source = source_of(engines)
    source.admit(0)
    first, second = engines.services
    assert (sorted(first.running), sorted(second.running)) == ([0, 2, 4, 6], [1, 3, 5, 7])
    first.finish(2)
    getattr(first, end)()
    assert sorted(second.running) == [0, 1, 3, 4, 5, 6, 7]
    second.finish(0, 1, 3)
    batch = source.take(4)
    assert sorted(group.number for group in batch.groups) == [0, 1, 2, 3]
    assert batch.metrics["fleet/sampled_again"] == 3 and batch.metrics["fleet/serving"] == 1
    source.admit(1)
    assert sorted(second.running) == [4, 5, 6, 7, 8, 9, 10, 11], "the dead engine gets no group"
    engines.fleet.poll()
    engines.load(0)
    second.finish(4, 5, 6, 7)
    engines.update()
    source.take(4)
    source.admit(2)
    assert sorted(engines.services[0].running) == [12, 13, 14, 15], "its new process has fewer groups than the other"


def test_a_group_that_ends_every_engine_is_named() -> None:
    engines = Engines(count=4)
    source = source_of(engines)
    source.admit(0)
    for _ in range(3):
        next(each for each in engines.services if 0 in each.running).die()
    with pytest.raises(RuntimeError, match=r"3 engines have died while they sampled group 0"):
        source.take(4)


def test_an_engine_waits_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine has left the cluster: one notice names it, and no attempt counts as a death or a restart."""
    engines = Engines(count=3)
    started, machines = engines.restart, list[str]()

    def restart(engine: int) -> None:
        if not machines:
            raise MachineLost("no machine has 1 NPU")
        started(engine)

    engines.fleet._restart = restart
    engines.services[1].die()
    for _ in range(MOST_STARTS + 2):
        monkeypatch.setattr(fleet_module, "MACHINE_SECONDS", 0.0)
        engines.fleet.poll()
    engine_notices = [notice for notice in engines.notices if "engine1" in notice]
    assert len(engine_notices) == 3 and engine_notices[2] == "engine1 waits for a machine: no machine has 1 NPU", (
        engine_notices
    )
    assert engines.fleet.take_restarted() == [1] and engines.fleet.take_restarted() == []
    monkeypatch.setattr(fleet_module, "MACHINE_SECONDS", 60.0)
    engines.fleet.poll()
    machines.append("a new one")
    engines.fleet.poll()
    assert engines.restarts == [], "the next attempt is a minute later"
    engines.fleet._no_machine_until[1] = 0.0
    engines.fleet.poll()
    engines.load(1)
    engines.update()
    assert engines.restarts == [1] and engines.fleet.serving == [0, 1, 2]


def test_an_idle_engine_that_fails_in_a_process_that_lives_restarts() -> None:
    engines = Engines()
    engines.services[1].break_down()
    engines.fleet.poll()
    assert engines.restarts == [1] and engines.fleet.serving == [0]


def test_an_engine_that_has_just_joined_takes_the_groups_of_one_that_dies_before_the_next_step() -> None:
    """The update after a step is followed by an evaluation, and only then by new groups."""
    engines = Engines()
    source = source_of(engines)
    source.admit(0)
    engines.services[1].die()
    engines.fleet.poll()
    engines.load(1)
    engines.update()
    engines.services[0].die()
    assert sorted(engines.services[1].running) == [0, 1, 2, 3, 4, 5, 6, 7]
    engines.services[1].finish(0, 1, 2, 3)
    assert len(source.take(4).groups) == 4


def test_the_end_of_a_run_is_no_death() -> None:
    engines = Engines()
    source = source_of(engines)
    source.admit(0)
    engines.services[0].stopping = True
    engines.services[0].die()
    with pytest.raises(ServiceDied):
        source.take(4)
    assert engines.fleet.take_restarted() == [] and sorted(engines.services[1].running) == [1, 3, 5, 7]


def test_a_replay_of_a_run_with_deaths_is_refused(tmp_path: Path) -> None:
    header = {"segment": 0, "format": TAPE_FORMAT, "after": 0, "resumed": None, "unlogged": False, "identity": {}}
    engines = Engines()
    recipe = refreshing(ManualService()).recipe
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    arrivals: Arrivals[Any] = Arrivals(TapeFile(tmp_path / "controller.jsonl", header), 0)
    source = EnginesSource(recipe, prompts, engines.handles, [0], engines.fleet.poll, arrivals, engines.fleet)  # type: ignore[arg-type]
    source.admit(0)
    engines.services[1].finish(1, 3, 5, 7)
    engines.services[1].die()  # without a group
    engines.fleet.poll()
    engines.load(1)
    engines.services[0].finish(0, 2, 4, 6)
    engines.update()
    source.take(4)
    source.admit(1)
    (plan,) = history(segments_of(tmp_path))
    assert "engine1 died in segment 0" in str(with_deaths([plan]))


def test_problems_of_an_engine_that_dies_in_an_evaluation_go_to_the_others() -> None:
    engines = Engines()
    problems = [Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(4)]
    dying, other = engines.services
    fake = FakeService()
    other.call, other.call_with_parts = fake.call, fake.call_with_parts  # type: ignore[method-assign]
    threading.Timer(0.2, dying.die).start()
    groups = _run(problems, Sampling(n=1, max_tokens=8), engines.handles, engines.fleet.poll, 5.0, engines.fleet)
    assert [group.number for group in groups] == [FIRST_EVALUATION_GROUP + number for number in range(4)]


def test_nothing_comes_behind_the_end_of_the_tape(tmp_path: Path) -> None:
    """An engine that still samples groups dies after the last step, as during an export."""
    engines = Engines()
    source = source_of(engines)
    source.recipe.train.steps = 1
    source._arrivals = Arrivals(TapeFile(tmp_path / "controller.jsonl", {"segment": 0}), 0)
    source.admit(0)
    first, second = engines.services
    first.finish(0, 2)
    second.finish(1, 3)
    assert len(source.take(4).groups) == 4
    assert first.running and second.running, "groups of further steps"
    source.close()
    running = sorted(second.running)
    first.die()
    engines.fleet.poll()
    records = [json.loads(line) for line in (tmp_path / "controller.jsonl").read_text().splitlines()]
    assert records[-1] == {"ended": True} and not any("died" in record for record in records)
    assert sorted(second.running) == running, "no group starts again"
