"""Results of a run in the sandbox, and the error on a machine without one. tests/sandbox/test_attacks.py attacks it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl import sandbox
from megarl.sandbox import detect, syscalls
from tests.support.sandbox_machine import LACKING, needs_sandbox

ROOT = Path(__file__).parents[2]
# Capabilities of root in a Docker container (moby's DefaultCapabilities).
DOCKER = [
    "chown", "dac_override", "fsetid", "fowner", "mknod", "net_raw", "setgid", "setuid",
    "setfcap", "setpcap", "net_bind_service", "sys_chroot", "kill", "audit_write",
]  # fmt: skip


@needs_sandbox
def test_output_errors_and_exit() -> None:
    result = sandbox.run("import sys; print(input() + '!'); print('ü', file=sys.stderr); sys.exit(3)", "hello\n")
    assert (result.stdout, result.stderr, result.exit_code, result.limit) == ("hello!\n", "ü\n", 3, None)
    assert not result.ok and result.signal is None


@needs_sandbox
def test_the_signal_of_a_program_is_reported() -> None:
    result = sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert result.signal == 11 and result.limit is None


@needs_sandbox
def test_a_traceback_names_lines_of_the_program() -> None:
    result = sandbox.run("x = 1\n1 / 0\n")
    assert 'File "/program.py", line 2' in result.stderr and result.exit_code == 1


@needs_sandbox
def test_input_of_some_megabytes_and_output_in_turn() -> None:
    """Pipes hold 64 KiB: a caller that writes everything before it reads would wait forever."""
    result = sandbox.run("import sys\nfor line in sys.stdin: print(line, end='')", "x" * 99 + "\n" * 30_000)
    assert result.ok and len(result.stdout) == 30_099
    assert sandbox.run("print(1)", "x" * 10_000_000).stdout == "1\n"  # the program does not read its input


@needs_sandbox
def test_cpu_time_sums_all_processes() -> None:
    spin = (
        "import os, time\ndef spin():\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n"
    )
    result = sandbox.run(spin + "if os.fork() == 0: spin(); os._exit(0)\nspin(); os.wait()")
    assert 0.6 <= result.cpu_seconds < 1.0
    assert sandbox.run("import time; time.sleep(0.3)").cpu_seconds < 0.25


@needs_sandbox
def test_memory_past_the_limit_is_a_memory_error() -> None:
    result = sandbox.run("bytearray(300 << 20)", limits=sandbox.Limits(memory_mb=200))
    assert result.stderr.strip().endswith("MemoryError") and result.exit_code == 1
    assert sandbox.run("bytearray(300 << 20)", limits=sandbox.Limits(memory_mb=500)).ok


@needs_sandbox
def test_ordinary_programs_run() -> None:
    """Threads, processes, deep recursion, files and asyncio work, since no list of allowed calls restricts them."""
    program = """
    import asyncio, multiprocessing, os, random, shutil, sqlite3, subprocess, sys, tempfile, threading, time
    threading.stack_size(64 << 20)
    sys.setrecursionlimit(10**6)
    def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
    got = []
    thread = threading.Thread(target=lambda: got.append(deep(50_000))); thread.start(); thread.join()
    async def nap(): await asyncio.sleep(0.01); return 1
    with multiprocessing.Pool(2) as pool: got.append(sum(pool.map(abs, range(-3, 3))))
    got.append(asyncio.run(nap()))
    got.append(subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        open(folder + "/a", "w").write("abc"); shutil.copy(folder + "/a", "b"); shutil.move("b", "c")
    got.append(open("c").read()); got.append(sqlite3.connect("db").execute("select 1").fetchone())
    os.replace("c", "d"); time.sleep(0.001); random.random()
    print(got)
    """
    result = sandbox.run(textwrap.dedent(program))
    assert result.stdout == "[50000, 9, 1, '5\\n', 'abc', (1,)]\n", result


@needs_sandbox
def test_runs_are_deterministic() -> None:
    program = "print(list({str(n) for n in range(50)}), hash('x'))"
    assert sandbox.run(program).stdout == sandbox.run(program).stdout


@needs_sandbox
def test_named_packages_are_visible_with_their_dependencies() -> None:
    assert sandbox.run("import numpy; print(numpy.arange(4).sum())", packages=["numpy"]).stdout == "6\n"
    assert "ModuleNotFoundError" in sandbox.run("import numpy").stderr
    rich = sandbox.run("import rich, pygments; print(1)", packages=["rich"])  # rich needs pygments
    assert rich.stdout == "1\n", rich
    with pytest.raises(ValueError, match="'no-such-package', which is not installed"):
        sandbox.run("", packages=["no-such-package"])


@needs_sandbox
def test_many_concurrent_runs_keep_their_results() -> None:
    """Parallel runs have separate exit codes and results, and leave no descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: sandbox.run(f"print({n}); raise SystemExit({n % 3})"), range(40)))
    assert [(result.stdout, result.exit_code) for result in results] == [(f"{n}\n", n % 3) for n in range(40)]
    assert len(os.listdir("/proc/self/fd")) == before


