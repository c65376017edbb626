"""Check if this machine can run the sandbox, and list the missing parts with remedies."""

from __future__ import annotations

import errno
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from megarl.sandbox.base import Limits, SandboxError, SandboxUnavailable
from megarl.sandbox.command import tool
from megarl.sandbox.run import run_unchecked
from megarl.sandbox.syscalls import filter_program

INSTALL = {
    "bwrap": "apt-get install bubblewrap (Debian 12, Ubuntu 24.04 and later), dnf install bubblewrap, or "
    "conda install -c conda-forge bubblewrap",
    "sh": "any POSIX shell as sh",
    "prlimit": "apt-get install util-linux",
    "choom": "apt-get install util-linux (2.33 or later)",
    "setpriv": "apt-get install util-linux",
}
# linux/capability.h. Root's bubblewrap creates no user namespace, so mounts and loopback take the caller's capabilities.
CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12, "CAP_SETUID": 7, "CAP_SETGID": 6}
COUNTS_BY_NAMESPACE = (5, 14)  # first Linux version that counts a user's processes per user namespace
CONTAINER = (
    "in a container: docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined; in Kubernetes securityContext.capabilities.add [SYS_ADMIN, NET_ADMIN] with "
    "seccompProfile and appArmorProfile Unconfined"
)
PROBE = """
import os, time
print(os.listdir("."), flush=True)
for number in range(100):
    os.mkdir(str(number))
time.sleep(60)
"""


def missing() -> list[str]:
    """Return the reasons why this machine cannot run untrusted code safely, each with a remedy; empty if it can.

    Includes a trial run of about 50 ms.
    """
    return lacking_parts() or _trial()


def lacking_parts() -> list[str]:
    """Like `missing`, without the trial run: missing programs and libraries, and documented kernel settings."""
    if sys.platform != "linux":
        return [f"the sandbox needs Linux, and this is {sys.platform}: run on a Linux machine"]
    return [*_tools(), *_filters(), *_kernel(), *(_root() if os.geteuid() == 0 else _user())]


@functools.cache
def require() -> None:
    """Raise SandboxUnavailable with remedies if this machine cannot run untrusted code. Checked once per process."""
    lacking = missing()
    if lacking:
        raise SandboxUnavailable("this machine has no sandbox for generated code:\n- " + "\n- ".join(lacking))


def _tools() -> list[str]:
    lacking = []
    for name in ["bwrap", "prlimit", "choom", "sh"] + ["setpriv"] * (os.geteuid() == 0):
        try:
            path = tool(name)
        except SandboxUnavailable as error:
            lacking.append(f"{error}: {INSTALL[name]}")
            continue
        if name == "bwrap":
            options = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
            if "--size" not in options:
                lacking.append(f"{path} is too old, it cannot limit the scratch folder: 0.8 or later. {INSTALL[name]}")
    return lacking


def _filters() -> list[str]:
    try:
        filter_program()
    except ImportError:
        return ["the package pyseccomp is not installed: pip install pyseccomp"]
    except RuntimeError as error:
        return [f"pyseccomp does not find libseccomp ({error}): apt-get install libseccomp2, dnf install libseccomp"]
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return ["libseccomp is too old, it does not know all system calls of the sandbox's filter: 2.5.2 or later"]
    return []


def _kernel() -> list[str]:
    """Check the call that `run` watches a sandbox's first process with."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        remedy = f"use Linux 5.3 or later, this is {os.uname().release}; on a later one, {CONTAINER}"
        return [f"os.pidfd_open fails ({error}): {remedy}"]
    return []


def _root() -> list[str]:
    """Check the capabilities that root needs; containers often remove them."""
    effective = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    lacking = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    return [f"root has no {', '.join(lacking)} here. {CONTAINER}; or run as another user than root"] if lacking else []


def _user() -> list[str]:
    lacking = []
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < COUNTS_BY_NAMESPACE:
        lacking.append(
            f"Linux {os.uname().release} cannot limit the processes of a sandbox, because it counts all processes of a "
            "user together: use Linux 5.14 or later, or run as root"
        )
    for path, wrong, remedy in (
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ):
        if Path(path).exists() and Path(path).read_text().strip() == wrong:
            lacking.append(f"{path} is {wrong}, so users cannot create namespaces: {remedy}, or run as root")
    return lacking


def _trial() -> list[str]:
    """Run a program that exceeds `scratch_files` and then sleeps, and check that the limit stops it."""
    try:
        result = run_unchecked(PROBE, limits=Limits(wall_seconds=20, scratch_files=50))
    except (SandboxError, OSError) as error:
        return [f"a trial run failed. {error}. {_hint()}"]
    if result.stdout != "[]\n" or result.limit != "files":
        return [f"a trial run went wrong: {result}. {_hint()}"]
    return []


def _hint() -> str:
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if os.geteuid() and restricted.exists() and restricted.read_text().strip() == "1":
        return "AppArmor keeps users from making namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    return f"If namespaces or mounts are forbidden, {CONTAINER}"
