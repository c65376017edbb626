"""Stacks of processes: capture in the process, answers over the socket, the report of who waits for whom, and the watch of a call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks import capture as capturing
from megarl.cluster.stacks import channel, stall
from megarl.cluster.stacks.capture import capture
from megarl.cluster.stacks.channel import answering, read_stacks, socket_path
from megarl.cluster.stacks.report import GroupStacks, lines_of, process_lines, situation
from megarl.cluster.stacks.stall import LOOKS, StallWatch, TrainersStalled, progress
from megarl.cluster.torchrun.rank import CallMessage, RankWorker
from tests.support.cluster_workers import ROOT, wait_until

WORLD = ("0", "default_pg")
DATA = ("7", "DATA_PARALLEL_GROUP_WITH_CP")
TENSOR = ("3", "TENSOR_MODEL_PARALLEL_GROUP")


# --- the report, from recorded frames -----------------------------------------------------------------


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


def test_the_rank_in_user_code_is_missing_and_the_others_wait() -> None:
    waiting = rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(DATA, 3, 5), (WORLD, 3, 2)])
    hanging = rank_state(*IN_USER_CODE, layer=12, counts=[(DATA, 3, 4), (WORLD, 3, 2)], state="D")
    group = group_of(waiting, hanging, waiting, log="logs/trainer.log")
    assert lines_of(group, lambda log: "  the last line") == [
        "waiting for others:",
        "  ranks 0, 2: all_reduce in the data parallel with cp group (ranks 0-2)",
        "    megatron/core/optimizer/clip_grads.py:90 norm",
        "others wait for:",
        "  trainer rank 1 on node7 (pid 101): backward of layer 12, blocked in the kernel (state D), as by a file system or "
        "a device driver, 1 collective behind in the data parallel with cp group",
        "    /home/me/hooks.py:10 slow",
        "    torch/autograd/function.py:325 apply",
        "    megarl/trainer/actor.py:99 update",
        "    its output, logs/trainer.log, ends:",
        "      the last line",
    ]
    error = str(TrainersStalled(group, 600.0))
    assert error.startswith(
        "trainer rank 1 on node7 (pid 101) failed: others wait for it in update_actor, where nothing has changed on any rank "
        "for 600 s (cluster.stall).\n"
    )
    assert "dmesg" in error and error.count("logs/trainer.log") == 1


def test_a_chain_of_waiting_ranks_leads_to_its_first() -> None:
    """Rank 0 waits for 1 in their tensor group, rank 1 for 3 in its data group; rank 2 is in the call's end already."""
    chain = group_of(
        rank_state(*IN_ALL_REDUCE, wait=("all_reduce", TENSOR), counts=[(TENSOR, 2, 9)]),
        rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(TENSOR, 2, 8), (DATA, 2, 4)]),
        rank_state(counts=[(("4", TENSOR[1]), 2, 8)]),
        rank_state(*IN_USER_CODE, counts=[(("4", TENSOR[1]), 2, 8), (DATA, 2, 3)]),
    )
    state = situation(chain)
    assert (state.waiting, state.missing, state.returned) == ([0, 1], [3], [2])


