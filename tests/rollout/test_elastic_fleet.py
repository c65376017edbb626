"""Engines that join and leave while the run goes on: states, owners of groups, and no group that is lost or trained twice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.evaluate import FIRST_EVALUATION_GROUP, _run
from megarl.rollout.fleet import changing
from megarl.rollout.fleet.owners import GroupOwners
from megarl.rollout.fleet.states import EngineState, EngineStates
from megarl.types import Prompt, Sampling
from tests.rollout.test_begun_groups import equal, partial
from tests.support.elastic_engines import ElasticEngines

MEMBERS = [(engine, process) for engine in range(3) for process in range(2)]
STATE_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["die", "end", "restart", "load", "update", "want", "change", "machine", "left"]),
        st.integers(0, 4),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STATE_EVENTS)
def test_states_of_engines_that_join_and_leave(events: list[tuple[str, int]]) -> None:
    states = EngineStates(3)
    has_weights, ended = {(0, 0), (1, 0), (2, 0)}, set[tuple[int, int]]()
    deaths = 0
    for event, number in events:
        engine = number % states.count
        member = engine, states.process(engine)
        if event == "die":
            was_leaving = states.state(engine) is EngineState.LEAVING
            died = states.die(engine)
            assert not (died and was_leaving)
            deaths += died
        elif event == "end" and not states.is_dead(engine):
            states.end(engine)
        elif event == "restart" and engine in states.due:
            states.restart(engine)
            assert (engine, states.process(engine)) not in ended, "the number of a process is never used again"
        elif event == "load" and engine in states.starting:
            states.load(engine)
        elif event == "update":
            has_weights |= set(states.members)
            states.update(states.members)
        elif event == "want":
            states.wanted = 1 + number
        elif event == "change":
            for each in states.surplus():
                states.leave(each)
            for _ in range(states.missing()):
                assert states.is_dead(states.add())
            returning = sum(states._engines[each].returns for each in states.leaving)
            assert max(0, states.wanted - returning) <= len(states.staying) <= states.wanted
        elif event == "machine" and not states.is_dead(engine):
            states.leave(engine, returns=True)
        elif event == "left" and engine in states.leaving:
            states.left(engine)
            assert states.has_left(member)
        if states.is_dead(engine):
            ended.add(member)
        assert not set(states.serving) & set(states.leaving)
        assert {(each, states.process(each)) for each in states.serving} <= has_weights
        assert {each for each, _ in states.members} == {*states.serving, *states.leaving} | {
            each for each in range(states.count) if states.state(each) is EngineState.LOADED
        }
        assert states.deaths == deaths == sum(states.deaths_of(each) for each in range(states.count))


def test_engines_that_do_not_sample_leave_first() -> None:
    states = EngineStates(4)
    states.die(1)
    states.die(2)
    states.restart(2)
    states.wanted = 1
    assert states.surplus() == [1, 2, 3], "dead, starting, then the newest that samples"
    assert [states.leave(engine) for engine in states.surplus()] == [False, False, True]
    assert states.members == [(0, 0), (3, 0)] and states.serving == [0]
    states.left(3)
    states.wanted = 3
    assert [states.add() for _ in range(states.missing())] == [1, 2], "their names are used again"


OWNER_EVENTS = st.lists(
    st.tuples(st.sampled_from(["start", "arrive", "lose", "restart", "move", "end_move"]), st.integers(0, 40)),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(OWNER_EVENTS)
def test_each_group_has_one_owner_or_is_lost_and_arrives_once(events: list[tuple[str, int]]) -> None:
    owners, started, arrived = GroupOwners(), 0, Counter[int]()
    sampled: dict[int, set[tuple[int, int]]] = {}  # every process that was given the group, and may still return it
    lost: set[int] = set()
    moving: dict[int, list[int]] = {}
    for event, number in events:
        member, group = MEMBERS[number % len(MEMBERS)], number % max(started, 1)
        if event == "start":
            owners.give([started], member)
            sampled[started] = {member}
            started += 1
        elif event == "arrive":  # results of all processes that were given the group: only the owner's counts
            for each in sampled.get(group, set()):
                if owners.owns(group, each):
                    owners.arrive(group)
                    arrived[group] += 1
        elif event == "lose":
            for lost_group in owners.of(member[0]):
                owners.lose(lost_group)
                lost.add(lost_group)
        elif event == "restart":
            taken = owners.take_lost()
            assert sorted(taken) == sorted(lost), "each lost group is given again once"
            owners.give(taken, member)
            for each in taken:
                sampled[each].add(member)
            lost = set()
        elif event == "move" and member[0] not in moving:
            moving[member[0]] = owners.begin_move(member[0])
            assert owners.hold(member[0], group, RuntimeError()) and owners.moving
        elif event == "end_move" and member[0] in moving:
            assert set(owners.end_move(member[0])) <= set(range(max(started, 1)))
            for each in set(moving.pop(member[0])) & set(owners.of(member[0])):
                owners.lose(each)
                lost.add(each)
        owned = [group for engine in range(3) for group in owners.of(engine)]
        assert sorted([*owned, *lost, *arrived]) == list(range(started)) and set(arrived.values()) <= {1}
        assert sum(owners.counts().values()) == len(owned) and owners.lost == bool(lost)


SOURCE_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["finish", "finish", "finish", "step", "want", "machine", "die", "check", "load"]),
        st.integers(0, 60),
    ),
    max_size=70,
)


@settings(max_examples=80, deadline=None)
@given(SOURCE_EVENTS, st.sampled_from(["refresh", "keep", "drain"]))
def test_each_admitted_group_is_trained_once(events: list[tuple[str, int]], rule: str) -> None:
    """Whatever joins, leaves and dies: a group is in one batch, or it runs on one engine, or it waits for one."""
    engines = ElasticEngines(3, at_update=rule)
    source, fleet, trained, version, deaths = engines.source, engines.fleet, list[int](), 0, 0
    source.admit(0)
    for event, number in events:
        engine = number % len(engines.services)
        service = engines.services[engine]
        if event == "finish" and service.running and service.dead is None:
            service.finish(sorted(service.running)[number % len(service.running)])
        elif event == "step" and source.admission.closed and version < 8:
            if rule == "drain" and not source.admission.idle():
                continue
            version += 1
            trained += engines.step(version)
        elif event == "want":
            fleet.set_wanted(1 + number % 4)
        elif event == "machine":
            fleet.leave_machine([engine], 60.0)
        elif event == "die" and deaths < 2 and set(fleet.serving) - {engine, *fleet._leave_by} and service.dead is None:
            deaths += not fleet.states.is_dead(engine)
            service.die()
        elif event == "check":
            engines.check()
        elif event == "load":
            engines.load_all()
        assert source._error is None
        owners, admission = source.moves.owners, source.admission
        waiting = [item.group.number for item in [*admission.tried, *admission.waiting()]]
        waiting += [item.group.number for closed in admission.closed for item in closed]
        owned = [group for index in range(len(engines.services)) for group in owners.of(index)]
        everything = sorted([*trained, *waiting, *owned, *owners._lost])
        assert everything == list(range(admission.state.admitted)), "no group is lost or doubled"
        for index, each in enumerate(engines.services):
            assert set(owners.of(index)) <= set(each.running), "its owner samples it"
        assert not owners.lost or not fleet.serving
    assert fleet.take_metrics()["fleet/deaths"] <= deaths


def test_an_engine_joins_at_an_update() -> None:
    engines = ElasticEngines(2)
    source, fleet = engines.source, engines.fleet
    source.admit(0)
    fleet.set_wanted(3)
    fleet.poll()
    assert engines.restarts == [2] and fleet.serving == [0, 1] and fleet.members() == [(0, 0), (1, 0)]
    assert engines.notices == ["2 -> 3 engines wanted", "engine2 starts"] and engines.events[0] == "engines"
    engines.load_all()
    assert fleet.members() == [(0, 0), (1, 0), (2, 0)] and fleet.descriptions[2] == {"receivers": "new"}
    engines.services[0].finish(0, 2)
    engines.services[1].finish(1, 3)
    assert engines.running()[2] == [], "it has no weights"
    assert sorted(engines.step(1)) == [0, 1, 2, 3]
    assert engines.running()[2] == [8, 9] and engines.all_running() == list(range(4, 12))
    figures = {"serving": 3, "starting": 0, "leaving": 0, "wanted": 3, "deaths": 0, "sampled_again": 0}
    assert fleet.take_metrics() == {f"fleet/{name}": float(value) for name, value in figures.items()}


def test_samples_of_a_leaving_engine_are_continued() -> None:
    engines = ElasticEngines(3)
    source, leaving = engines.source, engines.services[2]
    source.admit(0)
    assert engines.running() == [[0, 3, 6], [1, 4, 7], [2, 5]]
    leaving.partials, leaving.scoring = {2: (partial(4), partial(6))}, {5}
    engines.fleet.set_wanted(2)
    engines.check()
    assert engines.running() == [[0, 2, 3, 6], [1, 4, 7], [5]] and engines.ended == [], "group 5 is being scored"
    assert equal(engines.services[0].requests[2].partials, leaving.partials[2])
    leaving.finish(5)
    engines.check()
    assert engines.ended == [2] and leaving.hand_overs == 1 and engines.notices[-1] == "engine2 has left"
    assert engines.notices[1] == "engine2 leaves: fewer engines are wanted"
    engines.services[0].finish(0, 2, 3)
    engines.services[1].finish(1)
    assert engines.step(1) == [5, 0, 2, 3], "in the order of their arrival"
    assert leaving.running == {} and engines.all_running() == [4, *range(6, 12)]
    engines.fleet.set_wanted(3)
    engines.check()
    assert engines.restarts == [2] and engines.fleet.take_metrics()["fleet/deaths"] == 0


def test_with_drain_a_leaving_engine_finishes_its_groups() -> None:
    """Continued samples would have other tokens than those of a run whose engines stay."""
    engines = ElasticEngines(2, at_update="drain")
    engines.source.admit(0)
    engines.fleet.set_wanted(1)
    engines.check()
    assert engines.running() == [[0, 2, 4, 6], [1, 3, 5, 7]] and engines.services[1].hand_overs == 0
    assert engines.fleet.take_metrics()["fleet/leaving"] == 1
    engines.services[0].finish(0, 2, 4, 6)
    engines.services[1].finish(1, 3, 5, 7)
    assert engines.step(1) == [0, 1, 2, 3] and engines.running() == [[8, 9, 10, 11], []]
    assert engines.ended == [1], "before the update"


def test_with_drain_groups_of_a_machine_that_ends_are_sampled_again() -> None:
    """From the same seeds. Its engine starts on another machine, and nothing counts as a death."""
    engines = ElasticEngines(2, at_update="drain")
    engines.source.admit(0)
    seeds = {number: request.seed for number, request in engines.services[1].requests.items()}
    for _ in range(4):  # more often than engines may die with the same group
        assert engines.fleet.leave_machine([1], 60.0) is None
        assert engines.fleet.leave_machine([1], 60.0) is None, "the launcher asks again until it has left"
        engines.check()
        assert engines.running() == [list(range(8)), []]
        engines.load_all()
        engines.update()
        engines.source.moves.release_engines()
    assert {number: engines.services[0].requests[number].seed for number in seeds} == seeds
    assert engines.ended == [1] * 4 == engines.restarts and engines.fleet.serving == [0, 1]
    metrics = engines.fleet.take_metrics()
    assert metrics["fleet/deaths"] == 0 and metrics["fleet/wanted"] == 2 and metrics["fleet/sampled_again"] == 4
    assert engines.notices[:2] == ["engine1 leaves: its machine ends", "engine1 has left"]


def test_a_machine_of_too_many_engines_cannot_leave() -> None:
    engines = ElasticEngines(3, least=2)
    text = "1 engine would be left that sample, and rollout.min_engines is 2"
    assert engines.fleet.leave_machine([1, 2], 60.0) == text
    assert engines.fleet.leave_machine([2], 60.0) is None and engines.fleet.leave_machine([1], 60.0) == text


def test_an_engine_that_restarts_in_an_aborted_update_has_left_its_machine() -> None:
    """It starts on another machine, so that nothing else follows from the end of the first."""
    engines = ElasticEngines(2)
    with engines.fleet.update():
        assert engines.fleet.leave_machine([1], 60.0) is None
        engines.services[1].die()
        engines.check()
        engines.load_all()
        engines.fleet.updated(engines.fleet.members())
    engines.check()
    assert engines.fleet.serving == [0, 1] and engines.ended == [] and engines.fleet.leaving() == []


def test_an_engine_ends_with_its_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is scored for longer than the machine lives: another engine samples it again."""
    now = time.monotonic()
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[1].scoring = {3}
    engines.fleet.leave_machine([1], 60.0)
    engines.check()
    assert engines.running()[1] == [3] and engines.ended == []
    monkeypatch.setattr(changing.time, "monotonic", lambda: now + 61)
    engines.check()
    assert engines.ended == [1] and engines.running()[0] == list(range(8))
    assert engines.fleet.take_metrics()["fleet/deaths"] == 0


