"""Clusters over Ray: one Ray for each file of tests, a new cluster for each test."""

import pytest

from tests.support.ray_services import THREADS


@pytest.fixture(scope="module")
def one_ray():
    from megarl.cluster.ray import env as ray_env

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
    from megarl.cluster.device_map import Demand
    from megarl.cluster.ray.cluster import RayCluster
    from megarl.cluster.ray.devices import RayDevices

    clusters = []

    def connect(trainers=0, engines=0, tensor_parallel=1, *, critics=0, npus=False, shared=True, stall=0.0):
        kind = ("NPU", "ASCEND_RT_VISIBLE_DEVICES") if npus else (None, "")
        devices = RayDevices(*kind, Demand(trainers, engines, tensor_parallel, shared=shared, critics=critics))
        clusters.append(RayCluster(None, devices, tmp_path, trainer_env=THREADS | {"ROLE": "trainer"}, stall=stall))
        return clusters[-1]

    yield connect
    for cluster in clusters:
        cluster.shutdown()
