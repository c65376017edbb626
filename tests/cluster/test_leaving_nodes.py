"""A node may leave a Ray cluster if the run can go on without it. See `test_lost_machines` for a cluster that really shrinks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.device_map import Demand
from megarl.cluster.ray import env as ray_env

ray_env.prepare(private=True)

from megarl.cluster.ray import cluster as ray_cluster  # noqa: E402 -- after the variables that Ray reads at import
from megarl.cluster.ray.devices import RayDevices, ReservedDevice  # noqa: E402
from megarl.cluster.ray.stored_data import StoredData  # noqa: E402


def agree(services: list[Any]) -> None:
    """No engine is needed."""


def service(name: str, node: str, *, alive: bool = True, essential: bool = False) -> Any:
    return SimpleNamespace(name=name, node=node, alive=lambda: alive, essential=essential)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trainers on node0, a critic on node1, two engines on node2, of which one has died, and a teacher and an engine on node3."""
    devices = RayDevices("NPU", "", Demand(1, 1))
    devices.trainers, devices._critics = [ReservedDevice("node0", "10.0.0.1")], [ReservedDevice("node1", "10.0.0.2")]
    result = ray_cluster.RayCluster.__new__(ray_cluster.RayCluster)
    result._devices, result._groups = devices, []  # its trainers restart now
    result._stored = StoredData()
    result._services = [service("engine0", "node2"), service("engine1", "node2", alive=False)]
    result._services += [service("teacher0", "node3", essential=True), service("engine2", "node3")]
    nodes = {ray_cluster.node_resource(rank): f"node{rank}" for rank in range(4)}
    monkeypatch.setattr(ray_cluster, "node_with", nodes.get)
    return result


def test_nodes_of_trainers_cannot_leave_while_these_restart(cluster: Any) -> None:
    for rank in (0, 1):
        assert cluster.leave_machine(rank, agree) == ([], "trainers are on it")
    assert cluster.leave_machine(3, agree) == (cluster._services[2:], "teacher0 is on it, which the run needs")
    assert cluster._devices._leaving == set()


def test_a_node_leaves_only_if_the_fleet_agrees(cluster: Any) -> None:
    calls: list[list[str]] = []

    def refuse(services: list[Any]) -> str:
        calls.append([each.name for each in services])
        return "too few engines would be left"

    assert cluster.leave_machine(2, refuse)[1] == "too few engines would be left" and calls == [["engine0"]]
    assert cluster._devices._leaving == set(), "its engines can still restart there"
    assert cluster.leave_machine(2, agree) == (cluster._services[:1], None)
    assert cluster._devices._leaving == {"node2"}


def test_a_node_that_has_left_has_no_services(cluster: Any) -> None:
    assert cluster.leave_machine(7, agree) == ([], None) and cluster._devices._leaving == set()
