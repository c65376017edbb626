"""Engines that join and leave while the run goes on: no group is lost or trained twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.failures import TooFewEngines
from megarl.rollout.evaluate import FIRST_EVALUATION_GROUP, _run
from megarl.rollout.fleet import changing
from megarl.types import Prompt, Sampling
from tests.rollout.test_begun_groups import equal, partial
from tests.support.elastic_engines import ElasticEngines

SOURCE_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["finish", "finish", "finish", "step", "want", "machine", "die", "check", "load", "lose"]),
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
        elif (
            event == "die"
            and deaths < 2
            and set(fleet.serving) - {engine, *fleet._departures.on_ending_machines()}
            and service.dead is None
        ):
            deaths += not fleet.states.is_dead(engine)
            service.die()
        elif event == "check":
            engines.check()
        elif event == "load":
            engines.load_all()
        elif event == "lose":
            engines.lose(*engines.finished()[number % 5 :])
            engines.check()
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
    """Continued samples would have other tokens than in a run with a fixed set of engines."""
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
    text = "only 1 engine would keep sampling, and rollout.min_engines is 2"
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


@pytest.mark.parametrize("notices", [[60.0], [90.0, 60.0], [60.0, 90.0]])
def test_an_engine_ends_with_its_grace_time(monkeypatch: pytest.MonkeyPatch, notices: list[float]) -> None:
    """A group is scored for longer than the machine lives: another engine samples it again. The earliest notice counts."""
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[1].scoring = {3}
    for seconds in notices:
        assert engines.fleet.leave_machine([1], seconds) is None
    engines.check()
    assert engines.running()[1] == [3] and engines.ended == []
    now = time.monotonic()
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


def test_a_leaving_engine_stays_if_another_one_dies() -> None:
    """Otherwise too few would be left. The dead one leaves in its place."""
    engines = ElasticEngines(3, least=2, at_update="drain")
    engines.source.admit(0)
    engines.fleet.set_wanted(2)
    engines.check()
    assert engines.fleet.serving == [0, 1] and engines.running()[2] == [2, 5]
    engines.services[0].die()
    engines.check()
    assert engines.fleet.serving == [1, 2] and engines.source._error is None and engines.restarts == []
    assert engines.all_running() == list(range(8)) and engines.ended == [0] and engines.fleet.wanted == 2
    engines.services[1].die()
    with pytest.raises(TooFewEngines):
        engines.check()


def test_a_leaving_engine_stays_if_the_machine_of_another_one_ends() -> None:
    engines = ElasticEngines(3, least=2, at_update="drain")
    engines.source.admit(0)
    engines.fleet.set_wanted(2)
    engines.check()
    assert "only 1 engine would keep sampling" in str(engines.fleet.leave_machine([1, 2], 60.0))
    assert engines.fleet.leave_machine([1], 60.0) is None
    engines.check()
    assert engines.fleet.serving == [0, 2] and set(engines.ended) == {1}


def test_an_engine_that_hands_groups_over_does_not_stay() -> None:
    engines = ElasticEngines(3, least=2)
    engines.source.admit(0)
    engines.services[2].silent = True
    engines.fleet.set_wanted(2)
    engines.check()
    engines.fleet.set_wanted(3)
    engines.fleet.poll()
    assert [leaver.engine for leaver in engines.fleet.leaving()] == [2] and engines.restarts == [3]
    engines.services[0].die()
    with pytest.raises(TooFewEngines):
        engines.check()


def test_an_update_waits_for_engines_that_hand_groups_over() -> None:
    """Otherwise they would go to engines while their weights change."""
    engines = ElasticEngines(2)
    engines.source.admit(0)
    leaving = engines.services[1]
    leaving.silent = True
    engines.fleet.set_wanted(1)
    engines.check()
    threading.Timer(0.2, leaving.reply).start()
    engines.source.drain()
    assert engines.running() == [list(range(8)), []] and engines.ended == [1]


def test_an_engine_that_does_not_hand_its_groups_over_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update would wait for it forever. The others sample its groups from their start."""
    monkeypatch.setattr(changing, "HAND_OVER_SECONDS", 0.1)
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[1].silent = True
    engines.fleet.set_wanted(1)
    engines.check()
    engines.source.drain()
    assert engines.running()[0] == list(range(8)) and engines.ended == [1] and engines.source._error is None
    assert "engine1 has not handed its groups over within 0.1 s: other engines resample them" in engines.notices
    figures = engines.fleet.take_metrics()
    assert figures["fleet/deaths"] == 0 and figures["fleet/sampled_again"] == 4


def test_an_engine_that_has_replied_may_score_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "HAND_OVER_SECONDS", 0.0)
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[1].scoring = {3}
    engines.fleet.set_wanted(1)
    engines.check()
    time.sleep(0.01)
    engines.check()
    assert engines.ended == [] and engines.running()[1] == [3]


def test_no_engine_leaves_in_an_update() -> None:
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[1].scoring = {3}
    engines.fleet.set_wanted(1)
    engines.check()
    engines.source.drain()
    with engines.fleet.update():
        assert engines.fleet.members() == [(0, 0), (1, 0)], "it still has a group"
        engines.services[1].finish(3)
        engines.source.moves.release_engines()
        assert engines.ended == []
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


@pytest.mark.parametrize("machine_ends", [True, False])
def test_an_engine_that_keeps_its_groups_in_an_evaluation(monkeypatch: pytest.MonkeyPatch, machine_ends: bool) -> None:
    """It samples for the evaluation, and no update waits for it: it is ended afterwards, unless its machine ends."""
    monkeypatch.setattr(changing, "HAND_OVER_SECONDS", 0.0)
    engines = ElasticEngines(2)
    engines.source.admit(0)
    leaving = engines.services[1]
    leaving.silent = True
    with engines.fleet.evaluation():
        engines.fleet.leave_machine([1], 60.0) if machine_ends else engines.fleet.set_wanted(1)
        engines.check()
        engines.check()
        assert leaving.hand_overs == 1 and engines.ended == ([1] if machine_ends else [])
    engines.check()
    assert engines.ended == [1] and engines.running()[0] == list(range(8))


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
