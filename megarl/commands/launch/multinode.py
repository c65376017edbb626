"""One run over several nodes: ``python -m megarl.commands.launch.multinode RECIPE [key=value ...]`` on each of them.

    python -m megarl.commands.launch.multinode -- COMMAND ...     any command, in place of training

Node rank 0 starts Ray's head and waits until every node and device has joined; then it runs the
command with RAY_ADDRESS set. The others join and wait. All return the command's exit status, and each
stops what it started itself, nothing else. Where RAY_ADDRESS is set already (KubeRay), the command
joins that cluster. See `topology` for the environment that is understood.
"""

from __future__ import annotations

import glob
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from megarl.cluster.orphan_reaper import VARIABLE, OrphanReaper, sweep
from megarl.cluster.ray import env
from megarl.commands.launch.rendezvous import Attendance, RollCall
from megarl.commands.launch.topology import Topology, read_topology
from megarl.platform.kinds import KINDS, kind_of

# Left to the command to end by itself after a signal: it may be writing a checkpoint, which it then completes. A second
# signal ends it at once.
STOP_SECONDS = 300.0
QUIET_SECONDS = 10.0  # until that is said
RAY_SECONDS = 8.0  # left to Ray
RAY_ATTEMPTS = 3  # at starting it on a node
_RAYS_OWN = {"CPU": "--num-cpus", "GPU": "--num-gpus"}  # resources that `ray start` has flags for
USAGE = 2  # exit status where nothing was started because something is wrong with what was given


class _Interrupted(Exception):
    """A signal that ends the run."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number


class _NodeTold(_Interrupted):
    """Another node was told to end. This one may get a signal of its own yet, which then is its first."""


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status."""
    try:
        command, device = _command(arguments)
        topology = read_topology(environ)
    except ValueError as error:
        _say(str(error))
        return USAGE
    with _signals():
        try:
            if topology.nodes == 1 or environ.get("RAY_ADDRESS"):
                with _child(command, dict(environ)) as process:
                    return _wait(process)
            guard = OrphanReaper()
            try:
                run = _run_head if topology.is_head else _run_member
                return run(topology, command, device, dict(environ) | guard.env)
            finally:
                guard.close()
        except _Interrupted as interruption:
            return interruption.status


