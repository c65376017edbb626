"""Describe this process's threads: their stacks, the collective that each waits in, and counters of its process groups.

Runs in a thread while other threads are blocked in native code. It imports nothing and reads no file, because the blocked
thread may hold the import lock or wait for the file system. It keeps no frame: a frame's locals are tensors.
"""

from __future__ import annotations

import json
import operator
import re
import sys
import threading
from types import FrameType
from typing import Any, TypedDict

from megarl.cluster import failures
from megarl.platform.kinds import KINDS

SHOWN_FRAMES = 16  # innermost frames of a thread
SHOWN_COLLECTIVES = 6  # of a process, from the flight recorder

# Functions in which a rank waits for other ranks.
_MEETINGS = ("torch/distributed/distributed_c10d.py", "p2p_communication.py", "megarl/cluster/key_value_store.py")
# "file:function" where a rank waits for an engine, which `weight_sync.timeout` limits, or for a slow disk.
_OTHER_LIMITS = re.compile(r"megarl/weight_sync/|megarl/atomic_files\.py|checkpoint/tensor_files\.py:write$")
# "file:function" of frames that only lead to others.
_HIDDEN = re.compile(
    r"^<frozen importlib|torch/(nn/modules/module|distributed/c10d_logger|utils/_contextlib|autograd/function)\.py:"
    r"|/threading\.py:(_bootstrap\w*|run)$"
)
_IDLE = ("/threading.py", "/selectors.py", "/queue.py", "/socket.py", "/concurrent/futures/thread.py")
_TRANSPORT = ("megarl/cluster/", "ray/_private/")
_RECORDERS = (
    "torch._C._distributed_c10d._dump_fr_trace_json",  # of backends without a separate recorder, such as gloo
    *(k.flight_recorder for k in KINDS if k.flight_recorder),
)


class Wait(TypedDict):
    """A function in which ranks wait for each other, and torch's name of their process group ("": all trainers)."""

    function: str
    group: str


class ThreadStack(TypedDict):
    """`frames`: "file:line function", innermost first, without megarl's transport. `call`: runs a call of the controller."""

    name: str  # "" for a thread of native code, such as a thread of autograd
    call: bool
    frames: list[str]
    wait: Wait | None
    layer: int | None  # layer_number of the innermost module with one, from 1
    backward: bool  # autograd is on the stack; on devices it runs in threads of native code


class GroupCount(TypedDict):
    """A process group of this rank. `count`: collectives that the rank has started in it; None if its backend does not count."""

    name: str
    description: str
    size: int
    count: int | None


class ProcessStacks(TypedDict, total=False):
    """State of a process. `digest` changes when a stack or a counter does. Without "full", `threads` and `groups` are left out.

    problem: why the process does not answer; "" if it does. state, io_bytes and cpu_ticks come from /proc: the main thread's
    state, bytes read and written, and clock ticks of its child processes.
    """

    digest: int
    other_limit: bool  # waits for an engine or a disk
    threads: list[ThreadStack]
    groups: list[GroupCount]
    unfinished: list[str]  # collectives, from torch's flight recorder
    problem: str
    state: str
    io_bytes: int
    cpu_ticks: int
    outside: list[str]  # lines of py-spy, for a process that does not answer


def capture(full: bool, *, main_thread: bool = False) -> ProcessStacks:
    """Return the state of this process. main_thread: include the main thread even if it runs no call of the controller."""
    started = {thread.ident: thread.name for thread in threading.enumerate()}
    threads, lines, other_limit = [], [], False
    for ident, innermost in sys._current_frames().items():
        frames = _outwards(innermost)
        is_main = main_thread and ident == threading.main_thread().ident
        if not (is_main or _works(frames)):
            continue
        lines += [(ident, _file(frame), frame.f_code.co_name, frame.f_lineno) for frame in frames]
        stack = _describe(started.get(ident, ""), frames)
        other_limit |= stack["wait"] is None and any(_OTHER_LIMITS.search(_place(frame)) for frame in frames)
        threads.append(stack)
    groups = _groups()
    digest = hash((tuple(lines), tuple((group["name"], group["count"]) for group in groups)))
    state: ProcessStacks = {"digest": digest, "other_limit": other_limit}
    if full:
        state |= {"threads": threads, "groups": groups, "unfinished": _unfinished()}
    return state


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _place(frame: FrameType) -> str:
    return f"{_file(frame)}:{frame.f_code.co_name}"


