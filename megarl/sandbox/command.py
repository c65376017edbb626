"""Build the command that starts a program in the sandbox: bubblewrap, its init, and resource limits."""

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
EPHEMERAL = range(61184, 65520)  # user ids that systemd uses for temporary users; they own no files
STACK = 8 << 20  # bytes; a program may raise its stack limit up to the memory limit

# The namespace's first process. It waits for the program and exits with its status; the kernel then kills the rest of
# the namespace. bubblewrap waits for this init, unlike for its built-in init, so the CPU time is accounted. The init
# runs as bubblewrap's user: as another user it would not receive the signal that bubblewrap has died.
INIT = ("/bin/sh", "-c", '"$@"; exit', "init")

ENVIRONMENT = {
    "PATH": "/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # repeatable runs
    "MALLOC_ARENA_MAX": "1",  # one arena per thread would exhaust the address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def tool(name: str) -> str:
    """Return the path of a program. Raises SandboxUnavailable if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise SandboxUnavailable(f"{name} is not installed")
    return os.path.realpath(path)


def environment(packages: bool) -> dict[str, str]:
    """Return all environment variables of the program."""
    library = sysconfig.get_config_var("LIBDIR") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
    return {
        **ENVIRONMENT,
        **({"LD_LIBRARY_PATH": library} if library else {}),
        **({"PYTHONPATH": PACKAGES} if packages else {}),
    }


def command(
    limits: Limits, packages: Mapping[str, Path], *, status: int, filters: int, program: int, as_root: bool
) -> list[str]:
    """Return the command line that starts the program.

    `packages` are mounted under their names in /packages. `status`, `filters` and `program` are file descriptors:
    bubblewrap writes to `status` and reads the other two. As root, bubblewrap needs no user namespace, and setpriv
    switches to a user without files, because root is exempt from the limit on processes. Other users get a user
    namespace, and the init counts towards their process limit.
    """
    scratch = ["--size", str(limits.scratch_mb << 20), "--perms", "1777", "--tmpfs", SCRATCH]
    tools = {f"/bin/{name}": tool(name) for name in ("sh", "prlimit", *(["setpriv"] if as_root else []))}
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if as_root:
        privileges = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        user = random.SystemRandom().choice(EPHEMERAL)
        inside = ["/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        inside += ["--inh-caps=-all", "--ambient-caps=-all", "--"]
    else:
        privileges = ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
        inside = []
    return [
        *(tool("choom"), "-n", "1000", "--"),  # the kernel kills these processes first if memory runs out
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


def _limited(limits: Limits, processes: int) -> list[str]:
    memory, cpu = limits.memory_mb << 20, math.ceil(limits.cpu_seconds)
    # A core limit of 0 does not disable core dumps that are piped to a program (systemd-coredump, apport), but 1 does:
    # core(5).
    return [
        *("/bin/prlimit", f"--as={memory}:{memory}", f"--cpu={cpu}:{cpu + 1}", "--core=1:1"),
        *(f"--fsize={limits.scratch_mb << 20}", f"--nproc={processes}:{processes}"),
        *(f"--nofile={OPEN_FILES}:{OPEN_FILES}", f"--stack={min(STACK, memory)}:{memory}", "--memlock=0:0"),
        "--",
    ]


def _python() -> str:
    """Return the path of the base interpreter, outside any virtual environment."""
    return f"{sys.base_exec_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def _interpreter() -> dict[str, str]:
    """Return the mounts of the interpreter and its shared libraries: path in the sandbox -> path on this machine."""
    shown = {path: path for path in LIBRARIES if os.path.isdir(path)}
    for path in (_python(), sysconfig.get_config_var("LIBDIR"), sysconfig.get_path("stdlib")):
        if path and os.path.exists(path) and not _within(path, shown):
            shown[path] = path
    return shown


def _view(shown: Mapping[str, str]) -> Iterable[str]:
    """Return bubblewrap's arguments that mount `shown` read-only and hide the interpreter's site-packages."""
    above = {str(folder) for target in shown for folder in PurePosixPath(target).parents} - {"/"}
    for folder in sorted(path for path in above if not _within(path, shown)):
        yield from (
            "--perms",
            "0755",
            "--dir",
            folder,
        )  # folders that bubblewrap creates by default are readable by its user only
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