def ray_command(topology: Topology, device: str) -> list[str]:
    """The ``ray start`` of this node: in the foreground, no dashboard, ports that the system chooses."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if topology.is_head:
        command += ["--head", f"--port={topology.port}", f"--node-ip-address={topology.node_ip or topology.master}"]
        command += ["--include-dashboard=false", "--no-monitor", f"--ray-client-server-port={topology.port + 2}"]
    else:
        command += [f"--address={topology.ray_address}"]
        command += [f"--node-ip-address={topology.node_ip}"] if topology.node_ip else []
    resources = {node_resource(topology.node_rank): 1}
    if topology.devices_per_node is not None:
        resource = _resource(device)
        if resource in _RAYS_OWN:
            command.append(f"{_RAYS_OWN[resource]}={topology.devices_per_node}")
        else:
            resources[resource] = topology.devices_per_node
    return [*command, f"--resources={json.dumps(resources)}"]


def _resource(device: str) -> str:
    """What Ray counts the devices of a node as."""
    return kind_of(device).ray_resource or "CPU"


def node_resource(rank: int) -> str:
    """The Ray resource by which a node says which it is."""
    return f"megarl_node_{rank}"


# --- the two roles ------------------------------------------------------------------------------


def _run_head(topology: Topology, command: list[str], device: str, environ: dict[str, str]) -> int:
    deadline = time.monotonic() + topology.join_timeout
    token = env.authentication(environ)
    environ = environ | token
    os.environ.update(token)  # this process too asks Ray who is there
    calls = RollCall(topology.node_ip or topology.master, topology.port + 1, topology.nodes, token)
    status = 1
    try:
        with _ray(topology, device, environ) as (ray_process, log):
            problem = _gather(topology, device, calls, ray_process, deadline)
            if problem:
                _say(problem)
                if ray_process.poll() is not None:
                    _say(_tail(log))
                return status
            calls.begin()
            _say(f"{topology.nodes} nodes have joined {topology.ray_address}")
            with _child(command, environ | {"RAY_ADDRESS": topology.ray_address}) as process:
                status = _wait(process, _Members(calls).watch)
            return status
    except _Interrupted as interruption:
        status = interruption.status
        raise
    finally:
        calls.finish(status)


def _run_member(topology: Topology, _command: list[str], device: str, environ: dict[str, str]) -> int:
    try:
        attendance = Attendance(
            topology.master, topology.port + 1, topology.node_rank, topology.nodes, topology.join_timeout
        )
    except TimeoutError as error:
        _say(f"node rank {topology.node_rank}: {error}: is node rank 0 running, and MASTER_ADDR the same everywhere?")
        return 1
    try:
        while not attendance.ready and not attendance.over:
            time.sleep(0.1)
        if attendance.over:
            return _told(topology, attendance)
        cause = _stay_in_ray(topology, device, environ | attendance.environment, attendance)
        if cause:
            attendance.fail(cause)
            _say(f"node rank {topology.node_rank}: {cause}")
            return 1
        return _told(topology, attendance)
    finally:
        attendance.close()


def _stay_in_ray(topology: Topology, device: str, environ: dict[str, str], attendance: Attendance) -> str | None:
    """Be one of Ray's nodes until the run is over; returns why that ended before.

    Until all nodes have joined it is tried again: Ray gives up where its head, with many nodes at once, does not answer
    within 30 s, and where two nodes of one machine start in the same moment (they take the same names for their sockets).
    """
    for attempt in range(1, RAY_ATTEMPTS + 1):
        with _ray(topology, device, environ) as (process, log):
            try:
                _until_over(process, attendance)
            except _Interrupted:
                attendance.ask_to_end()
                _say(
                    f"node rank {topology.node_rank}: node rank 0 is asked to end the run; once more ends this node at once"
                )
                _until_over(process, attendance, time.monotonic() + STOP_SECONDS)
                if not attendance.over:
                    raise
            if attendance.over:
                return None
            said = _tail(log)
        sweep(environ[VARIABLE])  # what the attempt has left
        cause = f"Ray ended with exit code {process.returncode}. Its last words:\n{said}"
        if attendance.begun or attempt == RAY_ATTEMPTS:
            break
        _say(f"node rank {topology.node_rank}: {cause}\ntrying again ({attempt + 1} of {RAY_ATTEMPTS})")
    return cause


def _until_over(process: subprocess.Popen[bytes], attendance: Attendance, deadline: float = math.inf) -> None:
    """Wait for the end of the run, of this node's Ray, or for the deadline."""
    while process.poll() is None and not attendance.over and time.monotonic() < deadline:
        time.sleep(0.1)


def _told(topology: Topology, attendance: Attendance) -> int:
    if attendance.status is not None:
        if attendance.status:
            what = "the run ended" if attendance.begun else "it ended before all nodes had joined,"
            _say(f"node rank {topology.node_rank}: {what} with exit status {attendance.status}; node rank 0 says why")
        return attendance.status
    reason = f"refused by the head: {attendance.refusal}" if attendance.refusal else "the head is gone"
    _say(f"node rank {topology.node_rank}: {reason}")
    return 1


def _gather(
    topology: Topology, device: str, calls: RollCall, ray_process: subprocess.Popen[bytes], deadline: float
) -> str | None:
    """Wait until every node and device is in Ray. Returns what is wrong; None when all are there."""
    import ray

    from megarl.cluster.ray.signals import keep_sigterm_handler

    connected = False
    missing: list[int] = list(range(topology.nodes))
    have = want = 0
    try:
        while time.monotonic() < deadline:
            if ray_process.poll() is not None:
                return f"Ray's head ended with exit code {ray_process.returncode}"
            for rank, cause in calls.failed().items():
                return f"node rank {rank}: {cause}"
            for rank in calls.to_end():
                return f"node rank {rank} was told to end"
            if not connected:
                connected = _connect(topology)
                if connected:
                    calls.open()
                continue
            resources = ray.cluster_resources()
            missing = [rank for rank in range(topology.nodes) if node_resource(rank) not in resources]
            have = int(resources.get(_resource(device), 0))
            want = topology.nodes * (topology.devices_per_node or 0)
            if not missing and have >= want:
                return None
            time.sleep(0.2)
    finally:
        if connected:
            with keep_sigterm_handler():
                ray.shutdown()
    ranks = ", ".join(map(str, missing))
    if missing:
        return (
            f"node rank{'s' * (len(missing) > 1)} {ranks} of {topology.nodes} did not join within "
            f"{topology.join_timeout:.0f} s (MEGARL_JOIN_TIMEOUT). Start this command on every node, with "
            f"MASTER_ADDR={topology.master}; ports {topology.port} and {topology.port + 1} must be open there."
        )
    return f"all nodes have joined, with {have} devices in place of {want}: see DEVICES_PER_NODE on each."


