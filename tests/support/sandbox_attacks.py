"""Programs that try to escape from the sandbox, to exceed its limits, or to survive it.

Each attack runs after PREAMBLE with its targets in T: a secret file, a port and sockets that listen on this machine, and
processes to kill. A successful attack prints BREACH; a blocked attack prints nothing. It must run to its end or be stopped
by the limit that `limit` names: an attack that fails by a bug in it proves nothing.
"""

from __future__ import annotations

from typing import NamedTuple

PREAMBLE = '''
import contextlib, ctypes, json, os, resource, signal, socket, subprocess, sys, threading, time
T = json.loads(sys.stdin.readline())

def breach(what):
    sys.stdout.write(f"BREACH: {what}\\n")
    sys.stdout.flush()

def refused(action, *arguments, only=(OSError, MemoryError, RuntimeError, ValueError, subprocess.SubprocessError)):
    try:
        got = action(*arguments)
    except only:
        return True
    breach(f"{action} {arguments} {got!r}"[:300])
    return False

def read(path):
    with open(path, "rb") as file:
        return file.read(100)

def write(path):
    with open(path, "ab") as file:
        file.write(b"x")

def until_refused(action, most):
    """How often it went well."""
    for number in range(most):
        try:
            action(number)
        except (OSError, MemoryError, RuntimeError):
            return number
    return most
'''


class Attack(NamedTuple):
    name: str
    source: str
    limit: str | None = None  # the limit that ends it


