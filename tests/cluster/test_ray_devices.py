"""Devices of trainers and engines over Ray, with simulated NPUs."""

import time

import pytest

from megarl.cluster import ServiceDied, WorkerFailed
from tests.support.cluster_workers import wait_until
from tests.support.ray_services import ENGINE_ENV, free_npus, start_engines

pytestmark = pytest.mark.stack


@pytest.mark.slow
def test_a_critic_shares_the_trainers_device(connect, one_ray, tmp_path):
    """With simulated NPUs: a second group passes data to the first by reference, and its failure is named."""
    cluster = connect(1, 1, critics=1, npus=True)
    assert start_engines(cluster, 1) == ["0"]
    actor = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())
    critic = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, (), name="critic")
    assert critic.call("variable", "ASCEND_RT_VISIBLE_DEVICES") == ["0"], "all three fit on one device"
    ((word, refs),) = critic.scatter_with_data("give", [([[1, 2], [3]], [])], parts=2)
    assert word == "from 0" and all(isinstance(ref.ref, one_ray.ObjectRef) for ref in refs)
    assert actor.scatter("total", [(refs,)]) == [6.0]
    with pytest.raises(WorkerFailed, match=r"critic rank 0 on .* failed: ValueError: no more values"):
        critic.call("raise_on", 0, "no more values")
    assert "critic rank 0" in (tmp_path / "critic-0.log").read_text()


@pytest.mark.slow
def test_engines_that_share_devices_spread_over_them(connect):
    """With simulated NPUs: two engines and a trainer do not fit on one device."""
    assert wait_until(lambda: free_npus() == 4, 10)
    cluster = connect(2, 2, npus=True)
    assert start_engines(cluster, 2) == ["0", "1"]
    group = cluster.start_trainers("tests.support.cluster_workers:Echo", 2, ())
    assert group.call("variable", "ASCEND_RT_VISIBLE_DEVICES") == ["0,1", "0,1"]
    assert [identity[2] for identity in group.call("identify")] == ["0", "1"]


@pytest.mark.slow
def test_engines_on_separate_devices(connect):
    assert wait_until(lambda: free_npus() == 4, 10)
    cluster = connect(1, 1, 3, npus=True, shared=False)
    assert start_engines(cluster, 1, devices=3) == ["1,2,3"]
    group = cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())
    assert group.call("variable", "ASCEND_RT_VISIBLE_DEVICES") == ["0"]
    with pytest.raises(ValueError, match=r"need 1 of NPU, and the free devices cannot hold them: 0 on 127\.0\.0\.1"):
        connect(1, npus=True)


def test_processes_without_devices_start_beyond_the_number_of_cpus(connect):
    cluster = connect(20, 40)  # of 16 CPUs
    assert len(cluster._devices.trainers) == 20
    assert connect(1, 1, npus=False)._devices.next_engine(1)


@pytest.mark.slow
def test_a_process_not_started_by_ray_is_named(connect, monkeypatch):
    """Processes reserve more of a device than it has, for which Ray would wait forever."""
    from megarl.cluster.ray import devices as ray_devices
    from megarl.cluster.ray import group as ray_group
    from megarl.cluster.ray import service as ray_service

    assert wait_until(lambda: free_npus() == 4, 10)
    monkeypatch.setattr(ray_devices, "SHARE", 0.6)
    cluster = connect(1, 1, npus=True)
    start_engines(cluster, 1)
    late = r"trainer rank 0 on 127\.0\.0\.1 failed: Ray has not started .* within 4 s"
    with monkeypatch.context() as short, pytest.raises(WorkerFailed, match=late):
        short.setattr(ray_group, "START_SECONDS", 4.0)
        cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())

    cluster = connect(1, 1, npus=True)
    cluster.start_trainers("tests.support.cluster_workers:Echo", 1, ())
    monkeypatch.setattr(ray_service, "START_SECONDS", 4.0)
    engine = cluster.start_service(
        "tests.support.cluster_workers:Engine", (3,), name="engine0", devices=1, env=ENGINE_ENV
    )
    time.sleep(4.1)
    with pytest.raises(ServiceDied, match=r"service engine0 on 127\.0\.0\.1 failed: Ray has not started"):
        cluster.check()
    with pytest.raises(ServiceDied):
        engine.call("scaled", 1).result(timeout=10)


def test_free_devices_are_counted_before_a_run_reserves_them(connect, one_ray):
    """Devices that a run holds are not free. CPUs of a machine all count, since processes reserve none."""
    from megarl.cluster.ray.free_devices import watching

    with watching("auto", "NPU") as machines:
        assert wait_until(lambda: machines() == [("127.0.0.1", 4)], 10)
        cluster = connect(1, 1, 2, npus=True, shared=False)
        assert wait_until(lambda: machines() == [("127.0.0.1", 1)], 10)
        cluster.shutdown()
        assert wait_until(lambda: machines() == [("127.0.0.1", 4)], 10)
    with watching("auto", None) as machines:
        connect(2, 2)
        assert machines() == [("127.0.0.1", 16)]
    assert one_ray.is_initialized(), "it was connected before"


def test_devices_of_a_private_cluster_are_the_visible_ones(monkeypatch):
    from ray._private.accelerators import NPUAcceleratorManager

    from megarl.cluster.ray.free_devices import count_here

    monkeypatch.setattr(NPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(lambda: 8))
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert count_here("NPU") == 8
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,5,6")
    assert count_here("NPU") == 3