def _is_call(frame: FrameType) -> bool:
    return frame.f_code is failures.run.__code__


def _works(frames: list[FrameType]) -> bool:
    """Return False for threads of the transport and threads that wait for work."""
    if any(map(_is_call, frames)):
        return True
    in_transport = any(part in _file(frame) for frame in frames for part in _TRANSPORT)
    return not in_transport and not _file(frames[0]).endswith(_IDLE)


def _describe(name: str, frames: list[FrameType]) -> ThreadStack:
    call = next((number for number, frame in enumerate(frames) if _is_call(frame)), None)
    frames = frames[:call]
    while call is not None and frames and "megarl/cluster/" in _file(frames[-1]):  # the transport's frames
        frames.pop()
    texts = [
        f"{_file(frame).rpartition('/site-packages/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in frames
        if not _HIDDEN.search(_place(frame))
    ]
    return {
        "name": name,
        "call": call is not None,
        "frames": texts[:SHOWN_FRAMES],
        "wait": _wait(frames),
        "layer": _layer(frames),
        "backward": not name or any(frame.f_code.co_name == "_engine_run_backward" for frame in frames),
    }


def _wait(frames: list[FrameType]) -> Wait | None:
    """Return the outermost function in which the thread meets other ranks: `all_gather_object`, not the `all_gather` in it."""
    met = [frame for frame in frames if _file(frame).endswith(_MEETINGS)]
    if not met:
        return None
    groups = (name for frame in reversed(met) if (name := _group_name(frame)))
    return {"function": met[-1].f_code.co_name, "group": next(groups, "")}


def _group_name(frame: FrameType) -> str:
    """Return the name of the process group in `group` or `self.pp_group` of a frame; "" if it has none."""
    values = frame.f_locals
    group = values.get("group", getattr(values.get("self"), "pp_group", None))
    return str(getattr(group, "group_name", "") or "")


def _layer(frames: list[FrameType]) -> int | None:
    for frame in frames:
        if _place(frame).endswith("torch/nn/modules/module.py:_call_impl"):
            number = vars(frame.f_locals["self"]).get("layer_number")
            if isinstance(number, int):
                return number
    return None


def _groups() -> list[GroupCount]:
    """Return this rank's process groups of more than one rank."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return []
    world, groups = module._world, []
    for group, name in list(world.pg_names.items()):
        size = len(world.pg_group_ranks.get(group, ()))
        if size > 1:
            description = str(getattr(group, "group_desc", ""))
            groups.append(GroupCount(name=name, description=description, size=size, count=_count(group)))
    return groups


def _count(group: Any) -> int | None:
    # The group's own method refuses backends that are not part of torch; a backend may serve several device types.
    try:
        backends = {group._get_backend(device) for device in group._device_types}
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    except RuntimeError:  # a backend that does not count
        return None


def _unfinished() -> list[str]:
    """Return collectives that have not finished, from the flight recorders of torch and of devices; [] without one."""
    texts = []
    for path in _RECORDERS:
        package, _, attribute = path.partition(".")
        try:
            dump = operator.attrgetter(attribute)(sys.modules.get(package))
        except AttributeError:  # not imported, or without a flight recorder
            continue
        for entry in json.loads(dump(includeCollectives=True)).get("entries", []):
            if not entry["retired"] and entry["state"] != "completed":
                number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
                texts.append(f"{entry['profiling_name']}, number {number} of {entry['process_group'][1]}")
    return texts[:SHOWN_COLLECTIVES]
