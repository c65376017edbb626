"""Trainers and engines over Ray: one Ray for the whole file, a cluster of its own for each test."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megarl.cluster import CallFailed, ServiceDied, WorkerFailed, host_name
from tests.cluster_workers import ROOT, alive, descendants, wait_until

pytestmark = pytest.mark.stack
THREADS = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def one_ray():
    from megarl.cluster import ray_env

    ray_env.prepare(private=True)
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        resources={"NPU": 4},
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=128 << 20,
        logging_level="error",
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def connect(one_ray, tmp_path):
    from megarl.cluster.ray_cluster import RayCluster
    from megarl.cluster.ray_devices import RayDevices

    clusters = []

    def connect(resource=None, variable="", shared=True):
        devices = RayDevices(resource, variable, shared=shared)
        role = {"trainer_env": THREADS | {"ROLE": "trainer"}, "service_env": THREADS | {"ROLE": "engine"}}
        clusters.append(RayCluster(None, devices, tmp_path, **role))
        return clusters[-1]

    yield connect
    for cluster in clusters:
        cluster.shutdown()


def test_calls_scatters_and_collectives(connect, tmp_path):
    group = connect().start_trainers("tests.cluster_workers:Reducer", 2, (), {})
    first, second = group.call("identify")
    assert (first[0], first[2:], second[0], second[2:]) == (0, ("0", "2", "trainer"), 1, ("1", "2", "trainer"))
    assert group.call("sum", 2) == [4.0, 4.0]
    assert group.scatter("echo", [("a",), ("b",)]) == [(0, "a"), (1, "b")]
    assert "trainer rank 1" in (tmp_path / "trainer-1.log").read_text()
    group.shutdown()
    assert wait_until(lambda: not alive(first[1]) and not alive(second[1]), 5)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            "die_in_collective",
            r"trainer rank 1 on .* \(pid \d+\) died: its process ended without a word(.|\n)*the last words",
        ),
        ("raise_in_collective", r"trainer rank 1 on .* \(pid \d+\) failed: ValueError: this rank has had enough"),
    ],
)
def test_the_first_cause_is_told_within_seconds(connect, method, says):
    cluster = connect()
    engine = cluster.start_service("tests.cluster_workers:Engine", (3,), name="engine0", devices=1, env={})
    pids = [*engine.call("child_pid").result(timeout=60)]
    group = cluster.start_trainers("tests.cluster_workers:Reducer", 2, (), {})
    pids += [place[1] for place in group.call("identify")]
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=says) as caught:
        group.call(method, 1)
    assert time.monotonic() - began < 8
    assert ("had enough" in caught.value.failure.traceback) == (method == "raise_in_collective")
    assert wait_until(lambda: not any(map(alive, pids)), 5)  # an engine's own child too


def test_a_constructor_that_raises_is_told(connect):
    with pytest.raises(WorkerFailed, match="TypeError"):
        connect().start_trainers("tests.cluster_workers:Engine", 1, (), {})
    engine = connect().start_service("tests.cluster_workers:Engine", (-1,), name="engine0", devices=1, env={})
    with pytest.raises(ServiceDied, match="ValueError: scale is negative"):
        engine.call("scaled", 1).result(timeout=60)


def test_a_service_answers_many_calls_at_once(connect, one_ray, tmp_path):
    cluster = connect()
    engine = cluster.start_service("tests.cluster_workers:Engine", (3,), name="engine0", devices=1, env={})
    futures = [engine.call("slow", i) for i in range(300)]
    assert [future.result(timeout=60) for future in futures] == list(range(300))
    assert engine.call("concurrency").result() > 100
    assert engine.host == host_name()
    assert engine.call("variable", "ROLE").result() == "engine"
    with pytest.raises(CallFailed, match=r"service engine0 on .* failed: KeyError: 'no such prompt'"):
        engine.call("fail").result()
    assert engine.alive()

    # The vectors lie in Ray's store; a trainer that is handed the reference fetches them itself.
    control, data = engine.call_with_data("generate", 4).result()
    assert control == {"lengths": [4, 4]}
    assert isinstance(data.ref, one_ray.ObjectRef)
    assert data.get()[1].tokens.tolist() == [1, 2, 3, 4]
    group = cluster.start_trainers("tests.cluster_workers:Echo", 1, (), {})
    assert group.call("fetch", data, 1) == [[1, 2, 3, 4]]
    with pytest.raises(CallFailed, match="KeyError"):
        engine.call_with_data("fail").result()

    _, child = engine.call("child_pid").result()
    engine.stop()
    assert "closed in order" in (tmp_path / "engine0.log").read_text()
    assert wait_until(lambda: not alive(child), 5)


def test_a_killed_service_ends_the_call_that_trainers_are_in(connect):
    cluster = connect()
    engine = cluster.start_service("tests.cluster_workers:Engine", (3,), name="engine0", devices=1, env={})
    group = cluster.start_trainers("tests.cluster_workers:Echo", 1, (), {})
    engine.call("die_later", 0.3).result(timeout=60)
    waiting = [engine.call("slow", i) for i in range(3)]
    began = time.monotonic()
    with pytest.raises(ServiceDied, match=r"service engine0 .* died: .*(.|\n)*the engine's last words"):
        group.call("sleep", 100)
    assert time.monotonic() - began < 8
    assert all(future.result() in range(3) for future in waiting)  # they were done before
    with pytest.raises(ServiceDied):
        engine.call("scaled", 1).result(timeout=10)


def test_devices_are_handed_out_in_order(connect):
    """With pretended NPUs: who shares what, and what each process sees."""
    shared = connect("NPU", "ASCEND_RT_VISIBLE_DEVICES", shared=True)
    group = shared.start_trainers("tests.cluster_workers:Echo", 2, (), {})
    assert group.call("variable", "ASCEND_RT_VISIBLE_DEVICES") == ["0,1", "0,1"]
    engine = shared.start_service("tests.cluster_workers:Engine", (3,), name="engine0", devices=2, env={})
    assert engine.call("variable", "ASCEND_RT_VISIBLE_DEVICES").result(timeout=60) == "0,1"
    shared.shutdown()

    apart = connect("NPU", "ASCEND_RT_VISIBLE_DEVICES", shared=False)
    assert wait_until(lambda: _free_npus() == 4, 10)
    engine = apart.start_service("tests.cluster_workers:Engine", (3,), name="engine0", devices=3, env={})
    group = apart.start_trainers("tests.cluster_workers:Echo", 1, (), {})
    assert engine.call("variable", "ASCEND_RT_VISIBLE_DEVICES").result(timeout=60) == "0,1,2"
    assert group.call("variable", "ASCEND_RT_VISIBLE_DEVICES") == ["3"]
    with pytest.raises(ValueError, match=r"service engine1 needs 1 more of NPU; the Ray cluster has 4, 0 of them free"):
        apart.start_service("tests.cluster_workers:Engine", (3,), name="engine1", devices=1, env={})


def _free_npus():
    import ray

    return ray.available_resources().get("NPU", 0)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_controller(tmp_path, how):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | THREADS
    controller = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster_workers", "ray", str(tmp_path)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    fact = next(line for line in controller.stdout if line.startswith("FACT pids"))
    pids = [int(pid) for pid in fact.split()[2:]] + descendants(controller.pid)
    assert all(map(alive, pids)) and len(pids) > 5  # Ray's own processes among them
    controller.send_signal(how)
    assert wait_until(lambda: not any(map(alive, pids)) and controller.poll() is not None, 10)
