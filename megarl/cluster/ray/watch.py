"""Looks at processes on all nodes of a Ray cluster: stopped ones, and stacks. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.failures import ClusterError, ProcessInfo, WorkerFailed
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.sigstop_watch import StopDetector, stopped_pids
from megarl.cluster.stacks.capture import ProcessStacks
from megarl.cluster.stacks.channel import read_stacks

STACKS_SECONDS = 60.0  # time for the nodes to start a task and read the stacks of their processes


class RayWatch:
    """Stopped-process watch over processes on `nodes` (Ray node ids, by rank): a task on each node looks at them.

    See `megarl.cluster.sigstop_watch.LocalWatch`.
    """

    def __init__(
        self,
        places: Sequence[ProcessInfo],
        nodes: Sequence[str],
        doing: str,
        error: type[ClusterError] = WorkerFailed,
    ) -> None:
        self.detector = StopDetector(places, doing, error)
        self._ranks = {node: [rank for rank, home in enumerate(nodes) if home == node] for node in dict.fromkeys(nodes)}
        self._pids = {node: [places[rank].pid for rank in ranks] for node, ranks in self._ranks.items()}
        self._pending: dict[str, Any] = {}  # by node: reference of the unread look

    def check(self) -> None:
        """Raise `error` if a process stays stopped. Call it often; it looks when due and never waits for a node."""
        if not self.detector.due():
            return
        for node, pids in self._pids.items():
            look = self._pending.get(node)
            if look is not None:
                if not ray_wait([look], timeout=0)[0]:
                    continue
                self._read(node, look)
            self._pending[node] = _STOPPED_PIDS.options(scheduling_strategy=on_node(node)).remote(pids)

    def _read(self, node: str, look: Any) -> None:
        try:
            stopped = ray_get(look)
        except RayError:  # the node is lost or cannot start a process; Ray reports the trainers that died there
            return
        self.detector.record(self._ranks[node], stopped)


# Created once: Ray keeps every remote function, with its pickled code, for the lifetime of the cluster.
_STOPPED_PIDS = ray.remote(num_cpus=0, max_retries=0)(stopped_pids)
_READ_STACKS = ray.remote(num_cpus=0, max_retries=0)(read_stacks)


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """Schedule a task on the node with this id, and on no other."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def read_stacks_on_nodes(pids: Sequence[int], nodes: Sequence[str], full: bool) -> list[ProcessStacks]:
    """Return the states of the processes `pids`, each on one of `nodes` (Ray node ids). Waits for the nodes."""
    looks = {}
    for node in dict.fromkeys(nodes):
        local = [pid for pid, home in zip(pids, nodes, strict=True) if home == node]
        looks[node] = local, _READ_STACKS.options(scheduling_strategy=on_node(node)).remote(local, full)
    ray_wait([look for _, look in looks.values()], num_returns=len(looks), timeout=STACKS_SECONDS)
    states: dict[tuple[str, int], ProcessStacks] = {}
    for node, (local, look) in looks.items():
        states |= {(node, pid): state for pid, state in zip(local, _states(look, len(local)), strict=True)}
    return [states[node, pid] for node, pid in zip(nodes, pids, strict=True)]


def _states(look: Any, size: int) -> list[ProcessStacks]:
    try:
        states: list[ProcessStacks] = ray_get(look, timeout=0)
    except RayError as error:  # GetTimeoutError too
        problem = f"Ray has not read its state on its machine: {type(error).__name__}"
        return [{"problem": problem, "state": "", "io_bytes": 0, "cpu_ticks": 0}] * size
    return states
