"""Stacks of trainers as a report gets them: states of ranks, written by hand."""

from __future__ import annotations

from typing import Any

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks.report import GroupStacks

WORLD = ("0", "default_pg")
DATA = ("7", "DATA_PARALLEL_GROUP_WITH_CP")
TENSOR = ("3", "TENSOR_MODEL_PARALLEL_GROUP")


def rank_state(*frames: str, wait: Any = None, counts: Any = (), layer: Any = None, **more: Any) -> Any:
    """State of a rank in a call. wait: (function, group); counts: (group, size, count) of each process group."""
    thread = {
        "name": "MainThread",
        "call": True,
        "frames": list(frames),
        "wait": wait and {"function": wait[0], "group": wait[1][0]},
        "layer": layer,
        "backward": any("autograd" in frame for frame in frames),
    }
    groups = [
        {"name": group[0], "description": group[1], "size": size, "count": count} for group, size, count in counts
    ]
    facts = {"problem": "", "state": "S", "io_bytes": 0, "cpu_ticks": 0, "digest": 1, "other_limit": False}
    return {**facts, "threads": [thread] if frames else [], "groups": groups, "unfinished": [], **more}


SILENT = {"problem": "it has not answered within 5 s", "state": "D", "io_bytes": 0, "cpu_ticks": 0}
IN_ALL_REDUCE = (
    "torch/distributed/distributed_c10d.py:3247 all_reduce",
    "megatron/core/optimizer/clip_grads.py:90 norm",
)
IN_USER_CODE = (
    "/home/me/hooks.py:10 slow",
    "torch/autograd/function.py:325 apply",
    "megarl/trainer/actor.py:99 update",
)


def group_of(*states: Any, call: str = "update_actor", log: str = "") -> GroupStacks:
    places = [ProcessInfo(f"trainer rank {rank}", "node7", 100 + rank, log) for rank in range(len(states))]
    return GroupStacks("trainer", places, states, call, 700.0)
