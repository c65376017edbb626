"""Engines of the tests over Ray, and the simulated devices that are free."""

THREADS = {"OMP_NUM_THREADS": "1"}
ENGINE_ENV = THREADS | {"ROLE": "engine"}


def start_engines(cluster, count, devices=1):
    """Start engines and return the visible devices of each."""
    engines = [
        cluster.start_service(
            "tests.support.cluster_workers:Engine", (3,), name=f"engine{i}", devices=devices, env=ENGINE_ENV
        )
        for i in range(count)
    ]
    return [engine.call("variable", "ASCEND_RT_VISIBLE_DEVICES").result(timeout=60) for engine in engines]


def free_npus():
    import ray

    return ray.available_resources().get("NPU", 0)
