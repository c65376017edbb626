"""Run one command on several nodes: ``python -m megarl.commands.launch.multinode RECIPE [key=value ...]`` on each node.

    python -m megarl.commands.launch.multinode -- COMMAND ...     any command instead of training

Node rank 0 starts Ray's head, waits until every node and device has joined, and runs the command with RAY_ADDRESS
set. The other nodes join and wait. Every node returns the command's exit status and ends only the processes that it
started. If RAY_ADDRESS is already set (KubeRay), the command joins that cluster. A single node only starts Ray if
DEVICES_PER_NODE is set; otherwise the command starts it. See `topology` for the environment variables.
"""

from __future__ import annotations

import glob
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from megarl.cluster.orphan_reaper import VARIABLE, OrphanReaper, sweep
from megarl.cluster.ray.env import node_resource
from megarl.commands.launch.join_secret import JoinFile, secret_of_environment
from megarl.commands.launch.joining import RayConnection, join, taken_port
from megarl.commands.launch.members import Members, NodeRelease
from megarl.commands.launch.ray_start import device_resource, ray_command
from megarl.commands.launch.rendezvous import RendezvousClient, RendezvousServer
from megarl.commands.launch.topology import Topology, address_notice, loopback_problem, read_topology
from megarl.errors import RecipeError, pluralize, with_kind
from megarl.platform.kinds import KINDS

# Time for the command to end after a signal; it may be completing a checkpoint. A second signal ends it at once.
STOP_SECONDS = 300.0
QUIET_SECONDS = 10.0  # wait until the launcher prints that it waits
RAY_SECONDS = 8.0  # time for Ray to end
RAY_ATTEMPTS = 3  # attempts to start Ray on a node
RUNS_DIR = "runs"  # of other commands than training: the default of `runs_dir`
USAGE = 2  # exit status for invalid arguments or environment


@dataclass(frozen=True)
class _Task:
    """A command, the device kind and `runs_dir` of its run, and how nodes leave it.

    least_devices: with which the run goes on without nodes that do not join (`cluster.elastic`); None: all nodes must join.
    """

    command: list[str]
    device: str
    runs_dir: str
    release: NodeRelease
    least_devices: int | None = None


class _Interrupted(Exception):
    """A signal ends the run."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number


class _PeerInterrupted(_Interrupted):
    """A signal on another node ends the run. A later signal on this node counts as its first."""


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run the launcher of this node and return the exit status."""
    try:
        task = _task(arguments)
        topology = read_topology(environ)
    except ValueError as error:
        _say(with_kind(error) if isinstance(error, RecipeError) else str(error))
        return USAGE
    with _signals():
        try:
            if environ.get("RAY_ADDRESS") or (topology.nodes == 1 and not environ.get("DEVICES_PER_NODE")):
                with _child(task.command, dict(environ)) as process:
                    return _wait(process)
            if notice := address_notice(topology):
                _say(f"node rank {topology.node_rank}: {notice}")
            reaper = OrphanReaper()
            join_file = JoinFile(Path(topology.join_dir or task.runs_dir), topology)
            try:
                run = _run_head if topology.is_head else _run_member
                return run(topology, task, dict(environ) | reaper.env, join_file)
            except OSError as error:
                _say(f"node rank {topology.node_rank}: {error}")
                return 1
            finally:
                join_file.delete()
                reaper.close()
        except _Interrupted as interruption:
            return interruption.status


# --- head and member nodes ----------------------------------------------------------------------


def _run_head(topology: Topology, task: _Task, environ: dict[str, str], join_file: JoinFile) -> int:
    deadline = time.monotonic() + topology.join_timeout
    problem = loopback_problem(topology)
    if problem is not None:
        _say(problem)
        return 1
    busy_port = taken_port(topology)
    if busy_port is not None:
        needed = f"Ray and the launchers need {topology.port} to {topology.port + 2}"
        _say(f"port {busy_port} of this machine is in use: {needed}. Set MASTER_PORT to another port on every node.")
        return 1
    secret = secret_of_environment(environ)
    if secret is None:
        variables = join_file.write(environ)
        environ, secret = environ | variables, variables["RAY_AUTH_TOKEN"]
        os.environ.update(variables)  # this process connects to Ray as well
    server = RendezvousServer(topology.node_ip or topology.master, topology.port + 1, topology.nodes, secret)
    status = 1
    try:
        with _ray(topology, task.device, environ) as (ray_process, log):
            problem, missing = _wait_for_nodes(topology, task, server, ray_process, deadline)
            if problem:
                _say(problem)
                if ray_process.poll() is not None:
                    _say(_tail(log))
                return status
            server.begin()
            joined = topology.nodes - len(missing)
            _say(f"{'1 node has' if joined == 1 else f'{joined} nodes have'} joined {topology.ray_address}")
            with _child(task.command, environ | {"RAY_ADDRESS": topology.ray_address}) as process:
                status = _wait(process, Members(server, task.release, _say, _end_run, missing).watch)
            return status
    except _Interrupted as interruption:
        status = interruption.status
        raise
    finally:
        server.finish(status)


