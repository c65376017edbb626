"""Run a function once on every node of a Ray cluster, for checks of the machines.

Call `megarl.cluster.ray.env.prepare` before importing this module.
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

from megarl.cluster.ray.env import node_resource
from megarl.cluster.ray.signals import keep_sigterm_handler, ray_get, ray_wait
from megarl.cluster.ray.start import join

_CLOCK_SECONDS = 5.0  # timeout of a clock reading, in a process that has already answered
_CLOCK_READINGS = 3


@dataclass(frozen=True)
class NodeAnswer:
    """Return value of the function on one node, or the error.

    `clock_ahead`: seconds by which the node's wall clock is ahead of this process's; `clock_error`: bound of its error,
    half the round-trip time.
    """

    host: str  # address
    rank: int | None  # rank by launch/multinode.sh; None in other clusters
    value: Any = None
    error: str = ""
    clock_ahead: float = 0.0
    clock_error: float = float("inf")


def on_every_node(
    address: str, function: str, arguments: Callable[[int], tuple[Any, ...]], seconds: float
) -> list[NodeAnswer]:
    """Run `function` ("package.module:name") in a new process on every node of the cluster at `address`, in parallel.

    arguments: computes the function's arguments from the number of nodes. seconds: timeout of the answers.
    Returns one answer per node, sorted by rank, then address; nodes that have left or do not answer have an error.
    If this process is already connected to Ray, that connection is used and stays open. Raises ValueError, with the
    remedy, if the cluster cannot be joined.
    """
    connected = ray.is_initialized()
    if not connected:
        with keep_sigterm_handler():
            join(address)
    try:
        nodes = ray.nodes()
        args = arguments(sum(node["Alive"] for node in nodes))
        calls = {node["NodeID"]: _call(node, function, args) for node in nodes if node["Alive"]}
        ray_wait([ref for _, ref in calls.values()], num_returns=len(calls), timeout=seconds)
        answers = [_answer(node, len(nodes), calls.get(node["NodeID"]), seconds) for node in nodes]
        for actor, _ in calls.values():
            ray.kill(actor)
    finally:
        if not connected:
            ray.shutdown()
    return sorted(answers, key=lambda answer: (answer.rank is None, answer.rank or 0, answer.host))


class _NodeActor:
    """Ray actor that runs the function on a node."""

    def call(self, function: str, args: tuple[Any, ...]) -> Any:
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(*args)

    def clock(self) -> float:
        return time.time()


def _call(node: dict[str, Any], function: str, args: tuple[Any, ...]) -> tuple[Any, Any]:
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    actor = ray.remote(_NodeActor).options(num_cpus=0, scheduling_strategy=strategy).remote()
    return actor, actor.call.remote(function, args)


def _answer(node: dict[str, Any], nodes: int, call: tuple[Any, Any] | None, seconds: float) -> NodeAnswer:
    host = node["NodeManagerAddress"]
    rank = next((rank for rank in range(nodes) if node_resource(rank) in node["Resources"]), None)
    if call is None:
        return NodeAnswer(host, rank, error="it has left the cluster")
    actor, ref = call
    try:
        value = ray_get(ref, timeout=0.1)
        ahead, clock_error = _clock(actor)
    except GetTimeoutError:
        return NodeAnswer(host, rank, error=f"no answer within {seconds:.0f} s")
    except RayError as error:
        cause = getattr(error, "cause", None)
        message = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        return NodeAnswer(host, rank, error=" ".join(message.split()))
    return NodeAnswer(host, rank, value, clock_ahead=ahead, clock_error=clock_error)


def _clock(actor: Any) -> tuple[float, float]:
    """Return (`clock_ahead`, `clock_error`) of `NodeAnswer`, from the fastest of several readings."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time()
        remote = ray_get(actor.clock.remote(), timeout=_CLOCK_SECONDS)
        after = time.time()
        readings.append(((after - before) / 2, remote - (before + after) / 2))
    clock_error, ahead = min(readings)
    return ahead, clock_error
