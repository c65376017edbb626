"""Clocks, limits, memory, disks, the sandbox and the hub."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.found import platform_of
from megarl.commands.doctor.machine import Machine
from megarl.platform.kinds import KINDS
from megarl.text import pluralize

GIB = 1 << 30
_RELEASED = 1_735_689_600  # 2025-01-01: a clock before it was never set
_CLUSTER_FILES, _FILES = 32768, 4096  # open files: Ray keeps a connection to every worker
_LEAST_FREE = 64 << 20  # as megarl/preflight/run.py
_STORE_LEAST, _STORE_SHARE = 256 << 20, 0.3  # of a private Ray's object store: megarl/cluster/ray/start.py
_PROCESS_MEMORY = 2 * GIB  # a process with torch and Megatron or vLLM, of a tiny model: 1 to 1.5 measured
_HUB_SECONDS = 3.0


@check(
    "clocks", "the wall clock against the one that nobody sets, and whether it is kept by NTP; over Ray, against ours"
)
def clocks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    wall, steady = machine.clocks()
    time.sleep(0.2)
    later, steadier = machine.clocks()
    drift = (later - wall) - (steadier - steady)
    if wall < _RELEASED:
        yield fail(
            f"it is {time.strftime('%Y-%m-%d', time.gmtime(wall))} by the clock", "set it: certificates are refused"
        )
    elif abs(drift) > 0.05:
        said = f"the wall clock was moved by {drift:+.2f} s within 0.2 s"
        yield warning(said, "times in logs and traces will jump: let one service alone keep it (chronyc sources)")
    elif (kept := _kept(machine)) is False:
        yield warning(
            "the clock is not kept by NTP", "start chronyd or systemd-timesyncd; logs of nodes cannot be compared"
        )
    else:
        yield ok("steady, " + ("kept by NTP" if kept else "whether by NTP cannot be told from here (a container?)"))


def _kept(machine: Machine) -> bool | None:
    """Whether the clock is synchronised; None where nobody says."""
    told = machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 3.0)
    if told is not None and told.good and told.text.strip() in ("yes", "no"):
        return told.text.strip() == "yes"
    told = machine.run(["chronyc", "tracking"], 3.0)
    if told is not None and told.good and (leap := re.search(r"Leap status\s*:\s*(.+)", told.text)):
        return leap[1].strip() == "Normal"
    return None


_OPEN_MANY = ", ".join(kind.plural for kind in KINDS if kind.many_files)


@check("open files", f"`ulimit -n`: {_CLUSTER_FILES} over several nodes or on {_OPEN_MANY}, {_FILES} else")
def open_files(machine: Machine, needs: Needs) -> Iterator[Finding]:
    soft, hard = machine.open_files()
    many = needs.nodes > 1 or platform_of(machine, needs).kind.many_files
    least = _CLUSTER_FILES if many else _FILES
    if soft >= least:
        yield ok(f"{soft}")
    elif hard >= least:
        said = f"{soft} (ulimit -n), of which {least} are wanted"
        yield warning(said, f"ulimit -n {least} before Ray starts; launch/multinode.sh does it")
    else:
        said = f"{soft}, and no more than {hard} may be asked for; {least} are wanted"
        yield warning(said, "docker run --ulimit nofile=65536:65536, or raise it in /etc/security/limits.conf")


@check("shared memory", "free space of /dev/shm, against the buckets of the exchange and a private Ray's object store")
def shared_memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    total, free = machine.disk("/dev/shm")
    buckets = needs.buckets * needs.bucket_bytes if needs.engines and needs.shared_memory else 0
    store = 0 if needs.ray_address else max(_STORE_LEAST, int(_STORE_SHARE * free))
    parts = {f"{pluralize(needs.buckets, 'bucket')} of weights": buckets, "Ray": store}
    wants = ", ".join(f"{_size(size)} for {what}" for what, size in parts.items() if size) or "nothing is wanted of it"
    remedy = "docker run --ipc=host or --shm-size=16g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if needs.ray_address:
        remedy += "; a Ray that runs has taken its object store already (ray start --object-store-memory)"
    if free < buckets + store:
        yield fail(f"{_size(free)} of {_size(total)} are free in /dev/shm, wanted are {wants}", remedy)
    else:
        yield ok(f"{_size(free)} of {_size(total)} are free in /dev/shm; {wants}")


@check("memory", "what is free of the machine's or the container's; on CPUs, for the recipe's processes")
def memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo") or "", re.M))
    if "MemTotal" not in lines or "MemAvailable" not in lines:
        yield ok("this system does not say (no /proc/meminfo)")
        return
    total, free = int(lines["MemTotal"]) << 10, int(lines["MemAvailable"]) << 10
    limit, used = (machine.read(f"/sys/fs/cgroup/memory.{name}") or "" for name in ("max", "current"))
    if limit.strip().isdigit() and used.strip().isdigit():
        given_back = re.search(r"^inactive_file (\d+)", machine.read("/sys/fs/cgroup/memory.stat") or "", re.M)
        held = int(used) - (int(given_back[1]) if given_back else 0)  # pages of files are dropped for who needs them
        total, free = min(total, int(limit)), min(free, int(limit) - held)
    on_cpus = not platform_of(machine, needs).kind.ray_resource
    wanted = _PROCESS_MEMORY * (max(1, needs.processes // needs.nodes) if on_cpus else 1)
    if free < wanted:
        said = f"{_size(free)} of {_size(total)} are free"
        why = (
            f"{_size(wanted)} for {pluralize(wanted // _PROCESS_MEMORY, 'process', 'processes')}, models aside"
            if needs.recipe
            else _size(wanted)
        )
        yield warning(f"{said}, wanted are {why}", "end other processes, raise the container's limit, or start fewer")
    else:
        yield ok(f"{_size(free)} of {_size(total)} are free")


@check("run directory", "that runs_dir can be written to, and has room for the recipe's checkpoints; over Ray, that every node sees it")  # fmt: skip
def run_directory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    place = machine.path(needs.runs_dir)
    if needs.token is not None:
        path, content = needs.token
        if (machine.read(path) or "") != content:
            remedy = "set runs_dir to a path on storage that all nodes share: checkpoints would be in pieces"
            yield fail(f"{needs.runs_dir} is not the directory that the controller sees", remedy)
            return
    if problem := _cannot_write(place):
        yield fail(f"{needs.runs_dir}: {problem}", "name a directory that can be written to (runs_dir=...)")
        return
    _, free = machine.disk(needs.runs_dir)
    wanted = needs.checkpoint_bytes * needs.checkpoints
    shared = ", seen from here as from the controller" if needs.token is not None else ""
    if free < _LEAST_FREE:
        yield fail(f"{needs.runs_dir} has {_size(free)} free", "free some space, or set runs_dir to another disk")
    elif free < wanted:
        said = f"{needs.runs_dir} has {_size(free)} free; {pluralize(needs.checkpoints, 'checkpoint')} of about {_size(needs.checkpoint_bytes)}"
        yield warning(
            f"{said} want {_size(wanted)}", "free space, set runs_dir to another disk, or train.keep_checkpoints lower"
        )
    else:
        yield ok(
            f"{needs.runs_dir}: {_size(free)} free" + (f", {_size(wanted)} for checkpoints" if wanted else "") + shared
        )


def _cannot_write(place: Path) -> str:
    """Why no file can be made there, or in the nearest folder above; "" where one can."""
    existing = next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())
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


@check("temporary files", "that /tmp is not nearly full: Ray's sockets, logs and spilled objects lie there")
def temporary_files(machine: Machine, needs: Needs) -> Iterator[Finding]:
    folder = machine.environ.get("RAY_TMPDIR") or "/tmp"
    total, free = machine.disk(folder)
    if free < 0.05 * total or free < GIB:
        remedy = "free some space, or set RAY_TMPDIR to another disk (a short path) before Ray starts"
        yield warning(f"{folder} has {_size(free)} of {_size(total)} free; above 95 % Ray refuses to spill", remedy)
    else:
        yield ok(f"{folder}: {_size(free)} free")


@check("sandbox", "that generated code can be run safely (docs/sandbox.md), a failure where the recipe asks for it", seconds=40)  # fmt: skip
def sandbox(machine: Machine, needs: Needs) -> Iterator[Finding]:
    lacking = machine.sandbox_lacks()
    if not lacking:
        yield ok("generated code can be run")
    elif needs.sandbox:
        yield fail(f"{needs.sandbox} needs it, and: {lacking[0]}", "; ".join(lacking[1:]) or "see docs/sandbox.md")
    else:
        said = f"generated code cannot be run: {lacking[0]}"
        yield warning(said, "; ".join([*lacking[1:], "only scorers of programs and the code interpreter need it"]))


@check(
    "hub", f"that Hugging Face's hub, or HF_ENDPOINT, answers within {_HUB_SECONDS:.0f} s; `megarl data` alone asks it"
)
def hub(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if machine.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield ok("offline (HF_HUB_OFFLINE): models and data are read from folders")
        return
    endpoint = machine.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if problem := machine.fetch(endpoint, _HUB_SECONDS):
        remedy = (
            "set HF_ENDPOINT to a mirror or https_proxy to a proxy; or HF_HUB_OFFLINE=1, and fetch models elsewhere"
        )
        yield warning(f"{endpoint}: {problem}", remedy)
    else:
        yield ok(f"{endpoint} answers")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count >> 20} MiB"


def write_token(runs_dir: str) -> tuple[str, str] | None:
    """A file in `runs_dir`, or the nearest folder above it, for other nodes to look for: its path and text. None where it
    cannot be written, which the controller's own check says. The caller deletes it."""
    wanted = Path(runs_dir).absolute()
    folder = next(one for one in (wanted, *wanted.parents) if one.is_dir())
    text = uuid.uuid4().hex
    path = folder / f".megarl-doctor-{text}"
    try:
        path.write_text(text)
    except OSError:
        return None
    return str(path), text
