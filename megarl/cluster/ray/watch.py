"""Looks at trainers of all nodes of a Ray cluster. Call `ray_env.prepare` before importing this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.failures import Place
from megarl.cluster.ray.signals import ray_get, ray_wait
from megarl.cluster.sigstop_watch import Looks, stopped_of


class RayWatch:
    """As `stopped.LocalWatch`, of processes on `nodes` (Ray's ids, one a rank): a task on each node looks at its own."""

    def __init__(self, places: Sequence[Place], nodes: Sequence[str], doing: str) -> None:
        self._looks = Looks(places, doing)
        self._ranks = {node: [rank for rank, own in enumerate(nodes) if own == node] for node in dict.fromkeys(nodes)}
        self._pids = {node: [places[rank].pid for rank in ranks] for node, ranks in self._ranks.items()}
        self._asked: dict[str, Any] = {}  # by node: the look that has not been read yet

    def check(self) -> None:
        """Raise WorkerFailed where one is stopped. To be called often; looks when it is time, and waits for no node."""
        if not self._looks.due():
            return
        for node, pids in self._pids.items():
            asked = self._asked.get(node)
            if asked is not None:
                if not ray_wait([asked], timeout=0)[0]:
                    continue
                self._read(node, asked)
            self._asked[node] = _look(node, pids)

    def _read(self, node: str, asked: Any) -> None:
        try:
            stopped = ray_get(asked)
        except RayError:  # the node is gone, or has no room for a process: what became of trainers there, Ray tells
            return
        self._looks.note(self._ranks[node], stopped)


# Once: each new one would be kept by the cluster, with its pickled function, as long as that lives.
_STOPPED_OF = ray.remote(num_cpus=0, max_retries=0)(stopped_of)


def _look(node: str, pids: list[int]) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return _STOPPED_OF.options(scheduling_strategy=strategy).remote(pids)
