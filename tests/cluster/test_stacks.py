"""Stacks of processes: capture in the process, and answers over the socket."""

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
from megarl.cluster.stacks import channel
from megarl.cluster.stacks.capture import capture
from megarl.cluster.stacks.channel import answering, read_stacks, socket_path
from megarl.cluster.stacks.report import GroupStacks, process_lines
from megarl.cluster.torchrun.rank import CallMessage, RankWorker
from tests.support.cluster_workers import ROOT, wait_until
from tests.support.rank_states import IN_USER_CODE, SILENT, TENSOR, group_of, rank_state

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


def test_collectives_of_nccl_come_from_its_own_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's builds with NCCL have a second recorder, which `_dump_fr_trace_json` does not read."""

    def dump(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
        entry = {"retired": False, "state": "started", "is_p2p": False, "collective_seq_id": 7, "p2p_seq_id": 0}
        named = {"profiling_name": "nccl:all_reduce", "process_group": ["3", "TENSOR_MODEL_PARALLEL_GROUP"]}
        return json.dumps({"entries": [{**entry, **named}]}).encode()

    module = torch._C._distributed_c10d
    monkeypatch.setattr(module, "_dump_nccl_trace_json", dump, raising=False)
    assert "nccl:all_reduce, number 7 of TENSOR_MODEL_PARALLEL_GROUP" in capturing._unfinished()


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


def test_a_slow_answer_does_not_block_requests_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """`megarl doctor` reads the stacks of a whole run, meanwhile a node leaves. A reader that does not read ends its thread alone."""
    monkeypatch.setattr(channel, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(channel, "MOST_ANSWERS", 2)
    slow = threading.Event()

    def answer(full: bool) -> Any:
        assert slow.wait(20)
        return "x" * (8 << 20)

    pid, user = os.getpid(), os.getuid()
    with answering(answer, lambda words: {"words": words}):
        deaf = [channel.request(pid, user, True)]
        for number in ("1", "2"):
            connection = channel.request_words(pid, user, ["leave", number])
            assert channel.receive(connection, time.monotonic() + 10) == {"words": ["leave", number]}
        deaf.append(channel.request(pid, user, True))
        slow.set()  # all threads send
        for _ in range(3):
            assert len(channel.receive(channel.request(pid, user, True), time.monotonic() + 10)) == 8 << 20
        for connection in deaf:
            connection.close()


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
