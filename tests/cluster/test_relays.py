"""Calls through relays have the results and failures of direct calls."""

import os
import signal
import time

import pytest

from megarl.cluster import WorkerFailed
from tests.support.cluster_workers import alive, wait_until
from tests.support.slow import slow_except

pytestmark = pytest.mark.stack


@pytest.fixture
def start(connect, monkeypatch):
    """Start three ranks with two relays: of ranks 0 and 1, and of rank 2."""
    from megarl.cluster.ray import relay

    monkeypatch.setattr(relay, "DIRECT_RANKS", 2)
    monkeypatch.setattr(relay, "RANKS", 2)

    def start(worker, **options):
        cluster = connect(3)
        group = cluster.start_trainers(f"tests.support.cluster_workers:{worker}", 3, (), **options)
        return cluster, group, [identity[1] for identity in group.call("identify")]

    return start


def relay_pids(group):
    import ray

    from megarl.cluster.ray.relay import RankRelay

    relays: list[RankRelay] = group._relays._relays
    assert [relay.ranks for relay in relays] == [[0, 1], [2]]
    return ray.get([relay.actor.__ray_call__.remote(lambda _: os.getpid()) for relay in relays])


@pytest.mark.slow
def test_results_by_rank_and_ends(start):
    cluster, group, pids = start("Echo")
    relays = relay_pids(group)
    both = ("both",)
    assert group.scatter("echo", [both, ("one",), both]) == [(0, "both"), (1, "one"), (2, "both")]
    _, (word, (refs,)), _ = group.scatter_with_data("give", [None, ([[5]],), None], parts=1)
    assert word == "from 1" and group.call("total", [refs]) == [5.0] * 3
    assert group.scatter("total", [([refs],)] * 3) == [5.0] * 3
    for _ in range(3):
        cluster.check()
    assert relay_pids(group) == relays, "relays serve all calls"
    group.shutdown()
    assert wait_until(lambda: not any(map(alive, pids + relays)), 5)


@pytest.mark.parametrize(
    ("worker", "method", "arguments", "message"),
    slow_except(
        lambda item: item[1] == "die_in_collective",
        [
            (
                "Reducer",
                "die_in_collective",
                (1,),
                r"trainer rank 1 on .* \(pid \d+\) died: its process ended without a",
            ),
            (
                "Reducer",
                "raise_in_collective",
                (2,),
                r"trainer rank 2 on .* failed: ValueError: this rank has had enough",
            ),
            ("Echo", "raise_on", (0, "no luck"), r"trainer rank 0 on .* failed: ValueError: no luck"),
            ("Echo", "raise_everywhere", (), r"ValueError: all(.|\n)*2 other ranks failed alike"),
        ],
    ),
)
def test_the_rank_that_failed_is_named_within_seconds(start, worker, method, arguments, message):
    _, group, pids = start(worker)
    relays = relay_pids(group)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=message):
        group.call(method, *arguments)
    assert time.monotonic() - began < 8
    assert wait_until(lambda: not any(map(alive, pids + relays)), 5)


@pytest.mark.slow
def test_a_rank_that_dies_while_the_others_compute_is_named_at_once(start):
    _, group, pids = start("Echo")
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=rf"trainer rank 1 on .* \(pid {pids[1]}\) died"):
        group.scatter("sleep_or_die", [(60.0, False), (0.5, True), (60.0, False)])
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_an_idle_rank_that_dies_is_named(start):
    cluster, group, pids = start("Echo", essential=False)
    cluster.check()
    os.kill(pids[2], signal.SIGKILL)
    assert wait_until(lambda: cluster.check() or group.failure is not None, 3)
    assert f"trainer rank 2 on {group.failure.failure.place.host} (pid {pids[2]}) died" in str(group.failure)
    cluster.end_trainers()
    assert not any(map(alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize("idle", [True, False])
def test_a_relay_that_dies_is_named(start, idle):
    cluster, group, pids = start("Echo")
    relays = relay_pids(group)
    os.kill(relays[0], signal.SIGKILL)
    with pytest.raises(
        WorkerFailed, match=rf"relay of trainer ranks 0-1 on .* \(pid {relays[0]}\) died: its process ended"
    ):
        for _ in range(10):
            if idle:
                cluster.check()
                time.sleep(0.2)
            else:
                group.call("identify")
    assert wait_until(lambda: not any(map(alive, pids + relays)), 5)


@pytest.mark.slow
def test_a_rank_that_dies_with_its_relay_is_named(start):
    """The loss of a machine ends all its processes."""
    _, group, pids = start("Echo")
    relays = relay_pids(group)
    os.kill(relays[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=rf"trainer rank 1 on .* \(pid {pids[1]}\) died"):
        group.call("sleep", 1.0)


@pytest.mark.slow
def test_a_relay_that_is_stopped_is_named(start, monkeypatch):
    from megarl.cluster import sigstop_watch

    monkeypatch.setattr(sigstop_watch, "LOOK_SECONDS", 0.3)
    _, group, pids = start("Echo")
    relays = relay_pids(group)
    os.kill(relays[1], signal.SIGSTOP)
    with pytest.raises(
        WorkerFailed, match=rf"relay of trainer rank 2 on .* \(pid {relays[1]}\) failed: .* stopped for 3 s"
    ):
        group.call("identify")
    assert wait_until(lambda: not any(map(alive, pids + relays)), 5)
