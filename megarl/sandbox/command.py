"""The command that starts a program in the sandbox: bubblewrap's arguments, and what runs between it and the program."""

from __future__ import annotations

import math
import os
import random
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from megarl.sandbox.base import Limits, SandboxUnavailable

SCRATCH = "/tmp"
PROGRAM = "/program.py"
PACKAGES = "/packages"
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64")
DEVICES = ("null", "zero", "full", "random", "urandom")
OPEN_FILES = 64  # descriptors of a process
EPHEMERAL = range(61184, 65520)  # user ids that systemd, too, hands out for a while: nobody's
STACK = 8 << 20  # bytes; a program may raise its own up to the memory's limit

# The first process of the namespace, out of the program's reach: it waits for the program, whose end is its own, and with
# it the kernel ends the rest. Unlike bubblewrap's own one it is waited for in its turn, and leaves its account. Its user is
# bubblewrap's, without whose privileges the news of bubblewrap's death would not get through.
INIT = ("/bin/sh", "-c", '"$@"; exit', "init")

ENVIRONMENT = {
    "PATH": "/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program does the same again
    "MALLOC_ARENA_MAX": "1",  # an arena a thread would use up the address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def tool(name: str) -> str:
    """Where a program lies. Raises SandboxUnavailable where it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise SandboxUnavailable(f"{name} is not installed")
    return os.path.realpath(path)


def environment(packages: bool) -> dict[str, str]:
    """Everything that the program finds in its environment."""
    library = sysconfig.get_config_var("LIBDIR") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
    return {
        **ENVIRONMENT,
        **({"LD_LIBRARY_PATH": library} if library else {}),
        **({"PYTHONPATH": PACKAGES} if packages else {}),
    }


def command(
    limits: Limits, packages: Mapping[str, Path], *, status: int, filters: int, program: int, as_root: bool
) -> list[str]:
    """How to start the program.

    `packages` are shown under their names in /packages. The others are descriptors: `status` is written to, `filters`
    and `program` are read. As root, bubblewrap needs no user namespace, and setpriv becomes a user that owns nothing:
    root's processes are exempt from the limit on their number, in whatever namespace. Others map themselves, and the
    init counts as one of theirs.
    """
    scratch = ["--size", str(limits.scratch_mb << 20), "--perms", "1777", "--tmpfs", SCRATCH]
    tools = {f"/bin/{name}": tool(name) for name in ("sh", "prlimit", *(["setpriv"] if as_root else []))}
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if as_root:
        privileges = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        inside = _become(random.SystemRandom().choice(EPHEMERAL))
    else:
        privileges = ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
        inside = []
    return [
        *(tool("choom"), "-n", "1000", "--"),  # where memory runs out, the kernel ends these first
        *(
            tool("bwrap"),
            "--die-with-parent",
            "--new-session",
            "--as-pid-1",
            *namespaces,
            *privileges,
            "--hostname",
            "sandbox",
        ),
        *_view({**_interpreter(), **tools, **{f"{PACKAGES}/{name}": str(path) for name, path in packages.items()}}),
        *scratch,
        *("--perms", "0444", "--ro-bind-data", str(program), PROGRAM),
        *("--remount-ro", "/", "--chdir", SCRATCH),
        *("--json-status-fd", str(status), "--seccomp", str(filters), "--"),
        *INIT,
        *inside,
        *_limited(limits, processes=limits.processes + (not as_root)),
        *(_python(), "-B", "-s", PROGRAM),
    ]


def _become(user: int) -> list[str]:
    return [
        *("/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"),
        *("--inh-caps=-all", "--ambient-caps=-all", "--"),
    ]


def _limited(limits: Limits, processes: int) -> list[str]:
    memory, cpu = limits.memory_mb << 20, math.ceil(limits.cpu_seconds)
    # Where cores go to a program of the machine (systemd-coredump, apport), 0 does not keep them from it, but 1 does: core(5).
    return [
        *("/bin/prlimit", f"--as={memory}:{memory}", f"--cpu={cpu}:{cpu + 1}", "--core=1:1"),
        *(f"--fsize={limits.scratch_mb << 20}", f"--nproc={processes}:{processes}"),
        *(f"--nofile={OPEN_FILES}:{OPEN_FILES}", f"--stack={min(STACK, memory)}:{memory}", "--memlock=0:0"),
        "--",
    ]


def _python() -> str:
    """The interpreter that the virtual environment, if any, was made with."""
    return f"{sys.base_exec_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def _interpreter() -> dict[str, str]:
    """What the interpreter and its shared libraries need: where it is shown, to where it lies."""
    shown = {path: path for path in LIBRARIES if os.path.isdir(path)}
    for path in (_python(), sysconfig.get_config_var("LIBDIR"), sysconfig.get_path("stdlib")):
        if path and os.path.exists(path) and not _within(path, shown):
            shown[path] = path
    return shown


def _view(shown: Mapping[str, str]) -> Iterable[str]:
    """Bubblewrap's arguments for what is shown, read-only; the interpreter's own packages are covered."""
    above = {str(folder) for target in shown for folder in PurePosixPath(target).parents} - {"/"}
    for folder in sorted(path for path in above if not _within(path, shown)):
        yield from ("--perms", "0755", "--dir", folder)  # folders that it makes by itself are its user's alone
    for target, path in shown.items():
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), target)
        else:
            yield from ("--ro-bind", path, target)
    for folder in site.getsitepackages([sys.base_prefix]):
        if _within(folder, shown) and os.path.isdir(folder):
            yield from ("--tmpfs", folder, "--remount-ro", folder)
    yield from ("--perms", "0755", "--dir", "/dev")
    for device in DEVICES:
        yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
    yield from ("--symlink", SCRATCH, "/dev/shm")


def _within(path: str, shown: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in shown)
