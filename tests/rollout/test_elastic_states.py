"""States of engines that join and leave, and owners of groups: pure state machines."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.fleet.departures import Departures
from megarl.rollout.fleet.owners import GroupOwners
from megarl.rollout.fleet.states import EngineState, EngineStates

MEMBERS = [(engine, process) for engine in range(3) for process in range(2)]
STATE_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["die", "end", "restart", "load", "update", "want", "change", "machine", "remove"]),
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
        elif event == "remove" and engine in states.leaving:
            states.remove(engine)
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
    states.remove(3)
    states.wanted = 3
    assert [states.add() for _ in range(states.missing())] == [1, 2], "their names are used again"


def test_departures_keep_nothing_of_engines_that_have_left() -> None:
    states = EngineStates(3)
    departures = Departures(states)
    for deadline in (9.0, 5.0, 7.0):
        departures.end_machine(1, deadline)
    assert (
        departures.on_ending_machines() == [1] and not departures.is_overdue(1, 5.0) and departures.is_overdue(1, 5.1)
    )
    for engine, returns in ((1, True), (2, False)):
        states.leave(engine, returns=returns)
    assert departures.can_stay() == [2]
    assert departures.begin_handover((2, 0), 1.0) and departures.begin_handover((1, 0), 2.0)
    assert not departures.begin_handover((2, 0), 3.0) and departures.can_stay() == []
    assert departures.silent_since(1.0) == [] and departures.silent_since(1.5) == [2]
    departures.end_handover((2, 0))
    assert departures.silent_since(9.0) == [1]
    for engine in (1, 2):
        states.remove(engine)
        departures.remove(engine)
    departures.end_handover((1, 0))  # a late reply
    assert departures._deadlines == {} and departures._handovers == {}
    states.restart(1)
    assert departures.on_ending_machines() == [], "its new process is on another machine"


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
            lost_groups = owners.take_lost()
            assert sorted(lost_groups) == sorted(lost), "each lost group is given again once"
            owners.give(lost_groups, member)
            for each in lost_groups:
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