@needs_sandbox
def test_a_wall_limit_is_kept_within_a_second() -> None:
    started = time.monotonic()
    result = sandbox.run("print(1, flush=True); import time; time.sleep(60)", limits=sandbox.Limits(wall_seconds=0.5))
    assert (result.limit, result.exit_code, result.stdout) == ("wall", None, "1\n")
    assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("name", ["cpu_seconds", "wall_seconds", "memory_mb", "processes"])
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        sandbox.Limits(**{name: 0})


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user; as one, all tests are this test")
def test_the_sandbox_works_for_an_ordinary_user(tmp_path: Path) -> None:
    """An ordinary user's sandbox uses a user namespace, with other arguments and the same guarantees as root's."""
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    if not os.path.exists(python):
        pytest.skip("other users may be unable to read the tests' interpreter, and no other interpreter was found")
    import pyseccomp

    folder = Path("/tmp") / f"megarl-sandbox-{os.getpid()}"
    program = (
        "import os, sys; print(os.getuid(), os.listdir('/tmp'), os.path.exists('/etc'), flush=True)\n"
        "made = 0\ntry:\n    while made < 100:\n        os.fork() or __import__('time').sleep(9)\n        made += 1\n"
        "except OSError: print(made, flush=True)\n"
        "for path in ('/program.py', '/x', os.__file__):\n    try: open(path, 'a'); print('BREACH', path, flush=True)\n    except OSError: pass\n"
        "try: os.setuid(0); print('BREACH', flush=True)\nexcept OSError: pass\n"
        "for n in range(1000): os.mkdir(str(n))\n__import__('time').sleep(60)"
    )
    caller = f"""
import sys, types
package = types.ModuleType("megarl"); package.__path__ = [{str(folder / "megarl")!r}]; sys.modules["megarl"] = package
from megarl import sandbox
print(sandbox.missing())
result = sandbox.run({program!r}, limits=sandbox.Limits(processes=6, scratch_files=100))
print(result.limit, result.stdout)
"""
    try:
        (folder / "megarl").mkdir(parents=True)
        subprocess.run(["cp", "-r", str(ROOT / "megarl" / "sandbox"), str(folder / "megarl")], check=True)
        subprocess.run(["cp", pyseccomp.__file__, str(folder)], check=True)
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        became = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "env", f"PYTHONPATH={folder}"]
        done = subprocess.run([*became, python, "-c", caller], capture_output=True, text=True, cwd="/", check=False)
    finally:
        subprocess.run(["rm", "-r", str(folder)], check=True)
    assert done.stdout == "[]\nfiles 1000 [] False\n5\n\n", done


def test_a_missing_bubblewrap_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error says how to install it; no program runs unprotected."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [line for line in detect.missing() if line.startswith("bwrap is not installed: apt-get install bubblewrap")]
    detect.require.cache_clear()
    with pytest.raises(sandbox.SandboxUnavailable, match="apt-get install bubblewrap"):
        sandbox.run("print(1)")
    detect.require.cache_clear()


def test_a_bubblewrap_that_cannot_limit_the_scratch_folder_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho '--tmpfs DEST'\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert any(re.search("bwrap is too old.*0.8 or later", line) for line in detect.missing())


@pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
def test_an_old_kernel_or_libseccomp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def pidfd_open(number: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    before = detect.lacking_parts()
    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    (kernel,) = set(detect.lacking_parts()) - set(before)
    assert kernel.startswith("os.pidfd_open fails ([Errno 38]") and "Linux 5.3 or later" in kernel
    monkeypatch.undo()

    pytest.importorskip("pyseccomp")
    monkeypatch.setattr(syscalls, "FILES", f"{syscalls.FILES} call_of_a_later_libseccomp")
    syscalls.filter_program.cache_clear()
    (library,) = set(detect.lacking_parts()) - set(before)
    assert library.startswith("libseccomp is too old") and "2.5.2 or later" in library


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes capabilities from root")


def missing_with(capabilities: list[str]) -> str:
    """Return what `missing` prints in a process of root that has only `capabilities`."""
    look = "from megarl.sandbox import missing; print(missing())"
    bounding_set = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    prefix = ["setpriv", f"--bounding-set={bounding_set}", "--inh-caps=-all", "--"]
    done = subprocess.run([*prefix, sys.executable, "-c", look], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done
    return done.stdout.strip()


@needs_sandbox
@needs_root
@pytest.mark.parametrize(
    "lacking, names", [("sys_admin", "CAP_SYS_ADMIN"), ("net_admin", "CAP_NET_ADMIN"), ("setuid", "CAP_SETUID")]
)
def test_root_without_a_capability_gets_the_remedy(lacking: str, names: str) -> None:
    """Root in a Docker container may neither mount nor configure a network by default."""
    answer = missing_with([name for name in [*DOCKER, "sys_admin", "net_admin"] if name != lacking])
    assert f"root has no {names} here" in answer and "--cap-add SYS_ADMIN --cap-add NET_ADMIN" in answer


@needs_sandbox
@needs_root
def test_the_capabilities_of_the_container_suffice() -> None:
    added = re.findall(r"--cap-add (\w+)", (ROOT / "launch" / "container.sh").read_text())
    assert missing_with([*DOCKER, *map(str.lower, added)]) == "[]"
    assert re.findall(r"--cap-add (\w+)", detect.CONTAINER) == added
    assert re.findall(r"--cap-add (\w+)", (ROOT / "docs" / "sandbox.md").read_text()) == added


def test_the_worked_example_of_the_docs() -> None:
    text = (ROOT / "docs" / "sandbox.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert examples
    if LACKING:
        pytest.skip(f"this machine has no sandbox: {LACKING}")
    for example in examples:
        exec(compile(example, "docs/sandbox.md", "exec"), {})
