"""A function, run once on every node of a Ray cluster: what a look at the machines needs, and no run does.

Call `ray_env.prepare` before importing this.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.ray.signals import keep_sigterm_handler, ray_get, ray_wait
from megarl.cluster.ray.start import join
from megarl.commands.launch.multinode import node_resource

_CLOCK_SECONDS = 5.0  # left to a process that has answered already
_CLOCK_READINGS = 3


@dataclass(frozen=True)
class NodeAnswer:
    """What the function returned on one node, or why it did not.

    `clock_ahead`: seconds that the node's wall clock is ahead of this process's; `clock_known`: by how much that may be
    wrong, half the time that asking took.
    """

    host: str  # address
    rank: int | None  # as launch/multinode.sh counts; None in a cluster that it did not start
    value: Any = None
    error: str = ""
    clock_ahead: float = 0.0
    clock_known: float = float("inf")


def on_every_node(
    address: str, function: str, arguments: Callable[[int], tuple[Any, ...]], seconds: float
) -> list[NodeAnswer]:
    """Run `function` ("package.module:name") in a process of its own on every node of the cluster at `address`, on all at
    once. `arguments` says what it is given, from the number of nodes.

    seconds: until those that have not answered are given up. Answers are in the order of ranks, then addresses; nodes
    that Ray knows to be gone come with an error. A Ray that this process is connected to already is used, and left
    running. Raises ValueError, with the remedy, where the cluster cannot be joined.
    """
    connected = ray.is_initialized()
    if not connected:
        with keep_sigterm_handler():
            join(address)
    try:
        nodes = ray.nodes()
        args = arguments(sum(node["Alive"] for node in nodes))
        asked = {node["NodeID"]: _ask(node, function, args) for node in nodes if node["Alive"]}
        ray_wait([ref for _, ref in asked.values()], num_returns=len(asked), timeout=seconds)
        answers = [_answer(node, len(nodes), asked.get(node["NodeID"]), seconds) for node in nodes]
        for actor, _ in asked.values():
            ray.kill(actor)
    finally:
        if not connected:
            ray.shutdown()
    return sorted(answers, key=lambda one: (one.rank is None, one.rank or 0, one.host))


class _Visitor:
    """Lives on a node while it is looked at."""

    def call(self, function: str, args: tuple[Any, ...]) -> Any:
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(*args)

    def clock(self) -> float:
        return time.time()


def _ask(node: dict[str, Any], function: str, args: tuple[Any, ...]) -> tuple[Any, Any]:
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    actor = ray.remote(_Visitor).options(num_cpus=0, scheduling_strategy=strategy).remote()
    return actor, actor.call.remote(function, args)


def _answer(node: dict[str, Any], nodes: int, asked: tuple[Any, Any] | None, seconds: float) -> NodeAnswer:
    host = node["NodeManagerAddress"]
    rank = next((rank for rank in range(nodes) if node_resource(rank) in node["Resources"]), None)
    if asked is None:
        return NodeAnswer(host, rank, error="it has left the cluster")
    actor, ref = asked
    try:
        value = ray_get(ref, timeout=0.1)
        ahead, known = _clock(actor)
    except GetTimeoutError:
        return NodeAnswer(host, rank, error=f"no answer within {seconds:.0f} s")
    except RayError as error:
        cause = getattr(error, "cause", None)
        said = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        return NodeAnswer(host, rank, error=" ".join(said.split()))
    return NodeAnswer(host, rank, value, clock_ahead=ahead, clock_known=known)


def _clock(actor: Any) -> tuple[float, float]:
    """See `NodeAnswer`: of several readings the one that took the least time."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        there = ray_get(actor.clock.remote(), timeout=_CLOCK_SECONDS)
        after = time.time()
        readings.append(((after - before) / 2, there - (before + after) / 2))
    known, ahead = min(readings)
    return ahead, known
