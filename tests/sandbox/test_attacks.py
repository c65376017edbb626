"""No attack of tests/support/sandbox_attacks.py succeeds, and none leaves traces."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl import sandbox
from tests.support.sandbox_attacks import ATTACKS, PREAMBLE, Attack
from tests.support.sandbox_calls import CALL_THEM, CALLS
from tests.support.sandbox_machine import needs_sandbox

pytestmark = needs_sandbox
LIMITS = sandbox.Limits(
    cpu_seconds=20, wall_seconds=30, memory_mb=200, scratch_files=300, output_kb=64, scratch_mb=8, processes=8
)
SHORT = {
    "crash": replace(LIMITS, cpu_seconds=2),
    "cpu": replace(LIMITS, cpu_seconds=0.3),
    "wall": replace(LIMITS, wall_seconds=1),
}
REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES)


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Targets around the sandbox: a secret, listening sockets, processes."""
    folder = tmp_path_factory.mktemp("around")
    (folder / "secret").write_text("secret")
    abstract = f"megarl-{uuid.uuid4()}"
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("MEGARL_TEST_SECRET", "secret")
        unix.bind(str(folder / "socket"))
        hidden.bind("\0" + abstract)
        for listener in (unix, hidden):
            listener.listen()
        yield {
            "secret_file": str(folder / "secret"),
            "port": tcp.getsockname()[1],
            "unix_socket": str(folder / "socket"),
            "abstract_socket": abstract,
            "caller": os.getpid(),
            "victim": victim.pid,
            "token": uuid.uuid4().hex,
        }
    assert victim.poll() is None, "an attack ended a process outside"
    victim.kill()
    victim.wait()


def process_namespaces() -> set[str]:
    """Namespaces of all processes, without the sandboxes of test files that run at the same time as this one."""
    namespaces = set()
    for process in psutil.process_iter():
        try:
            of_other_files = [
                parent for parent in process.parents() if parent.ppid() == os.getppid() and parent.pid != os.getpid()
            ]
            if not of_other_files:
                namespaces.add(os.readlink(f"/proc/{process.pid}/ns/pid"))
        except (OSError, psutil.Error):
            continue  # it is gone, or is not ours to see
    return namespaces


def shared_things() -> dict[str, Any]:
    """Traces that a run could leave on this machine."""
    return {
        "memory": [name for name in os.listdir("/dev/shm") if name in ("x", "mine")],
        "mounts": [
            line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if "/newroot" in line or "/oldroot" in line
        ],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "hostname": socket.gethostname(),
        "here": sorted(os.listdir()),
    }


def attack_once(attack: Attack, around: dict[str, Any]) -> sandbox.Result:
    source = PREAMBLE + attack.source + "\nsys.stdout.write('held\\n')\n"
    return sandbox.run(source, json.dumps(around) + "\n", SHORT.get(attack.limit or "", LIMITS))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_fails_and_leaves_nothing(attack: Attack, around: dict[str, Any]) -> None:
    namespaces, before = process_namespaces(), shared_things()
    result = attack_once(attack, around)
    assert "BREACH" not in result.stdout, result
    if attack.limit == "crash":
        assert (result.limit in (None, "cpu") and not result.ok) or result.stdout == "held\n", result
    elif attack.limit:
        assert result.limit == attack.limit, result
    else:
        assert result.limit is None and result.stdout.endswith("held\n"), result
    assert process_namespaces() <= namespaces, "processes of the sandbox are left"
    assert shared_things() == before


def test_attack_names_are_unique() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 50


@pytest.fixture(scope="module")
def answers() -> dict[str, int]:
    result = sandbox.run(f"CALLS = {CALLS!r}\n{CALL_THEM}")
    assert result.ok, result
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "call", [*CALLS, *(f"clone_new_{kind}" for kind in ["ns", "cgroup", "uts", "ipc", "user", "pid", "net"])]
)
def test_a_forbidden_system_call_is_refused(call: str, answers: dict[str, int]) -> None:
    if call not in answers:
        pytest.skip(f"{os.uname().machine} has no {call}")
    assert answers[call] in REFUSED, errno.errorcode.get(answers[call], "it worked")


def test_concurrent_runs_are_isolated() -> None:
    """One run leaves a file, processes and a socket while the other looks for them."""
    from concurrent.futures import ThreadPoolExecutor

    leave = "import os, time; open('/tmp/mine', 'w').write('x'); os.fork(); print(os.getpid()); time.sleep(1)"
    look = (
        "import os, time; time.sleep(0.4); print(os.listdir('/tmp'), os.listdir('/dev/shm'))\n"
        "for pid in range(3, 100):\n"
        "    try: os.kill(pid, 9) if pid != os.getpid() else None; print('killed', pid) if pid != os.getpid() else None\n"
        "    except ProcessLookupError: pass"
    )
    with ThreadPoolExecutor(2) as threads:
        left, seen = threads.map(sandbox.run, (leave, look))
    assert left.ok and seen.stdout == "[] []\n", (left, seen)


def test_all_processes_end_with_the_caller(tmp_path: Path) -> None:
    """A killed caller ends its sandbox, including daemons in it."""
    before = process_namespaces()
    program = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
    caller = subprocess.Popen([sys.executable, "-c", f"from megarl import sandbox; sandbox.run({program!r})"])
    deadline = 200
    while not process_namespaces() - before and deadline:
        deadline -= 1
        time.sleep(0.05)
    assert deadline, "the sandbox never started"
    time.sleep(0.3)  # it is watched by now
    caller.kill()
    caller.wait()
    for _ in range(100):
        if process_namespaces() <= before:
            return
        time.sleep(0.05)
    raise AssertionError("processes of the sandbox are left")
