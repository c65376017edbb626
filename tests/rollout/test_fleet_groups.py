"""Groups of engines (`rollout.data_parallel`) of which one dies: the engines of a group end, start, load and serve together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.failures import MachineLost, TooFewEngines
from megarl.engines.base import GroupRank
from megarl.rollout.fleet import fleet as fleet_module
from megarl.rollout.fleet.groups import EngineGroups
from megarl.rollout.fleet.states import MOST_STARTS
from tests.support.dying_engines import Engines, source_of


@given(st.integers(1, 4), st.sets(st.integers(0, 15)))
def test_whole_groups(size: int, engines: set[int]) -> None:
    groups = EngineGroups(size)
    whole = groups.whole(engines)
    assert set(whole) == {each for each in engines if set(groups.of(each)) <= engines} and whole == sorted(whole)
    assert [engine for group in groups.split(engines) for engine in group] == whole
    assert all(len(group) == size and group[0] % size == 0 for group in groups.split(engines))


def four() -> Engines:
    """Two groups of two engines."""
    return Engines(count=4, least=2, group_size=2)


def load(engines: Engines, *members: int) -> None:
    """Let new processes finish their start."""
    for engine in members:
        engines.load(engine)


def test_the_engines_of_a_group_end_and_start_again_together() -> None:
    engines = four()
    peer = engines.services[0]
    engines.services[1].die()
    engines.fleet._find_deaths()
    assert engines.fleet.serving == [2, 3], "no group goes to the peer, which waits for the dead engine"
    assert engines.fleet.members() == [(2, 0), (3, 0)], "an update with the peer would wait for the dead engine"
    engines.fleet.poll()
    assert engines.restarts == [0, 1] and engines.services[0] is not peer
    assert "2 engines left that sample" in engines.notices[0]
    assert engines.notices[1] == "engine0 ends with engine1, of the same group"
    assert engines.fleet.take_metrics()["fleet/deaths"] == 1, "the peer was ended, and has not died"
    engines.services[0].rendezvous.set_result(GroupRank("10.0.0.0", 7))
    engines.load(0)
    engines.update()
    assert engines.fleet.serving == [2, 3] and engines.fleet.members() == [(2, 0), (3, 0)], "engine1 loads"
    engines.load(1)
    assert engines.fleet.members() == [(0, 1), (1, 1), (2, 0), (3, 0)]
    engines.update()
    assert engines.fleet.serving == [0, 1, 2, 3]


def test_new_processes_start_with_their_ranks_once_the_first_has_opened_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, started = four(), list[tuple[str, Any]]()
    engines.services[2].die()
    engines.fleet.poll()
    for service in engines.services[2:]:
        call = service.call
        monkeypatch.setattr(
            service,
            "call",
            lambda method, *args, name=service.name, call=call: started.append((name, args)) or call(method, *args),
        )
    assert started == []
    engines.services[2].rendezvous.set_result(GroupRank("10.0.0.2", 7))
    assert started == [
        ("engine2", (GroupRank("10.0.0.2", 7, 0, 2),)),
        ("engine3", (GroupRank("10.0.0.2", 7, 1, 2),)),
    ]


def test_the_groups_of_samples_of_both_engines_go_elsewhere() -> None:
    engines = four()
    source = source_of(engines)
    source.admit(0)
    on_the_group = {*engines.services[0].running, *engines.services[1].running}
    assert on_the_group
    engines.services[1].die()
    engines.fleet.poll()
    assert on_the_group <= {*engines.services[2].running, *engines.services[3].running}


def test_a_peer_that_dies_while_it_loads_restarts_the_group() -> None:
    engines = four()
    engines.services[1].die()
    engines.fleet.poll()
    engines.services[0].rendezvous.set_result(GroupRank("10.0.0.0", 7))
    engines.load(1)
    engines.services[0].die()
    engines.fleet.poll()
    assert engines.restarts == [0, 1, 0, 1], "engine1 has loaded, and waits for its group"
    assert engines.fleet.members() == [(2, 0), (3, 0)]


def test_a_group_whose_engine_dies_too_often_stays_dead_and_no_process_of_it_is_left() -> None:
    engines = four()
    for _ in range(MOST_STARTS + 1):
        engines.services[1].die()
        engines.fleet.poll()
    assert engines.restarts == [0, 1] * MOST_STARTS
    given_up = [text for text, event in zip(engines.notices, engines.events, strict=True) if event == "given_up"]
    assert len(given_up) == 1 and given_up[0].endswith("A restart of the run starts it again."), (
        "`megarl engines` is refused"
    )
    assert engines.services[0].stopping, "it holds its device, and calls to it would wait for ever"
    engines.services[2].die()
    with pytest.raises(TooFewEngines, match=r"rollout\.min_engines = 2"):
        engines.fleet.poll()


def test_a_group_waits_for_the_machine_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, machines = four(), list[str]()
    started = engines.restart

    def restart(engine: int) -> None:
        if engine == 1 and not machines:
            raise MachineLost("no machine has 1 NPU")
        started(engine)

    monkeypatch.setattr(engines.fleet, "_restart", restart)
    monkeypatch.setattr(fleet_module, "MACHINE_SECONDS", 0.0)
    engines.services[1].die()
    for _ in range(MOST_STARTS + 2):
        engines.fleet.poll()
    assert engines.notices[2:] == [
        "engine0 restarts",
        "engine1 restarts",
        "engine1 waits for a machine: no machine has 1 NPU",
    ]
    machines.append("host")
    engines.fleet.poll()
    engines.services[0].rendezvous.set_result(GroupRank("10.0.0.0", 7))
    load(engines, 0, 1)
    engines.update()
    assert engines.fleet.serving == [0, 1, 2, 3]