def _connect(topology: Topology) -> bool:
    """Connect to Ray's head; False where it does not listen yet (ray.init would wait for minutes)."""
    import ray

    from megarl.cluster.ray.signals import keep_sigterm_handler

    try:
        socket.create_connection((topology.master, topology.port), timeout=2).close()
        with keep_sigterm_handler():
            ray.init(address=topology.ray_address, logging_level="critical", log_to_driver=False)
    except OSError:
        time.sleep(0.2)
        return False
    return True


class _Members:
    """Hears of nodes that have left, and says it once of each, and of those that are to."""

    def __init__(self, calls: RollCall) -> None:
        self._calls = calls
        self._told: set[int] = set()

    def watch(self) -> None:
        """Raises _NodeTold where a node was told to end: the run is to end in order, with all of its nodes."""
        for rank in self._calls.to_end():
            _say(f"node rank {rank} was told to end, which ends the run")
            raise _NodeTold(signal.SIGTERM)
        for rank in set(self._calls.absent()) - self._told:
            self._told.add(rank)
            cause = self._calls.failed().get(rank)
            _say(f"node rank {rank} has left" + (f": {cause}" if cause else ""))


# --- processes ----------------------------------------------------------------------------------


@contextmanager
def _ray(topology: Topology, device: str, environ: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """This node's Ray, while it is needed, and the file that it writes to."""
    with (
        tempfile.NamedTemporaryFile(prefix="megarl-ray-", suffix=".log") as log,
        _child(ray_command(topology, device), environ, output=log, patience=RAY_SECONDS) as process,
    ):
        yield process, Path(log.name)


@contextmanager
def _child(
    command: list[str], environ: dict[str, str], *, output: IO[bytes] | None = None, patience: float = STOP_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended at the latest with the block."""
    process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
    why: BaseException | None = None
    try:
        yield process
    except BaseException as error:
        why = error
        raise
    finally:
        _end(process, patience, own_signals=0 if isinstance(why, _NodeTold) else 1)


def _end(process: subprocess.Popen[bytes], patience: float, own_signals: int) -> None:
    """Ask a process to end, wait for it, and kill its group where its time is up or a second signal comes.
    `own_signals`: how many of those that this launcher is to get have come."""
    if process.poll() is None:
        process.terminate()
    deadline, quiet = time.monotonic() + patience, time.monotonic() + QUIET_SECONDS
    while True:
        try:
            process.wait(max(0.0, min(deadline, quiet) - time.monotonic()))
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                break
            quiet = math.inf
            _say(f"waiting for the run to end, {patience:.0f} s at most; one more signal ends it at once")
        except _Interrupted:
            own_signals += 1
            if own_signals > 1:
                break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: subprocess.Popen[bytes], meanwhile: Callable[[], None] = lambda: None) -> int:
    """The exit status of `process`; 128 + n where signal n ended it, as a shell says it."""
    while process.poll() is None:
        time.sleep(0.1)
        meanwhile()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def _signals() -> Iterator[None]:
    """Ctrl-C, TERM and HUP end the run in order: whatever was started is stopped on the way out."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise _Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


# --- what was given -----------------------------------------------------------------------------


def _command(arguments: list[str]) -> tuple[list[str], str]:
    """What to run, and the kind of device it runs on. Raises ValueError for a recipe that does not load."""
    if not arguments or arguments[0] in ("-h", "--help"):
        raise ValueError("usage: launch/multinode.sh RECIPE [key=value ...]   or   launch/multinode.sh -- COMMAND ...")
    if arguments[0] == "--":
        if len(arguments) == 1:
            raise ValueError("no command after --")
        return arguments[1:], _present_device()
    from megarl.preflight.load import load_recipe

    device = load_recipe(arguments[0], arguments[1:]).cluster.device
    command = [sys.executable, "-m", "megarl", "train", *arguments]
    return command, _present_device() if device == "auto" else device


def _present_device() -> str:
    """The kind of accelerator whose device files this machine has."""
    return next(kind.name for kind in KINDS if not kind.files or glob.glob(kind.files))


def _say(text: str) -> None:
    print(f"megarl multinode: {text}", file=sys.stderr, flush=True)


def _tail(log: Path) -> str:
    """A log's last lines, without the frames of tracebacks."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip() and not line.startswith((" ", "Traceback"))][-8:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