def test_a_leaving_engine_that_dies_has_left() -> None:
    engines = ElasticEngines(2, at_update="drain")
    engines.source.admit(0)
    engines.fleet.set_wanted(1)
    engines.check()
    engines.services[1].die()
    engines.check()
    assert engines.running()[0] == list(range(8)) and engines.ended == [1] and engines.restarts == []
    assert engines.fleet.take_metrics()["fleet/deaths"] == 0 and "death" not in engines.events


def test_an_update_waits_for_engines_that_hand_groups_over() -> None:
    """Otherwise they would go to engines whose weights change meanwhile."""
    engines = ElasticEngines(2)
    engines.source.admit(0)
    leaving = engines.services[1]
    leaving.silent = True
    engines.fleet.set_wanted(1)
    engines.check()
    threading.Timer(0.2, leaving.reply).start()
    engines.source.drain()
    assert engines.running() == [list(range(8)), []]
    with engines.fleet.update():
        engines.source.moves.release_engines()
        assert engines.ended == [] and engines.fleet.members() == [(0, 0), (1, 0)], "none leaves in an update"
    engines.check()
    assert engines.ended == [1]


def test_an_engine_that_dies_while_it_hands_groups_over() -> None:
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[1].silent = True
    engines.fleet.set_wanted(1)
    engines.check()
    engines.services[1].die()
    engines.source.drain()
    assert engines.running()[0] == list(range(8)) and engines.source._error is None


