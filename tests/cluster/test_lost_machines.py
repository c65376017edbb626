"""A machine leaves a Ray cluster: processes that start again take free devices of another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.failures import MachineLost, SamplesLost, WorkerFailed
from tests.support.cluster_workers import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.slow]
agree: Any = lambda services: None  # noqa: E731
THREADS = {"OMP_NUM_THREADS": "1"}
TOKENS = 100_000  # of a sample: more than 100 KB of vectors, which Ray keeps on the machine of the engine


@pytest.fixture
def machines() -> Iterator[Any]:
    """A Ray cluster of three raylets on this machine: the head, and two with an NPU each, which may leave."""
    from megarl.cluster.ray import env as ray_env

    ray_env.prepare(private=True)
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 8, "object_store_memory": 128 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    for _ in range(2):
        cluster.add_node(num_cpus=8, object_store_memory=128 << 20, resources={"NPU": 1})
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.timeout(300)
def test_an_engine_starts_on_another_machine(machines: Any, tmp_path: Path) -> None:
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    devices = RayDevices("NPU", "ASCEND_RT_VISIBLE_DEVICES", Demand(1, 1))
    with RayCluster(None, devices, tmp_path, trainer_env=THREADS, stall=0.0) as cluster:
        trainers = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, (), essential=False)
        start: Any = {"name": "engine0", "devices": 1, "env": THREADS, "essential": False}
        engine = cluster.start_service("tests.support.cluster_workers:Engine", (3,), **start)
        assert engine.call("scaled", 4).result(60) == 12
        first, homes = engine.node, {devices.trainers[0].node_id, engine.node}
        assert len(homes) == 2, "one process on each machine"
        lost = next(node for node in machines.list_all_nodes() if node.node_id == first)
        machines.remove_node(lost, allow_graceful=False)
        with pytest.raises(MachineLost, match="a machine with 1 NPU of this run has left"):
            for _ in range(2):  # Ray may notice the death of the process before the loss of its machine
                assert wait_until(engine.failure, 120)
                engine = cluster.start_service("tests.support.cluster_workers:Engine", (3,), replaces=engine, **start)
        machines.add_node(num_cpus=8, object_store_memory=128 << 20, resources={"NPU": 1})
        again = cluster.start_service("tests.support.cluster_workers:Engine", (3,), replaces=engine, **start)
        assert again.call("scaled", 5).result(60) == 15 and again.node not in homes
        cluster.check()
        assert trainers.call("echo", "a") == [(0, "a")], "the others are left alone"


@pytest.mark.timeout(300)
def test_additional_engines_take_free_devices_and_give_them_back(machines: Any, tmp_path: Path) -> None:
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    devices = RayDevices("NPU", "ASCEND_RT_VISIBLE_DEVICES", Demand(1, 1, engines_leave=True))
    with RayCluster(None, devices, tmp_path, trainer_env=THREADS, stall=0.0) as cluster:
        cluster.start_trainers("tests.support.cluster_workers:Echo", 1, (), essential=False)
        start: Any = {"devices": 1, "env": THREADS, "essential": False}
        engine = cluster.start_service("tests.support.cluster_workers:Engine", (3,), name="engine0", **start)
        assert cluster.free_services(1) == 0
        start["additional"] = True
        with pytest.raises(MachineLost, match="no machine of the Ray cluster has 1 free NPU"):
            cluster.start_service("tests.support.cluster_workers:Engine", (3,), name="engine1", **start)
        resources = {"NPU": 2, "megarl_node_3": 1}
        machines.add_node(num_cpus=8, object_store_memory=128 << 20, resources=resources)
        assert wait_until(lambda: cluster.free_services(1) == 2, 30) and cluster.free_services(3) == 0
        further = cluster.start_service("tests.support.cluster_workers:Engine", (4,), name="engine1", **start)
        assert further.call("scaled", 5).result(60) == 20 and further.device_names != ""
        assert further.node not in (engine.node, devices.trainers[0].node_id) and cluster.free_services(1) == 1
        assert cluster.leave_machine(7, agree) == ([], None), "a machine that has left has no services"
        assert cluster.leave_machine(3, agree) == ([further], None) and cluster.free_services(1) == 0, (
            "nothing starts there"
        )
        cluster.release_service(further)
        assert cluster.leave_machine(3, agree) == ([], None) and not further.alive()
        assert engine.call("scaled", 5).result(60) == 15
        cluster.release_service(engine)
        assert wait_until(lambda: cluster.free_services(1) == 1, 30), "the devices of the first engines return, too"
        again = cluster.start_service("tests.support.cluster_workers:Engine", (5,), name="engine1", **start)
        assert again.call("scaled", 5).result(60) == 25 and again.node == engine.node
        cluster.check()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is lost"])
def test_samples_of_a_machine_that_ends(machines: Any, tmp_path: Path, leaves: bool) -> None:
    """They are copied before a machine leaves. They are found to be lost if it ends without notice."""
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    devices = RayDevices("NPU", "ASCEND_RT_VISIBLE_DEVICES", Demand(1, 1, engines_leave=True))
    with RayCluster(None, devices, tmp_path, trainer_env=THREADS, stall=0.0) as cluster:
        trainers = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, (), essential=False)
        start: Any = {"devices": 1, "env": THREADS, "essential": False}
        cluster.start_service("tests.support.cluster_workers:Engine", (3,), name="engine0", **start)
        node = machines.add_node(num_cpus=8, object_store_memory=128 << 20, resources={"NPU": 1, "megarl_node_3": 1})
        assert wait_until(lambda: cluster.free_services(1) == 1, 30)
        engine = cluster.start_service(
            "tests.support.cluster_workers:Engine", (4,), name="engine1", additional=True, **start
        )
        assert engine.node == node.node_id
        _, data = engine.call_with_data("generate", TOKENS).result(60)
        _, (small, *_) = engine.call_with_parts("several", 3).result(60)
        sent = data.ref
        if leaves:
            assert cluster.leave_machine(3, agree) == ([engine], None) and data.ref == sent, "it may still be used"
            cluster.release_service(engine)
            assert cluster.leave_machine(3, agree) == ([], None) and data.ref != sent
        machines.remove_node(node, allow_graceful=leaves)
        if leaves:
            assert trainers.call("last_token", data, 1) == [TOKENS] and data.get()[1].tokens[-1] == TOKENS
            assert small.get()[1].tokens.tolist() == [1] and not data.is_lost
            return
        text = (
            "samples of service engine1 on .* are lost: they were stored on its machine, which has left the Ray cluster"
        )
        with pytest.raises(WorkerFailed, match=f"trainer rank 0 on .* failed: SamplesLost: {text}"):
            trainers.call("last_token", data, 1)
        with pytest.raises(SamplesLost, match=text):
            data.get()
        assert wait_until(lambda: cluster.check() or data.is_lost, 120)
        assert not small.is_lost and small.get()[1].tokens.tolist() == [1], "Ray sent it to this process"
