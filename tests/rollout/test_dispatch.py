"""The engine of each group; with `rollout.at_update: finish`, the turns in which engines load new weights."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.admission import Admission
from megarl.rollout.dispatch import Dispatch, Finishing
from megarl.types import Group


def finishing(engines: int, *, max_staleness: float = 1, groups: int = 100) -> Dispatch:
    dispatch = Dispatch(engines, Finishing(max_staleness, groups))
    dispatch.add_version(0)
    return dispatch


def test_groups_go_to_the_engine_with_the_fewest() -> None:
    dispatch = Dispatch(3)
    dispatch.add_version(0)
    assert dispatch.start(lambda _: 7) == [0, 1, 2, 0, 1, 2, 0] and dispatch.idle == 0
    dispatch.remove(1)
    dispatch.remove(1)
    assert dispatch.idle == 1 and dispatch.start(lambda _: 2) == [1, 1]
    assert dispatch.take_due_loads() == [], "engines load new weights as they arrive"


class CountedList(list[Any]):
    """Counts how often it is iterated."""

    iterations = 0

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        return super().__iter__()


def test_arrival_of_a_group_visits_no_other_engine() -> None:
    """The controller's time per group then does not grow with the engines."""
    dispatch = Dispatch(128)
    dispatch.add_version(0)
    started = dispatch.start(lambda _: 1000)
    engines = dispatch._engines = CountedList(dispatch._engines)
    for engine in started:
        dispatch.remove(engine)
        assert dispatch.start_again(0) == dispatch.start(lambda _: 0) == dispatch.take_due_loads() == []
    assert (dispatch.idle, dispatch.open) == (128, 128) and not engines.iterations
    dispatch.start(lambda _: 1)
    assert engines.iterations, "starts choose among all engines"


@given(st.integers(0, 10_000))
def test_idle_and_open_engines_are_counted(seed: int) -> None:
    rng, dispatch = random.Random(seed), Dispatch(4)
    dispatch.add_version(0)
    loads, is_open = [0] * 4, [True] * 4
    for _ in range(30):
        action = rng.choice(["start", "start_again", "remove", "close", "open_only"])
        if action == "start":
            started = dispatch.start(lambda _: rng.choice([0, 1, 5]))
        elif action == "start_again":
            started = dispatch.start_again(rng.randrange(3))
        else:
            started = []
        for engine in started:
            loads[engine] += 1
        busy = [engine for engine in range(len(loads)) if loads[engine]]
        if action == "remove" and busy:
            engine = rng.choice(busy)
            loads[engine] -= 1
            dispatch.remove(engine)
        elif action == "close" and sum(is_open) > 1:
            engine = rng.choice([engine for engine in range(len(loads)) if is_open[engine]])
            is_open[engine] = False
            dispatch.close(engine)
        elif action == "open_only":
            serving = rng.sample(range(len(loads) + 1), 2)
            new = max(serving) + 1 - len(loads)
            loads += [0] * new
            is_open = [engine in serving for engine in range(len(loads))]
            dispatch.open_only(serving)
        assert dispatch.open == sum(is_open)
        assert dispatch.idle == sum(up and not load for up, load in zip(is_open, loads, strict=True))


def test_no_group_starts_before_the_first_weights() -> None:
    assert Dispatch(2).start(lambda _: 3) == []


def test_all_engines_load_the_first_weights_as_they_arrive() -> None:
    dispatch = finishing(2)
    assert not dispatch.behind and dispatch.take_due_loads() == []


def test_an_engine_loads_when_its_groups_have_finished() -> None:
    dispatch = finishing(2, max_staleness=2, groups=4)
    dispatch.start(lambda _: 2)
    dispatch.add_version(1)
    assert dispatch.take_due_loads() == [] and dispatch.behind
    assert dispatch.start(lambda _: 9) == [1], "engine 0 finishes, and engine 1 has its share"
    dispatch.remove(0)
    assert dispatch.take_due_loads() == [0] and dispatch.take_due_loads() == [], "a load is due once"
    dispatch.remove(1)
    assert dispatch.start(lambda _: 9) == [1], "engine 0 loads"
    dispatch.loaded(0, 1)
    assert dispatch.start({0: 0, 1: 1}.__getitem__) == [0]


@pytest.mark.parametrize(("engines", "staleness", "expected"), [(8, 4, 2), (8, 1, 8), (8, 0.5, 8), (2, 4, 1)])
def test_engines_finish_in_turn(engines: int, staleness: float, expected: int) -> None:
    dispatch = finishing(engines, max_staleness=staleness)
    dispatch.start(lambda _: engines)
    dispatch.add_version(1)
    started = dispatch.start(lambda _: engines)
    assert engines - len(set(started)) == expected