@pytest.mark.parametrize("machine_ends", [True, False])
def test_engines_leave_an_evaluation_only_with_their_machine(machine_ends: bool) -> None:
    engines = ElasticEngines(2)
    problems = [Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(4)]
    first, second = engines.services

    def play() -> None:
        """Another thread plays the engines; checks run in the thread of the evaluation, as the controller's."""
        while len(first.running) < 2:
            time.sleep(0.01)
        engines.fleet.leave_machine([1], 60.0) if machine_ends else engines.fleet.set_wanted(1)
        time.sleep(1.5)
        assert engines.ended == ([1] if machine_ends else [])
        while first.running or second.running:
            for service in (first, second):
                service.finish(*list(service.running))
            time.sleep(0.3)

    player = threading.Thread(target=play)
    player.start()
    groups = _run(problems, Sampling(n=1, max_tokens=8), engines.sampling, engines.check, 20.0, engines.fleet)
    player.join()
    assert [group.number for group in groups] == [FIRST_EVALUATION_GROUP + number for number in range(4)]
    engines.check()
    assert engines.ended == [1]


def test_a_further_engine_waits_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job has taken them since the request: the engine waits, and the ones behind it, too."""
    from megarl.cluster.failures import MachineLost

    engines = ElasticEngines(2)
    started: Any = engines.fleet._restart

    def restart(engine: int) -> None:
        raise MachineLost("no machine of the Ray cluster has 1 free NPU")

    engines.fleet._restart = restart
    engines.fleet.set_wanted(4)
    engines.fleet.poll()
    engines.fleet.poll()
    waits = [notice for notice in engines.notices if "waits" in notice]
    assert waits[0] == "engine2 waits for a machine: no machine of the Ray cluster has 1 free NPU" and len(waits) == 2
    assert engines.fleet.take_metrics()["fleet/starting"] == 2
    engines.fleet._restart = started
    engines.fleet._no_machine_until = dict.fromkeys((2, 3), 0.0)
    engines.fleet.poll()
    engines.fleet.poll()
    assert engines.restarts == [2, 3]
    engines.fleet.set_wanted(2)
    engines.fleet.poll()
    assert sorted(engines.ended) == [2, 3], "engines that load leave at once"