@pytest.mark.parametrize(
    ("states", "missing"),
    [
        # On devices ranks start collectives without waiting: the count shows who is behind.
        ([rank_state("a.py:1 sync", counts=[(DATA, 2, 5)]), rank_state("b.py:2 slow", counts=[(DATA, 2, 4)])], [1]),
        # Ahead in a group, but others wait for it in another one.
        (
            [
                rank_state(*IN_ALL_REDUCE, wait=("all_reduce", TENSOR), counts=[(TENSOR, 2, 6), (DATA, 2, 4)]),
                rank_state("b.py:2 slow", counts=[(TENSOR, 2, 5), (DATA, 2, 5)]),
            ],
            [1],
        ),
        # Behind in one group and ahead in another: a link of a chain that ends at the last rank.
        (
            [
                rank_state("a.py:1 sync", counts=[(TENSOR, 2, 6)]),
                rank_state("a.py:1 sync", counts=[(TENSOR, 2, 5), (DATA, 2, 5)]),
                rank_state("b.py:2 slow", counts=[(DATA, 2, 4)]),
            ],
            [2],
        ),
        # It left the call without the collective.
        (
            [
                rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD), counts=[(WORLD, 2, 3)]),
                rank_state(counts=[(WORLD, 2, 2)]),
            ],
            [1],
        ),
        # A backend that does not count.
        ([rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD)), rank_state("b.py:2 slow")], [1]),
        # Nothing is known of it; rank 1 may be in a collective on its device.
        ([rank_state(*IN_ALL_REDUCE, wait=("barrier", WORLD)), rank_state("a.py:1 sync"), SILENT], [2]),
        # All ranks are in a collective of different groups.
        (
            [
                rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(DATA, 2, 5), (TENSOR, 2, 3)]),
                rank_state(*IN_ALL_REDUCE, wait=("broadcast", TENSOR), counts=[(DATA, 2, 4), (TENSOR, 2, 4)]),
            ],
            [],
        ),
    ],
)
def test_missing_ranks(states: list[Any], missing: list[int]) -> None:
    assert situation(group_of(*states)).missing == missing


def test_a_rank_that_returned_without_the_collective_is_named() -> None:
    waiting = rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD), counts=[(WORLD, 2, 3)])
    assert lines_of(group_of(waiting, rank_state(counts=[(WORLD, 2, 2)])))[-2:] == [
        "others wait for:",
        "  trainer rank 1 on node7 (pid 101): has returned from the call, 1 collective behind in the group of all trainers",
    ]


def test_ranks_in_different_collectives_are_listed_with_their_lag() -> None:
    states = [
        rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(DATA, 2, 5), (TENSOR, 2, 3)]),
        rank_state("torch/distributed/distributed_c10d.py:1 barrier", wait=("barrier", WORLD), counts=[(DATA, 4, 4)]),
    ]
    assert lines_of(group_of(*states)) == [
        "waiting for others:",
        "  rank 0: all_reduce in the data parallel with cp group (ranks 0-1)",
        "    megatron/core/optimizer/clip_grads.py:90 norm",
        "  rank 1: barrier in the group of all trainers, 1 collective behind in the data parallel with cp group",
    ]
    assert "different branches" in str(TrainersStalled(group_of(*states), 600.0))


def test_a_report_of_1024_ranks_is_short() -> None:
    """Ranks that are alike share a line; ranks that do not answer do, too."""
    waiting = rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD), counts=[(WORLD, 1024, 5)])
    slow = [rank_state(f"/home/me/loader.py:{line} read") for line in range(6)]
    states = [SILENT if rank % 100 == 7 else waiting for rank in range(1018)]
    lines = lines_of(group_of(*states, *slow))
    assert len(lines) < 20 and max(map(len, lines)) < 300
    assert "of 1024)" in lines[1]
    missing = lines[lines.index("others wait for:") + 1]
    assert missing.startswith("  trainer rank 7 on node7 (pid 107), and ranks 107, 207, 307")
    many = lines_of(group_of(*slow))
    assert many[0] == "running:" and many[-1] == "  ... and 2 others"


def test_a_service_shows_the_frames_outside_of_the_transport() -> None:
    state = rank_state(
        "ray/_private/worker.py:1 get", "/x/megarl/cluster/calls.py:3 wait", "/x/megarl/train.py:74 run_steps"
    )
    assert process_lines(ProcessInfo("controller", "node7", 9), state) == [
        "controller on node7 (pid 9)",
        "  thread MainThread:",
        "    /x/megarl/train.py:74 run_steps",
    ]


# --- the watch of a call ------------------------------------------------------------------------------


