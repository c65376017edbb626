"""The `ray start` command of a node, with the node's rank and devices as Ray resources."""

from __future__ import annotations

import json
import sys

from megarl.cluster.ray.env import node_resource
from megarl.commands.launch.topology import Topology
from megarl.platform.kinds import kind_of

_RESOURCE_FLAGS = {"CPU": "--num-cpus", "GPU": "--num-gpus"}  # resources with a flag of `ray start`


def ray_command(topology: Topology, device: str) -> list[str]:
    """Return the ``ray start`` command of this node: in the foreground, no dashboard, ports chosen by the system."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if topology.is_head:
        command += ["--head", f"--port={topology.port}", f"--node-ip-address={topology.head_address}"]
        command += ["--include-dashboard=false", "--no-monitor", f"--ray-client-server-port={topology.port + 2}"]
    else:
        command += [f"--address={topology.ray_address}"]
        command += [f"--node-ip-address={topology.node_ip}"] if topology.node_ip else []
    resources = {node_resource(topology.node_rank): 1}
    if topology.devices_per_node is not None:
        resource = device_resource(device)
        if resource in _RESOURCE_FLAGS:
            command.append(f"{_RESOURCE_FLAGS[resource]}={topology.devices_per_node}")
        else:
            resources[resource] = topology.devices_per_node
    return [*command, f"--resources={json.dumps(resources)}"]


def device_resource(device: str) -> str:
    """Ray resource of the devices of a node."""
    return kind_of(device).ray_resource or "CPU"
