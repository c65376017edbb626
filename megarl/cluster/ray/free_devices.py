"""Free devices of the machines of a Ray cluster, before a run reserves them. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import ray
from ray._private import (  # no public API counts devices without a cluster, or a node's free resources
    accelerators,
    state,
)

from megarl.cluster.device_map import Machines
from megarl.cluster.ray.devices import living_nodes
from megarl.cluster.ray.signals import keep_sigterm_handler
from megarl.cluster.ray.start import join


@contextlib.contextmanager
def watching(address: str, resource: str | None) -> Iterator[Callable[[], Machines]]:
    """Connect to the cluster at `address` within the block, and yield a function that returns its machines.

    resource: Ray's name of the device; None if processes need no device: then the CPUs that each machine gives to Ray count, which
    launch/multinode.sh sets to DEVICES_PER_NODE. Raises ValueError, with the remedy, if the cluster cannot be joined.
    """
    connects = not ray.is_initialized()
    if connects:
        with keep_sigterm_handler():
            join(address)
    try:
        yield lambda: _machines(resource)
    finally:
        if connects:
            with keep_sigterm_handler():
                ray.shutdown()


def _machines(resource: str | None) -> Machines:
    nodes = living_nodes()
    if resource is None:
        return [(node["NodeManagerAddress"], int(node["Resources"].get("CPU", 0))) for node in nodes]
    free = state.available_resources_per_node()
    return [(node["NodeManagerAddress"], int(free.get(node["NodeID"], {}).get(resource, 0))) for node in nodes]


def count_here(resource: str) -> int:
    """Return how many devices a private cluster would find on this machine."""
    manager = accelerators.get_accelerator_manager_for_resource(resource)
    assert manager is not None, resource
    count, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))