def test_an_engine_that_is_too_old_finishes() -> None:
    dispatch = finishing(4, max_staleness=4)
    dispatch.start(lambda _: 4)
    dispatch.add_version(1)
    assert dispatch.start(lambda _: 0) == []
    for engine in range(4):
        dispatch.remove(engine)
    assert dispatch.take_due_loads() == [0, 1, 2, 3]


def test_an_engine_takes_its_share_of_the_groups() -> None:
    """Groups are left for the engine that loads."""
    dispatch = finishing(2, max_staleness=2, groups=6)
    dispatch.add_version(1)
    assert dispatch.take_due_loads() == [0]
    assert dispatch.start(lambda _: 6) == [1, 1, 1]
    dispatch.loaded(0, 1)
    assert dispatch.start(lambda _: 3) == [0, 0, 0]


def test_weights_that_arrive_while_an_engine_loads() -> None:
    """It has loaded version 2 before the controller announces it: it must not load for ever."""
    dispatch = finishing(1)
    dispatch.add_version(1)
    assert dispatch.take_due_loads() == [0]
    dispatch.loaded(0, 2)
    assert not dispatch.behind and dispatch.take_due_loads() == []
    dispatch.add_version(2)
    assert not dispatch.behind and dispatch.start(lambda version: version) == [0, 0]


def test_all_engines_finish_for_an_evaluation() -> None:
    dispatch = finishing(3, max_staleness=4)
    dispatch.start(lambda _: 3)
    dispatch.add_version(1)
    dispatch.finish_all()
    assert dispatch.start(lambda _: 3) == []
    for engine in range(3):
        dispatch.remove(engine)
        assert dispatch.take_due_loads() == [engine]
        assert dispatch.behind
        dispatch.loaded(engine, 1)
    assert not dispatch.behind


@given(
    seed=st.integers(0, 10_000),
    engines=st.integers(1, 5),
    prompts=st.integers(1, 5),
    staleness=st.sampled_from([0.5, 1, 2, 3]),
    window=st.integers(1, 6),
    filters=st.booleans(),
)
def test_each_group_has_one_version_and_a_bounded_lag(
    seed: int, engines: int, prompts: int, staleness: float, window: int, filters: bool
) -> None:
    """Groups end and engines load in any order, also while weights arrive."""
    rng = random.Random(seed)
    admission = Admission(prompts, staleness, 1000 if filters else None, True, window=window)
    dispatch = Dispatch(engines, Finishing.of("finish", staleness, prompts))
    versions, received = [0] * engines, 0
    running: dict[int, tuple[int, int]] = {}  # group -> (engine, version)
    started: dict[int, int] = {}
    loading: set[int] = set()
    admission.version = 0
    dispatch.add_version(0)

    def start() -> None:
        chosen = dispatch.start(admission.capacity)
        for number, engine in zip(admission.start(len(chosen)), chosen, strict=True):
            assert engine not in loading
            running[number], started[number] = (engine, versions[engine]), versions[engine]
        loading.update(dispatch.take_due_loads())

    def advance() -> None:
        events = [*running, *(-1 - engine for engine in loading)]
        assert events, "nothing can happen any more"
        event = rng.choice(events)
        if event < 0:
            engine = -1 - event
            loading.remove(engine)
            versions[engine] = received
            dispatch.loaded(engine, received)
        else:
            engine, version = running.pop(event)
            assert version == versions[engine], "the weights changed while the group ran"
            dispatch.remove(engine)
            admission.finish(Group(event, "", "", []), accepted=not filters or rng.random() < 0.5)
        start()

    start()
    for version in range(8):
        while not admission.closed:
            advance()
        bound = math.ceil(staleness) + math.ceil((window - 1) / prompts)
        for item in admission.closed.popleft():
            assert not item.accepted or version - started[item.group.number] <= bound
        received = version + 1
        while rng.random() < 0.5 and (running or loading):  # the controller does not know the version yet
            advance()
        admission.version = version + 1
        dispatch.add_version(version + 1)
        start()
        if rng.random() < 0.3:
            dispatch.finish_all()
            loading.update(dispatch.take_due_loads())
            while dispatch.behind:
                advance()
            assert versions == [version + 1] * engines


def test_the_serving_engines_are_compared_with_the_last_ones() -> None:
    """The caller names them for every group; engines are closed and opened only when they change."""
    dispatch = Dispatch(3)
    dispatch.add_version(0)
    dispatch.open_only([0, 1])
    assert dispatch.open == 2
    dispatch.close(1)
    dispatch.open_only([0, 1])  # engine 1 serves again
    assert dispatch.open == 2
    dispatch.open_only([0, 1, 2, 3])
    assert dispatch.open == 4