class Looks:
    """A watch with a limit of 400 s that sees `looks` in order, one in 100 s; the last one repeats."""

    def __init__(self, looks: list[GroupStacks], monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks, self.requests, self.clock = looks, [], 0.0
        monkeypatch.setattr(stall.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(
            stall, "_in_thread", lambda read: SimpleNamespace(done=lambda: True, result=lambda: read(False))
        )
        self.watch = StallWatch(self.read, 400.0)

    def read(self, full: bool) -> GroupStacks:
        self.requests.append(full)
        return self.looks[min(len(self.requests), len(self.looks)) - 1]

    def pass_by(self, count: int) -> None:
        for _ in range(count):
            self.watch.check()  # not due
            self.clock += 100.0
            self.watch.check()
            self.watch.check()


def test_a_call_ends_after_looks_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = group_of(rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD)), rank_state(*IN_USER_CODE))
    looks = Looks([hanging], monkeypatch)
    looks.pass_by(LOOKS)
    assert looks.requests == [False] * LOOKS
    with pytest.raises(
        TrainersStalled, match=r"trainer rank 1 on node7 \(pid 101\) failed: others wait for it"
    ) as caught:
        looks.pass_by(1)
    assert looks.requests[-1] and caught.value.failure.place.pid == 101


MOVES = [
    {"digest": 2},
    {"other_limit": True},
    {"io_bytes": (1 << 20) + 1},
    {"cpu_ticks": 101},
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: next(iter(move)))
def test_progress_of_one_rank_is_progress_of_the_call(move: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = group_of(rank_state(*IN_ALL_REDUCE), rank_state(*IN_USER_CODE))
    now = group_of(rank_state(*IN_ALL_REDUCE), rank_state(*IN_USER_CODE, **move))
    assert progress(before, now) and not progress(before, before)
    looks = Looks([*[before] * (LOOKS - 1), now] * 3, monkeypatch)
    looks.pass_by(3 * LOOKS)
    looks = Looks([*[before] * (LOOKS + 1), now], monkeypatch)  # in the look for the report
    looks.pass_by(LOOKS + 1)
    assert looks.requests == [False] * (LOOKS + 1) + [True]


def test_little_io_of_a_log_is_no_progress() -> None:
    before, now = group_of(rank_state(*IN_USER_CODE)), group_of(rank_state(*IN_USER_CODE, io_bytes=5000, cpu_ticks=3))
    assert not progress(before, now)
    assert not progress(group_of(SILENT), group_of(SILENT))
    assert progress(group_of(SILENT), now)


def test_a_stall_of_0_never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_in_thread", lambda read: pytest.fail("a look"))
    StallWatch(lambda full: group_of(), 0.0).check()


# --- capture in the process ---------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.layer_number, self.event = 3, event

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.event.wait()
        return x


@pytest.fixture
def in_a_call():
    """Start a function as a call of the controller, in a thread; returns when it waits."""
    event, threads = threading.Event(), []

    def start(function: Any) -> None:
        worker = RankWorker()
        worker._worker = SimpleNamespace(wait=lambda: function(event))
        call = CallMessage("wait", ())
        threads.append(threading.Thread(target=worker.answer, args=(call,), name="call", daemon=True))
        threads[-1].start()
        assert wait_until(lambda: any(thread["call"] for thread in capture(True)["threads"]), 5)
        time.sleep(0.1)

    yield start
    event.set()
    for thread in threads:
        thread.join()


def test_a_blocked_call_is_described(in_a_call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: list[Layer] = []
    in_a_call(lambda event: (layer.append(Layer(event)), layer[0](torch.ones(1))))
    (thread,) = [thread for thread in capture(True)["threads"] if thread["call"]]
    assert (thread["name"], thread["layer"], thread["backward"], thread["wait"]) == ("call", 3, False, None)
    places = [frame.rpartition("/")[2].split(":")[0] + frame.rpartition(" ")[2] for frame in thread["frames"]]
    assert places == [
        "threading.pywait",
        "threading.pywait",
        "test_stacks.pyforward",
        "test_stacks.py<lambda>",
        "test_stacks.py<lambda>",
    ]
    state = capture(False)
    assert "threads" not in state and capture(False)["digest"] == state["digest"]
    monkeypatch.setattr(capturing, "_groups", lambda: [{"name": "0", "description": "", "size": 2, "count": 8}])
    assert capture(False)["digest"] != state["digest"]
    monkeypatch.undo()
    assert capture(False)["digest"] == state["digest"]
    layer[0].event.set()
    assert wait_until(lambda: capture(False)["digest"] != state["digest"], 5)


def test_idle_threads_and_the_transport_are_left_out() -> None:
    def names(**options: bool) -> set[str]:
        return {thread["name"] for thread in capture(True, **options)["threads"]}

    assert "MainThread" not in names()  # in a function of the transport
    assert "MainThread" not in read_in_thread(names)  # waits for the thread
    assert "MainThread" in read_in_thread(lambda: names(main_thread=True))


def read_in_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_waits_with_other_limits(in_a_call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_call(lambda event: event.wait())
    assert not capture(False)["other_limit"]
    monkeypatch.setattr(capturing, "_OTHER_LIMITS", capturing.re.compile(r"test_stacks\.py:<lambda>$"))
    assert capture(False)["other_limit"]
    monkeypatch.undo()
    for place in ("/x/megarl/weight_sync/sender.py:send", "/x/megarl/megatron/checkpoint/tensor_files.py:write"):
        assert capturing._OTHER_LIMITS.search(place)
    assert not capturing._OTHER_LIMITS.search("/x/megarl/megatron/checkpoint/tensor_files.py:fill")


RANK = """
import json, sys, time
import torch
import torch.distributed as dist
from megarl.cluster.stacks.capture import capture
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
dist.new_group([0], group_desc="ALONE")
dist.barrier()
if rank == 0:
    time.sleep(0.5)  # the recorder notices the end of the barrier
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    print(json.dumps(capture(True, main_thread=True)), flush=True)
time.sleep(1000)
"""


def test_groups_their_counts_and_unfinished_collectives_are_read_from_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        state = json.loads(ranks[0].stdout.readline())  # type: ignore[union-attr]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    world, tensor = state["groups"]
    assert (
        world == {"name": "0", "description": "default_pg", "size": 2, "count": world["count"]} and world["count"] > 0
    )
    assert tensor == {"name": tensor["name"], "description": TENSOR[1], "size": 2, "count": 1}
    assert state["unfinished"] == ["gloo:all_reduce, number 1 of TENSOR_MODEL_PARALLEL_GROUP"]


def test_a_backend_that_does_not_count_and_a_recorder_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        _device_types = ("npu",)

        def _get_backend(self, device: str) -> Any:
            raise RuntimeError("no sequence numbers")

    assert capturing._count(Group()) is None
    monkeypatch.setattr(capturing, "_RECORDERS", ("torch_absent._C.dump", "torch._C.absent_dump"))
    assert capturing._unfinished() == []


def frames_of(file: str, *functions: str, **variables: Any) -> Any:
    """Frames of functions that call each other, the outermost first in `functions`, with local `variables`; innermost first."""
    scope: dict[str, Any] = {"sys": sys, "frames": []}
    calls = [*(f"{function}(**variables)" for function in functions[1:]), "frames.append(sys._getframe())"]
    for function, call in zip(functions, calls, strict=True):
        arguments = ", ".join(variables)
        body = f"    variables = dict(locals())\n    {call}\n"
        exec(compile(f"def {function}({arguments}):\n{body}", file, "exec"), scope)
    scope[functions[0]](**variables)
    return capturing._outwards(scope["frames"][0])[: len(functions)]


def test_the_function_that_user_code_calls_is_named() -> None:
    group = SimpleNamespace(group_name="5")
    frames = frames_of("/x/torch/distributed/distributed_c10d.py", "all_gather_object", "all_gather", group=group)
    assert capturing._wait(frames) == {"function": "all_gather_object", "group": "5"}


def test_a_wait_of_a_pipeline_stage_is_in_the_pipelines_group() -> None:
    """Megatron's communicator has the group as `self.pp_group`."""
    communicator = SimpleNamespace(pp_group=SimpleNamespace(group_name="5"))
    file = "/x/megatron/core/pipeline_parallel/p2p_communication.py"
    assert capturing._wait(frames_of(file, "recv_forward", self=communicator)) == {
        "function": "recv_forward",
        "group": "5",
    }


# --- answers over the socket --------------------------------------------------------------------------

PROCESS = """
import ctypes, sys, time
from megarl.cluster.failures import run
from megarl.cluster.stacks.channel import serve_stacks
serve_stacks()
print("ready", flush=True)
def hold_the_lock(): ctypes.PyDLL(None).sleep(1000)
def sleep(): time.sleep(1000)
run(globals()[sys.argv[1]])
"""


@pytest.fixture
def process():
    processes = []

    def start(function: str) -> int:
        command = [sys.executable, "-c", PROCESS, function]
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "ready\n"
        time.sleep(0.3)
        return processes[-1].pid

    yield start
    for each in processes:
        each.kill()
        each.wait()


def test_a_process_answers_while_its_main_thread_sleeps(process: Any) -> None:
    pid = process("sleep")
    (state,) = read_stacks([pid], True)
    (thread,) = state["threads"]
    assert thread["frames"] == ["<string>:8 sleep"] and (state["problem"], state["state"]) == ("", "S")
    assert socket_path(pid, os.getuid()).parent.stat().st_mode & 0o777 == 0o700


def test_a_process_whose_native_code_holds_the_lock_is_silent(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.5)
    pids = [process("hold_the_lock"), process("sleep")]
    monkeypatch.setenv("PATH", "")
    silent, answering = read_stacks([*pids], True)
    assert "native code holds Python's lock" in silent["problem"] and answering["problem"] == ""
    (line,) = silent["outside"]
    assert "py-spy is not installed" in line
    assert line in process_lines(ProcessInfo("trainer rank 0"), silent)[1]


def test_py_spy_reads_a_silent_process(tmp_path: Path, process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for py-spy: its real output begins with lines about the process."""
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.5)
    program = tmp_path / "py-spy"
    program.write_text(
        '#!/bin/sh\n[ "$1 $2" = "dump --pid" ] || exit 1\necho "Process $3\nPython v3.11\n\nThread 1 (idle)"\n'
    )
    program.chmod(0o755)
    pid = process("hold_the_lock")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert read_stacks([pid], True)[0]["outside"] == ["Thread 1 (idle)"]
    program.write_text("#!/bin/sh\necho Permission Denied >&2; exit 1\n")
    assert read_stacks([pid], True)[0]["outside"] == ["(py-spy cannot read its stack: Permission Denied)"]


def test_a_process_that_has_ended_has_a_problem(process: Any) -> None:
    pid = process("sleep")
    path = socket_path(pid, os.getuid())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert "cannot be reached" in read_stacks([pid], False)[0]["problem"]
    assert path.exists()
    process("sleep")  # a new process removes sockets of ended ones
    assert not path.exists()


def test_an_answer_that_fails_is_a_problem_of_the_process() -> None:
    with answering(lambda full: {"a": 1 / 0}):
        (state,) = read_in_thread(lambda: read_stacks([os.getpid()], True))
        assert "its answer failed: ZeroDivisionError" in state["problem"]
    assert not socket_path(os.getpid(), os.getuid()).exists()


def test_files_and_child_processes_count(process: Any, tmp_path: Path) -> None:
    before = channel.with_system_facts(os.getpid(), {}, False)
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    code = "import time\nend = time.process_time() + 1.2\nwhile time.process_time() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", code])
    assert wait_until(
        lambda: channel.with_system_facts(os.getpid(), {}, False)["cpu_ticks"] - before["cpu_ticks"] > 100, 30
    )
    assert child.poll() is None or child.wait() == 0
    child.wait()
    after = channel.with_system_facts(os.getpid(), {}, False)
    assert after["io_bytes"] - before["io_bytes"] >= 3 << 20 and after["cpu_ticks"] - before["cpu_ticks"] > 100


def test_groups_pass_the_socket_as_json() -> None:
    group = group_of(rank_state(*IN_USER_CODE), SILENT)
    assert GroupStacks.from_json(json.loads(json.dumps(asdict(group)))) == GroupStacks(
        group.name, list(group.places), list(group.stacks), group.call, group.seconds
    )