def _run_member(topology: Topology, task: _Task, environ: dict[str, str], join_file: JoinFile) -> int:
    client, variables = join(topology, environ, join_file)
    try:
        while not client.ready and not client.over:
            time.sleep(0.1)
        if client.over:
            return _report_end(topology, client)
        cause = _stay_in_ray(topology, task.device, environ | variables, client)
        if cause:
            client.fail(cause)
            _say(f"node rank {topology.node_rank}: {cause}")
            return 1
        return _report_end(topology, client)
    finally:
        client.close()


def _stay_in_ray(topology: Topology, device: str, environ: dict[str, str], client: RendezvousClient) -> str | None:
    """Run this node's Ray until the run is over; returns the cause if Ray ends earlier, else None.

    Retries until all nodes have joined. Ray gives up if its head, with many nodes joining, does not reply within 30 s,
    and if two nodes on one machine start at the same moment and choose the same socket names.
    """
    for attempt in range(1, RAY_ATTEMPTS + 1):
        with _ray(topology, device, environ) as (process, log):
            try:
                _wait_until_over(process, client)
            except _Interrupted:
                client.request_end()
                _say(
                    f"node rank {topology.node_rank}: waiting for node rank 0, which lets this node leave or ends the run; one more "
                    "signal ends this node at once"
                )
                _wait_until_over(process, client, time.monotonic() + STOP_SECONDS)
                if not client.over:
                    raise
            if client.over:
                return None
            output = _tail(log)
        sweep(environ[VARIABLE])  # processes that Ray has left
        cause = f"Ray ended with exit code {process.returncode}. Its last output:\n{output}"
        if client.begun or attempt == RAY_ATTEMPTS:
            break
        _say(f"node rank {topology.node_rank}: {cause}\ntrying again ({attempt + 1} of {RAY_ATTEMPTS})")
    return cause


def _wait_until_over(process: subprocess.Popen[bytes], client: RendezvousClient, deadline: float = math.inf) -> None:
    """Wait for the end of the run, the end of this node's Ray, or the deadline."""
    while process.poll() is None and not client.over and time.monotonic() < deadline:
        time.sleep(0.1)


def _report_end(topology: Topology, client: RendezvousClient) -> int:
    """Print why the run has ended, unless it succeeded, and return this node's exit status."""
    if client.released:
        _say(f"node rank {topology.node_rank}: this node has left, and the run goes on")
        return 0
    if client.status is not None:
        if client.status:
            event = "the run ended" if client.begun else "the run ended before all nodes had joined,"
            _say(f"node rank {topology.node_rank}: {event} with exit status {client.status}; see node rank 0")
        return client.status
    reason = f"refused by the head: {client.refusal}" if client.refusal else "the head has ended"
    _say(f"node rank {topology.node_rank}: {reason}")
    return 1


def _wait_for_nodes(
    topology: Topology, task: _Task, server: RendezvousServer, ray_process: subprocess.Popen[bytes], deadline: float
) -> tuple[str | None, list[int]]:
    """Wait until every node and device has joined Ray. Returns the problem, if there is one, and the ranks of nodes without which the
    run goes on."""
    import ray

    from megarl.cluster.ray.signals import keep_sigterm_handler

    connecting = RayConnection(topology)
    connected = False
    missing: list[int] = list(range(topology.nodes))
    present = expected = 0
    try:
        while time.monotonic() < deadline:
            if ray_process.poll() is not None:
                return f"Ray's head ended with exit code {ray_process.returncode}", []
            for rank, cause in server.failed().items():
                return f"node rank {rank}: {cause}", []
            for rank in server.ending():
                return f"node rank {rank} received a signal to end", []
            if not connected:
                connected = connecting.poll()
                if connected:
                    server.open()
                continue
            resources = ray.cluster_resources()
            missing = [rank for rank in range(topology.nodes) if node_resource(rank) not in resources]
            present = int(resources.get(device_resource(task.device), 0))
            expected = topology.nodes * (topology.devices_per_node or 0)
            if not missing and present >= expected:
                return None, []
            time.sleep(0.2)
    finally:
        if connected:
            with keep_sigterm_handler():
                ray.shutdown()
    if not missing:
        problem = (
            f"all nodes have joined, with {present} devices instead of {expected}: check DEVICES_PER_NODE on each node."
        )
        return problem, []
    return _without(topology, task, missing, present)


