"""System calls that a program in the sandbox may make: only the calls that Python and its libraries need.

This is an allow list, so new system calls of later kernels are refused. Excluded on purpose: sockets (except a pair
within the sandbox), ptrace and process_vm_*, mount, namespaces, chroot, keyctl, bpf, io_uring, perf_event_open,
userfaultfd, memfd_create (no limit counts its memory), System V and POSIX message queues and shared memory, setxattr,
mknod, flock (it would lock files shared with other processes), splice and vmsplice, personality, and all calls for
administrators.
"""

from __future__ import annotations

import errno
import functools
import tempfile
from typing import Any

FILES = """
access chdir chmod close close_range copy_file_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait
epoll_wait eventfd2 faccessat faccessat2 fallocate fchdir fchmod fchmodat fcntl fdatasync fstat fstatfs fsync
ftruncate futimesat getcwd getdents getdents64 link linkat lseek lstat mkdir mkdirat newfstatat open openat pipe pipe2
poll ppoll pread64 preadv preadv2 pselect6 pwrite64 pwritev pwritev2 read readlink readlinkat readv rename renameat
renameat2 rmdir select sendfile stat statfs statx symlink symlinkat truncate umask unlink unlinkat utime utimensat utimes
write writev
"""
MEMORY = "brk madvise membarrier mmap mprotect mremap msync munmap"
PROCESSES = """
arch_prctl execve exit exit_group fork futex get_robust_list getcpu getegid geteuid getgid getgroups getpgid getpgrp
getpid getppid getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid prlimit64 rseq
sched_getaffinity sched_getparam sched_getscheduler sched_yield set_robust_list set_tid_address setpgid setrlimit setsid
sysinfo times uname vfork wait4 waitid
"""
# As root, setpriv changes the user right before the program starts. Without privileges these calls have no effect.
IDENTITY = "capget capset setgid setgroups setregid setresgid setresuid setreuid setuid"
SIGNALS = """
alarm getitimer kill pause restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
rt_sigtimedwait setitimer sigaltstack signalfd4 tgkill
"""
TIME = "clock_getres clock_gettime clock_nanosleep getrandom gettimeofday nanosleep time"
PAIRS = "getpeername getsockname getsockopt recvfrom sendto shutdown"  # for sockets from socketpair

NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} of linux/sched.h
LOW = 0xFFFFFFFF
AF_UNIX = 1
PRCTLS = {  # linux/prctl.h; setpriv needs the options for capabilities
    "PR_GET_PDEATHSIG": 2,
    "PR_GET_KEEPCAPS": 7,
    "PR_SET_KEEPCAPS": 8,
    "PR_SET_NAME": 15,
    "PR_GET_NAME": 16,
    "PR_CAPBSET_READ": 23,
    "PR_GET_SECUREBITS": 27,
    "PR_GET_NO_NEW_PRIVS": 39,
    "PR_CAP_AMBIENT": 47,
    "PR_SET_VMA": 0x53564D41,
}
IOCTLS = {  # asm-generic/ioctls.h
    "TCGETS": 0x5401,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
}


@functools.cache
def filter_program() -> bytes:
    """Return the filter as classic BPF for this machine's architecture.

    Raises ImportError or RuntimeError if pyseccomp or libseccomp is not installed, and OSError (EINVAL) if libseccomp does
    not know a system call.
    """
    import pyseccomp as seccomp

    # ENOSYS, not EPERM: programs handle a missing call (glibc then tries an older one), but not a refused call.
    rules: Any = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    for name in " ".join((FILES, MEMORY, PROCESSES, IDENTITY, SIGNALS, TIME, PAIRS)).split():
        rules.add_rule(seccomp.ALLOW, name)
    rules.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, NEW_NAMESPACES, 0))
    # The kernel reads only the low 32 bits of these arguments; compare only these, or other values could pass.
    for option in PRCTLS.values():
        rules.add_rule(seccomp.ALLOW, "prctl", seccomp.Arg(0, seccomp.MASKED_EQ, LOW, option))
    for request in IOCTLS.values():
        rules.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, LOW, request))
    rules.add_rule(seccomp.ALLOW, "socketpair", seccomp.Arg(0, seccomp.EQ, AF_UNIX))
    rules.add_rule(seccomp.ERRNO(errno.EACCES), "socket")  # a common mistake: EACCES gives a clear error
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