# Limits of every attack (tests/sandbox/test_attacks.py): 200 MiB, 8 processes, 8 MiB of scratch, 300 files, 64 KiB of
# output; 0.3 CPU seconds, or 1 s if `limit` is a time limit.
ATTACKS = [
    # Reads outside the sandbox
    Attack("read_etc_passwd", "refused(read, '/etc/passwd'); refused(os.listdir, '/etc')"),
    Attack("read_etc_shadow", "refused(read, '/etc/shadow')"),
    Attack("read_secret_file", "refused(read, T['secret_file'])"),
    Attack("read_by_parent_folders", "refused(read, '../' * 40 + T['secret_file'].lstrip('/'))"),
    Attack(
        "read_by_symlink",
        "os.symlink(T['secret_file'], 'link'); refused(read, 'link'); os.symlink('..', 'up')\n"
        "refused(read, 'up/' * 30 + T['secret_file'].lstrip('/'))",
    ),
    Attack(
        "read_by_hard_link", "refused(os.link, T['secret_file'], 'link'); refused(os.link, '/usr/lib/os-release', 'x')"
    ),
    Attack("read_by_rename", "refused(os.rename, T['secret_file'], 'mine')"),
    Attack(
        "list_homes",
        "refused(os.listdir, '/home'); refused(os.listdir, '/srv')\n"
        "python = sys.base_prefix.split('/')  # may be in a home directory: its siblings are hidden\n"
        "for depth in range(2, len(python)):\n    seen = os.listdir('/'.join(python[:depth]))\n    python[1] == 'usr' or seen == [python[depth]] or breach(seen)",
    ),
    Attack(
        "old_root",
        "for path in ('/oldroot', '/newroot', '/mnt', '/host', '/proc/1/root', '/run', '/var'): refused(os.listdir, path)",
    ),
    Attack(
        "proc_of_others",
        "for pid in (1, os.getppid(), T['caller'], T['victim']): refused(read, f'/proc/{pid}/environ'); refused(read, f'/proc/{pid}/mem')",
    ),
    Attack(
        "proc_of_itself",
        "for path in ('/proc/self/mountinfo', '/proc/self/fd/0', '/proc/sysrq-trigger', '/proc/kcore'): refused(read, path)",
    ),
    Attack("sys", "refused(os.listdir, '/sys'); refused(write, '/sys/fs/cgroup/cgroup.procs')"),
    Attack(
        "environment_of_the_caller",
        "'MEGARL_TEST_SECRET' in os.environ and breach(dict(os.environ)); len(os.environ) > 15 and breach(len(os.environ))",
    ),
    Attack(
        "environment_by_memory",
        "libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p\nlibc.getenv(b'MEGARL_TEST_SECRET') and breach('getenv')",
    ),
    Attack("inherited_descriptors", "for fd in range(3, 4096): refused(os.fstat, fd)"),
    Attack(
        "descriptor_of_a_folder",
        "for fd in range(64): refused(lambda: os.open('..', os.O_RDONLY, dir_fd=fd)); refused(os.fchdir, fd)",
    ),
    Attack("write_to_stdin", "refused(os.write, 0, b'x')"),
    Attack("seek_in_stdin", "refused(os.lseek, 0, 0, os.SEEK_SET)"),
    Attack(
        "packages_of_the_caller",
        "for name in ('numpy', 'torch', 'megarl', 'pyseccomp', 'pip'):\n    refused(__import__, name, only=(ImportError,))",
    ),
    Attack(
        "scratch_of_another_run", "assert os.listdir('.') == [], os.listdir('.')\nopen('mine', 'w').write(T['token'])"
    ),
    # Devices
    Attack(
        "devices",
        "for name in ('mem', 'kmsg', 'tty', 'console', 'vda', 'sda', 'fuse', 'kvm', 'ptmx', 'loop0'): refused(read, '/dev/' + name)",
    ),
    Attack(
        "new_devices",
        "refused(os.mknod, 'disk', 0o60666, os.makedev(8, 0)); refused(os.mknod, 'null', 0o20666, os.makedev(1, 3))",
    ),
    Attack(
        "keys_into_the_terminal",
        "import fcntl\nfor fd in (0, 1, 2): refused(fcntl.ioctl, fd, 0x5412, b'x'); refused(fcntl.ioctl, fd, 0x541C, b'x')\n"
        "refused(fcntl.ioctl, 0, (1 << 32) + 0x5412 & 0xFFFFFFFF, b'x')",
    ),
    # Writes outside the sandbox
    Attack(
        "write_the_interpreter",
        "for path in (os.__file__, sys.executable, sys.prefix + '/lib/x.py', '/usr/lib/x'): refused(write, path)",
    ),
    Attack(
        "write_site_packages",
        "import site\nfor path in [*site.getsitepackages(), site.getusersitepackages()]:\n"
        "    path.startswith('/tmp') or refused(write, path + '/x.pth')",
    ),
    Attack(
        "write_the_root",
        "for path in ('/x', '/bin/x', '/dev/x', '/program.py', '/lib64/x'): refused(write, path)\nrefused(os.mkdir, '/etc'); refused(os.remove, '/program.py')",
    ),
    Attack(
        "chmod_the_root", "for path in ('/', '/program.py', '/usr', '/bin/prlimit'): refused(os.chmod, path, 0o777)"
    ),
    Attack("chown", "refused(os.chown, '/', os.getuid(), 0); refused(os.chown, '.', 0, 0)"),
    Attack(
        "remount",
        "libc = ctypes.CDLL(None)\nlibc.mount(b'none', b'/', None, 32 | 4096, None) == 0 and breach('remounted')",
    ),
    # Privileges
    Attack(
        "become_root",
        "for call in (os.setuid, os.seteuid, os.setgid): refused(call, 0)\nrefused(os.setgroups, [0]); refused(os.setresuid, 0, 0, 0)",
    ),
    Attack(
        "no_capabilities",
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); data = (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget(header, data)\nany(data[i] for i in (0, 1, 3, 4)) and breach(list(data))",
    ),
    Attack("new_privileges", "ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1 or breach('no_new_privs is off')"),
    Attack(
        "setuid_binary",
        "os.close(os.open('root', os.O_CREAT | os.O_WRONLY, 0o755)); os.chmod('root', 0o6755)\n"
        "os.statvfs('.').f_flag & os.ST_NOSUID or breach('setuid counts in the scratch folder')",
    ),
    Attack(
        "setuid_binaries_of_the_machine",
        "for path in ('/usr/lib', '/bin/sh', '/', sys.executable):\n"
        "    os.statvfs(path).f_flag & os.ST_NOSUID or path == '/' or breach(path)",
    ),
    Attack(
        "calls_of_other_architectures",  # which a filter that looks at numbers alone lets through
        "import mmap\nif os.uname().machine == 'x86_64':\n    child = os.fork()\n    if child == 0:\n"
        "        code = mmap.mmap(-1, 4096, prot=7); code.write(bytes.fromhex('b814000000cd80c3'))  # int 0x80: getpid\n"
        "        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))(); os._exit(0)\n"
        "    os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSYS or breach('i386')\n"
        "    child = os.fork()\n    if child == 0: ctypes.CDLL(None).syscall(39 | 0x40000000); os._exit(0)\n"
        "    os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSYS or breach('x32')",
    ),
    Attack(
        "core_for_a_program_of_the_machine",  # core(5): a limit of 0 does not keep the kernel from starting one
        "resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) or breach('core')",
    ),
    Attack("lock_shared_files", "import fcntl\nrefused(fcntl.flock, os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)"),
    Attack(
        "programs_of_the_machine",
        "for path in ('/bin/bash', '/usr/bin/su', '/bin/mount', '/usr/bin/env'): refused(subprocess.run, [path])\n'root' in subprocess.run(['/bin/sh', '-c', 'id; whoami; echo /etc/* /home/*'], capture_output=True, text=True).stdout and breach('a shell')",
    ),
    Attack(
        "tools_of_the_sandbox",
        "for tool in ('/bin/setpriv', '/bin/prlimit'):\n"
        "    option = '--reuid=0' if 'setpriv' in tool else '--nproc=1000:1000'\n"
        "    os.path.exists(tool) and refused(subprocess.check_call, [tool, option, '--', sys.executable, '-c', ''])",
    ),
    Attack("chroot", "os.mkdir('a'); refused(os.chroot, 'a')"),
    Attack(
        "raise_limits",
        "for name in ('RLIMIT_NPROC', 'RLIMIT_AS', 'RLIMIT_CPU', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE', 'RLIMIT_CORE', 'RLIMIT_MEMLOCK'):\n    refused(resource.setrlimit, getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
    ),
    Attack(
        "limits_of_others", "for pid in (T['victim'], T['caller']): refused(resource.prlimit, pid, resource.RLIMIT_CPU)"
    ),
    Attack(
        "more_weight",
        "refused(os.nice, -5); refused(os.sched_setaffinity, 0, {0}); refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))",
    ),
    Attack("hostname", "refused(socket.sethostname, 'mine')"),
    # The network
    Attack("tcp_to_this_machine", "refused(socket.create_connection, ('127.0.0.1', T['port']), 1)"),
    Attack("tcp_over_ipv6", "refused(socket.create_connection, ('::1', T['port']), 1)"),
    Attack("udp", "refused(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)"),
    Attack("listen", "refused(socket.create_server, ('127.0.0.1', 0))"),
    Attack("names", "refused(socket.getaddrinfo, 'localhost.example', 80)"),
    Attack("unix_socket", "def go():\n    socket.socket(socket.AF_UNIX).connect(T['unix_socket'])\nrefused(go)"),
    Attack(
        "abstract_socket",
        "def go():\n    socket.socket(socket.AF_UNIX).connect(chr(0) + T['abstract_socket'])\nrefused(go)",
    ),
    Attack(
        "raw_packets_netlink_and_vsock",
        "for family, kind in ((17, 3), (2, 3), (16, 3), (40, 1), (38, 5)): refused(socket.socket, family, kind)",
    ),
    Attack("pairs_of_other_families", "for family in (2, 10, 16, 30): refused(socket.socketpair, family)"),
    Attack(
        "connect_a_pair",
        "a, b = socket.socketpair()\nrefused(a.connect, chr(0) + T['abstract_socket']); refused(a.bind, 'x')",
    ),
    # Other processes
    Attack(
        "kill_the_caller",
        "for pid in (T['caller'], T['victim']): refused(os.kill, pid, signal.SIGKILL); refused(os.kill, pid, 0)",
    ),
    Attack(
        "kill_the_group_of_the_caller", "for pid in (T['caller'], T['victim']): refused(os.killpg, pid, signal.SIGKILL)"
    ),
    Attack(
        "kill_everybody",
        "if os.fork() == 0:\n    with contextlib.suppress(OSError): os.kill(-1, signal.SIGKILL)\n    os._exit(0)\ntime.sleep(0.2)",
        "crash",
    ),
    Attack(
        "kill_the_init",
        "for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL, signal.SIGHUP):\n    with contextlib.suppress(OSError): os.kill(1, number)\ntime.sleep(0.1)",
    ),
    Attack(
        "kill_by_thread",
        "libc = ctypes.CDLL(None)\nfor pid in (T['caller'], T['victim']): libc.tgkill(pid, pid, 9) == 0 and breach(pid)",
    ),
    Attack(
        "trace_the_init",
        "libc = ctypes.CDLL(None)\nfor pid in (1, T['caller']): libc.ptrace(16, pid, 0, 0) == 0 and breach('attached')",
    ),
    Attack(
        "see_other_processes",
        "seen = 0\nfor pid in range(1, 5000):\n    with contextlib.suppress(ProcessLookupError, PermissionError):\n        os.kill(pid, 0); seen += 1\nseen > 8 and breach(seen)",
    ),
    # Staying
    Attack(
        "daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for fd in (0, 1, 2): os.close(fd)\n        time.sleep(1000)\n    os._exit(0)\nos.wait()",
    ),
    Attack("child_keeps_the_output_open", "if os.fork() == 0:\n    time.sleep(1000)"),
    Attack(
        "deaf_children",
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        while True: time.sleep(10)",
    ),
    Attack(
        "closed_streams",
        "if os.fork() == 0:\n    os.closerange(0, 64); time.sleep(1000)\nos.closerange(0, 64)\ntime.sleep(1000)",
        "wall",
    ),
    Attack(
        "outlive_the_caller",  # by clearing the signal that the kernel sends at its death
        "libc = ctypes.CDLL(None)\nfor option in (1, (1 << 32) + 1, -(1 << 32) + 1):\n    for number in (0, 17):\n"
        "        libc.syscall({'x86_64': 157, 'aarch64': 167}[os.uname().machine], ctypes.c_long(option), number) == 0 and breach(option)",
    ),
    Attack(
        "orphans_of_orphans",
        "def go(depth):\n    if depth and os.fork() == 0:\n        os.setsid(); go(depth - 1); time.sleep(1000)\ngo(5)\ntime.sleep(0.2)",
    ),
    # Time
    Attack("busy_loop", "while True: pass", "cpu"),
    Attack(
        "busy_children", "for _ in range(3):\n    if os.fork() == 0:\n        while True: pass\ntime.sleep(100)", "cpu"
    ),
    Attack("deaf_to_the_cpu_limit", "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "cpu"),
    Attack(
        "unwaited_short_children",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    try:\n        if os.fork() == 0:\n            sum(range(10**6)); os._exit(0)\n    except OSError: time.sleep(0.01)",
        "wall",
    ),
    Attack("sleep", "time.sleep(1000)", "wall"),
    Attack("stop_itself", "os.kill(os.getpid(), signal.SIGSTOP)", "wall"),
    Attack("catastrophic_pattern", "import re; re.match('(a|a)*$', 'a' * 60 + 'b')", "cpu"),
    Attack("huge_number", "7 ** (10 ** 9)", "cpu"),
    Attack("waits_for_input", "sys.stdin.read(); threading.Event().wait()", "wall"),
    # Processes
    Attack("fork_bomb", "while True:\n    try: os.fork()\n    except OSError: pass", "cpu"),
    Attack(
        "process_count", "made = until_refused(lambda _: os.fork() or time.sleep(1000), 100)\nmade > 8 and breach(made)"
    ),
    Attack(
        "thread_bomb",
        "threading.stack_size(1 << 16)\nmade = until_refused(lambda _: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(), 100)\nmade > 8 and breach(made); os.write(1, b'held\\n'); os._exit(0)",
    ),
    Attack(
        "zombies",
        "def go(_):\n    if os.fork() == 0: os._exit(0)\nmade = until_refused(go, 100)\nmade > 8 and breach(made)",
    ),
    Attack(
        "exec_bomb",
        "again = 'import os, sys; os.execv(sys.executable, sys.orig_argv)'\nos.execv(sys.executable, [sys.executable, '-S', '-c', again])",
        "cpu",
    ),
    # Memory
    Attack(
        "memory_bomb",
        "refused(bytearray, 1 << 30)\nhold = []\nmade = until_refused(lambda _: hold.append(bytearray(1 << 20)), 1000)\ndel hold\nmade > 200 and breach(made)",
    ),
    Attack(
        "memory_of_many",
        "for _ in range(5):\n    if os.fork() == 0:\n        hold = bytearray(os.urandom(1)) * (120 << 20); time.sleep(100)\ntime.sleep(100)",
        "memory",
    ),
    Attack(
        "shared_memory_of_many",
        "import mmap\nfor _ in range(4):\n    if os.fork() == 0:\n        hold = mmap.mmap(-1, 120 << 20)\n        for at in range(0, len(hold), 4096): hold[at] = 1\n        time.sleep(100)\ntime.sleep(100)",
        "memory",
    ),
    Attack("locked_memory", "libc = ctypes.CDLL(None)\nlibc.mlockall(3) == 0 and breach('locked')"),
    Attack("address_space", "import mmap\nrefused(mmap.mmap, -1, 1 << 40)"),
    Attack(
        "pipes",
        "import fcntl\nheld = []\ndef go(_):\n    held.append(os.pipe())\n    with contextlib.suppress(PermissionError): fcntl.fcntl(held[-1][1], 1031, 1 << 20)\nmade = until_refused(go, 1000)\nmade > 32 and breach(made)",
    ),
    Attack("descriptors", "made = until_refused(lambda _: os.dup(0), 10000)\nmade > 64 and breach(made)"),
    Attack(
        "deep_recursion",
        "sys.setrecursionlimit(10**9)\ndef go(): go()\nrefused(go, only=(MemoryError, RecursionError))",
        "crash",
    ),
    Attack("native_crash", "ctypes.string_at(0)", "crash"),
    Attack(
        "core_dump",
        "if os.fork() == 0: os.abort()\n_, status = os.wait()\nos.WCOREDUMP(status) and breach('core'); os.listdir('.') and breach(os.listdir('.'))",
    ),
    # The scratch folder
    Attack(
        "one_large_file",
        "def go():\n    with open('x', 'wb') as file:\n        for _ in range(20): file.write(bytes(1 << 20))\nrefused(go); os.path.getsize('x') > 8 << 20 and breach(os.path.getsize('x'))",
    ),
    Attack(
        "many_large_files",
        "def go(n):\n    with open(f'x{n}', 'wb') as file: file.write(bytes(1 << 20))\nmade = until_refused(go, 20)\nmade > 8 and breach(made)",
    ),
    Attack("sparse_file", "refused(lambda: os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 40))"),
    Attack(
        "preallocated_file", "refused(lambda: os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 1 << 40))"
    ),
    Attack(
        "shared_memory_folder",
        "def go():\n    with open('/dev/shm/x', 'wb') as file:\n        for _ in range(20): file.write(bytes(1 << 20))\nrefused(go)",
    ),
    Attack(
        "shared_memory_object",
        "from multiprocessing import shared_memory\nrefused(shared_memory.SharedMemory, None, True, 1 << 30)",
    ),
    Attack(
        "deleted_files",
        "hold = []\ndef go(n):\n    hold.append(open('x', 'wb')); os.remove('x'); hold[-1].write(bytes(1 << 20)); hold[-1].flush()\nmade = until_refused(go, 40)\nmade > 8 and breach(made)",
    ),
    Attack("many_files", "for n in range(10**7): os.close(os.open(f'x{n}', os.O_CREAT | os.O_WRONLY))", "files"),
    Attack("many_folders", "while True:\n    os.mkdir('x'); os.chdir('x')", "files"),
    Attack("many_links", "for n in range(10**7): os.symlink('x', f'x{n}')", "files"),
    Attack("attributes", "open('x', 'w').close(); refused(os.setxattr, 'x', 'user.x', bytes(1 << 15))"),
    # Output
    Attack("endless_output", "while True: print('x' * 10000)", "output"),
    Attack("endless_errors", "while True: print('x' * 10000, file=sys.stderr)", "output"),
    Attack(
        "output_of_a_child", "if os.fork() == 0:\n    while True: os.write(1, bytes(10000))\ntime.sleep(100)", "output"
    ),
    Attack(
        "slow_reader",
        "import fcntl\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)\nwhile True:\n    with contextlib.suppress(BlockingIOError): os.write(1, b'x' * 65536)",
        "output",
    ),
]
