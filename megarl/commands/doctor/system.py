"""Checks of clocks, limits, memory, disks, the sandbox and the Hugging Face hub."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine, existing_path
from megarl.commands.doctor.platform_detection import platform_of
from megarl.errors import pluralize
from megarl.hf.hub.errors import without_secrets
from megarl.platform.kinds import KINDS
from megarl.platform.load import container_memory
from megarl.preflight.run_directory import LEAST_FREE_BYTES

GIB = 1 << 30
_EARLIEST_TIME = 1_735_689_600  # 2025-01-01; an earlier wall clock was never set
_CLUSTER_FILES, _FILES = 32768, 4096  # open files: Ray keeps a connection to every worker
_STORE_LEAST, _STORE_SHARE = 256 << 20, 0.3  # object store of a private Ray, as in megarl/cluster/ray/start.py
_PROCESS_MEMORY = 2 * GIB  # a process with torch, Megatron or vLLM and a tiny model: 1 to 1.5 GiB measured
_HUB_SECONDS = 3.0


@check(
    "clocks",
    "the wall clock agrees with the monotonic clock, and with NTP; in a Ray cluster, with the controller's clock",
)
def clocks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    wall, steady = machine.clocks()
    time.sleep(0.2)
    later, steadier = machine.clocks()
    drift = (later - wall) - (steadier - steady)
    if wall < _EARLIEST_TIME:
        yield fail(
            f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(wall))}", "set it: TLS certificates will be invalid"
        )
    elif abs(drift) > 0.05:
        text = f"the wall clock was moved by {drift:+.2f} s within 0.2 s"
        yield warning(text, "times in logs and traces will jump: use a single time service (chronyc sources)")
    elif (synchronized := _synchronized(machine)) is False:
        yield warning(
            "the clock is not synchronized by NTP",
            "start chronyd or systemd-timesyncd; logs of nodes cannot be compared",
        )
    else:
        yield ok("steady, " + ("synchronized by NTP" if synchronized else "NTP state unknown (in a container?)"))


def _synchronized(machine: Machine) -> bool | None:
    """Return True if NTP synchronizes the clock, None if neither timedatectl nor chronyc can tell."""
    output = machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 3.0)
    if output is not None and output.good and output.text.strip() in ("yes", "no"):
        return output.text.strip() == "yes"
    output = machine.run(["chronyc", "tracking"], 3.0)
    if output is not None and output.good and (leap := re.search(r"Leap status\s*:\s*(.+)", output.text)):
        return leap[1].strip() == "Normal"
    return None


_OPEN_MANY = ", ".join(kind.plural for kind in KINDS if kind.many_files)

_RAISE_HARD_LIMIT = (
    "raise the hard limit, as root: in a container, docker run --ulimit nofile=65536:65536; on a host, the line "
    "`* hard nofile 65536` in /etc/security/limits.conf and a new login (root needs a line of its own); for a service "
    "(slurmd, kubelet's container runtime), LimitNOFILE=65536 in its systemd unit and a restart"
)


@check(
    "open files",
    f"`ulimit -n` is at least {_CLUSTER_FILES} with several nodes or on {_OPEN_MANY}, else at least {_FILES}",
)
def open_files(machine: Machine, needs: Needs) -> Iterator[Finding]:
    soft, hard = machine.open_files()
    many = needs.nodes > 1 or platform_of(machine, needs).kind.many_files
    least = _CLUSTER_FILES if many else _FILES
    if soft >= least:
        yield ok(f"ulimit -n is {soft}, at least {least} are needed")
    elif hard >= least:
        text = f"ulimit -n is {soft}, at least {least} are needed"
        yield warning(text, f"ulimit -n {least} before Ray starts; launch/multinode.sh does it")
    else:
        most = "its hard limit is the same" if hard == soft else f"its hard limit is {hard}"
        yield warning(f"ulimit -n is {soft} and {most}, at least {least} are needed", _RAISE_HARD_LIMIT)


@check("shared memory", "/dev/shm has room for the buckets of the weight sync and a private Ray's object store")
def shared_memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    total, free = machine.disk("/dev/shm")
    buckets = needs.buckets * needs.bucket_bytes if needs.engines and needs.shared_memory else 0
    store = 0 if needs.ray_address else max(_STORE_LEAST, int(_STORE_SHARE * free))
    parts = {f"{pluralize(needs.buckets, 'bucket')} of weights": buckets, "Ray": store}
    required = ", ".join(f"{_size(size)} for {purpose}" for purpose, size in parts.items() if size) or "nothing"
    least = buckets if needs.ray_address else max(buckets + _STORE_LEAST, buckets / (1 - _STORE_SHARE))
    size = math.ceil((total - free + least) / GIB)
    remedy = f"docker run --ipc=host or --shm-size={size}g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if needs.ray_address:
        remedy += "; the running Ray already has its object store (ray start --object-store-memory)"
    text = f"{_size(free)} of {_size(total)} are free in /dev/shm; needed: {required}"
    if free < buckets + store:
        yield fail(text, remedy)
    else:
        yield ok(text)


@check("memory", "free memory of the machine or container; on CPUs, enough for the recipe's processes")
def memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.M))
    if "MemTotal" not in lines or "MemAvailable" not in lines:
        yield ok("unknown on this system (no /proc/meminfo)")
        return
    total, free = int(lines["MemTotal"]) << 10, int(lines["MemAvailable"]) << 10
    if container := container_memory(machine.root):
        limit, used = container
        total, free = min(total, limit), min(free, limit - used)
    on_cpus = not platform_of(machine, needs).kind.ray_resource
    required = _PROCESS_MEMORY * (max(1, needs.processes // needs.nodes) if on_cpus else 1)
    if free < required:
        text = f"{_size(free)} of {_size(total)} are free; needed: {_size(required)}"
        if needs.recipe:
            text += f" for {pluralize(required // _PROCESS_MEMORY, 'process', 'processes')}, without models"
        yield warning(text, "end other processes, raise the container's limit, or start fewer processes")
    else:
        yield ok(f"{_size(free)} of {_size(total)} are free")


@check(
    "run directory",
    "runs_dir is writable and has room for the recipe's checkpoints; in a Ray cluster, every node sees it",
)
def run_directory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    place = machine.path(needs.runs_dir)
    if needs.token is not None:
        path, content = needs.token
        if (machine.read(path) or "") != content:
            remedy = "set runs_dir to a path on storage that all nodes share; otherwise checkpoints are scattered"
            yield fail(f"{needs.runs_dir} is not the directory that the controller sees", remedy)
            return
    if problem := _cannot_write(place):
        yield fail(f"{needs.runs_dir}: {problem}", "set runs_dir to a writable directory")
        return
    _, free = machine.disk(needs.runs_dir)
    required = needs.checkpoint_bytes * needs.checkpoints
    shared = ", shared with the controller" if needs.token is not None else ""
    if free < LEAST_FREE_BYTES:
        yield fail(f"{needs.runs_dir} has {_size(free)} free", "free some space, or set runs_dir to another disk")
    elif free < required:
        text = f"{needs.runs_dir} has {_size(free)} free; {pluralize(needs.checkpoints, 'checkpoint')} of about {_size(needs.checkpoint_bytes)}"
        yield warning(
            f"{text} need {_size(required)}",
            "free space, set runs_dir to another disk, or lower train.keep_checkpoints",
        )
    else:
        yield ok(
            f"{needs.runs_dir}: {_size(free)} free"
            + (f", {_size(required)} for checkpoints" if required else "")
            + shared
        )


def _cannot_write(place: Path) -> str:
    """Return why no file can be created in the folder or its nearest existing parent, or "" if one can."""
    existing = existing_path(place)
    if not existing.is_dir():
        return f"{existing} is a file"
    probe = existing / f".megarl-doctor-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(b"x" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        probe.unlink(missing_ok=True)
    return ""


@check("temporary files", "/tmp has free space for Ray's sockets, logs and spilled objects")
def temporary_files(machine: Machine, needs: Needs) -> Iterator[Finding]:
    folder = machine.environ.get("RAY_TMPDIR") or "/tmp"
    total, free = machine.disk(folder)
    if free < 0.05 * total or free < GIB:
        remedy = "free some space, or set RAY_TMPDIR to another disk (a short path) before Ray starts"
        yield warning(f"{folder} has {_size(free)} of {_size(total)} free; above 95 % usage Ray cannot spill", remedy)
    else:
        yield ok(f"{folder}: {_size(free)} free")


@check(
    "sandbox", "the sandbox for generated code works (docs/sandbox.md); fails only if the recipe needs it", seconds=40
)
def sandbox(machine: Machine, needs: Needs) -> Iterator[Finding]:
    lacking = machine.sandbox_lacks()
    if not lacking:
        yield ok("the sandbox can run generated code")
    elif needs.sandbox:
        text = f"{needs.sandbox} needs it, but {lacking[0]}"
        yield fail(text, "; ".join(lacking[1:]) or "see docs/sandbox.md")
    else:
        text = f"the sandbox cannot run generated code: {lacking[0]}"
        yield warning(text, "; ".join([*lacking[1:], "only scorers of programs and the code interpreter need it"]))


@check("hub", f"Hugging Face's hub, or HF_ENDPOINT, answers within {_HUB_SECONDS:.0f} s; only names on the hub need it")
def hub(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if machine.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield ok("offline (HF_HUB_OFFLINE): names on the hub are read from the cache")
        return
    endpoint = machine.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if problem := machine.fetch(endpoint, _HUB_SECONDS):
        remedy = (
            "set HF_ENDPOINT to a mirror or https_proxy to a proxy; or HF_HUB_OFFLINE=1, and fetch models elsewhere"
        )
        yield warning(f"{without_secrets(endpoint)}: {without_secrets(problem)}", remedy)
    else:
        yield ok(f"{without_secrets(endpoint)} answers")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count >> 20} MiB"


def write_token(runs_dir: str) -> tuple[str, str] | None:
    """Write a file that other nodes look for into `runs_dir` or its nearest existing parent.

    Returns its path and text, or None if it cannot be written (the check `run directory` reports why). The caller
    deletes the file.
    """
    text = uuid.uuid4().hex
    path = existing_path(Path(runs_dir)) / f".megarl-doctor-{text}"
    try:
        path.write_text(text)
    except OSError:
        return None
    return str(path), text