def _without(topology: Topology, task: _Task, missing: list[int], devices: int) -> tuple[str | None, list[int]]:
    """Return the result of `_wait_for_nodes` after the time for joining. devices: number that has joined."""
    late = (
        f"node rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {topology.nodes} did not join within "
        f"{topology.join_timeout:.0f} s (MEGARL_JOIN_TIMEOUT)"
    )
    least = task.least_devices
    if least is not None and devices >= least:
        _say(f"{late}: the run goes on without (cluster.elastic), with {pluralize(devices, 'device')}")
        return None, missing
    too_few = "" if least is None else f", and the run needs {least} devices to go on, {devices} have joined"
    return (
        f"{late}{too_few}. Start this command on every node, with MASTER_ADDR={topology.master}; ports {topology.port} and "
        f"{topology.port + 1} must be open there."
    ), []


def _end_run() -> None:
    raise _PeerInterrupted(signal.SIGTERM)


# --- processes ----------------------------------------------------------------------------------


@contextmanager
def _ray(topology: Topology, device: str, environ: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run this node's Ray within the block; yields its process and its output file."""
    with (
        tempfile.NamedTemporaryFile(prefix="megarl-ray-", suffix=".log") as log,
        _child(ray_command(topology, device), environ, output=log, patience=RAY_SECONDS) as process,
    ):
        yield process, Path(log.name)


@contextmanager
def _child(
    command: list[str], environ: dict[str, str], *, output: IO[bytes] | None = None, patience: float = STOP_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a new process group, which ends at the latest with the block."""
    process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
    cause: BaseException | None = None
    try:
        yield process
    except BaseException as error:
        cause = error
        raise
    finally:
        _end(process, patience, signals=0 if isinstance(cause, _PeerInterrupted) else 1)


def _end(process: subprocess.Popen[bytes], patience: float, signals: int) -> None:
    """Terminate a process, wait for it, and kill its group after `patience` seconds or at the second signal.

    signals: number of signals that this launcher has already received.
    """
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
            signals += 1
            if signals > 1:
                break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: subprocess.Popen[bytes], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Wait for `process` and return its exit status, 128 + n if signal n ended it. Calls `meanwhile` every 0.1 s."""
    while process.poll() is None:
        time.sleep(0.1)
        meanwhile()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def _signals() -> Iterator[None]:
    """Raise `_Interrupted` on Ctrl-C, TERM and HUP, so that all started processes are ended in order."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise _Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


# --- arguments and output -----------------------------------------------------------------------


def _task(arguments: list[str]) -> _Task:
    """Return what to run. Raises ValueError for wrong usage or an invalid recipe."""
    if not arguments:
        raise ValueError("usage: launch/multinode.sh RECIPE [key=value ...]   or   launch/multinode.sh -- COMMAND ...")
    if arguments[0] == "--":
        if len(arguments) == 1:
            raise ValueError("no command after --")
        return _Task(arguments[1:], _present_device(), RUNS_DIR, NodeRelease(None, 0.0))
    from megarl.preflight.elastic import least_devices, may_shrink
    from megarl.preflight.load import load_recipe

    recipe = load_recipe(arguments[0], arguments[1:])
    device = recipe.cluster.device
    command = [sys.executable, "-m", "megarl", "train", *arguments]
    release = NodeRelease(Path(recipe.runs_dir).absolute() / recipe.name, recipe.train.grace_seconds)
    least = least_devices(recipe) if may_shrink(recipe) else None
    return _Task(command, _present_device() if device == "auto" else device, recipe.runs_dir, release, least)


def _present_device() -> str:
    """Name of the first device kind with device files on this machine."""
    return next(kind.name for kind in KINDS if not kind.files or glob.glob(kind.files))


def _say(text: str) -> None:
    print(f"megarl multinode: {text}", file=sys.stderr, flush=True)


def _tail(log: Path) -> str:
    """Last lines of a log, without the frames of tracebacks."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip() and not line.startswith((" ", "Traceback"))][-8:])


if __name__ == "__main__":
    status = main(sys.argv[1:], os.environ)
    sys.stderr.flush()
    os._exit(status)  # a thread may still wait for Ray
