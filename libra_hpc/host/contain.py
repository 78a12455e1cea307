"""Confine one process by the kernel: limits, a system-call filter.

Declared tools are bounded, not distrusted: they are the task author's code. Model-written code is distrusted.

- Both: time limit (SIGKILL to the group), RLIMIT_AS, no core files, empty environment, own session, no inherited
  descriptors, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG; children end with the call (subreaper).
- Declared tools: files up to the memory limit.
- Model-written code: no files, no processes, CPU time limit + 1 s; user `NOBODY` when started as root.
- Model-written code makes only the system calls of `COMPUTE`; where that filter cannot be installed, it is not run.

There is no cgroup: a job step rarely may divide one. A tool that forks faster than it is killed ends its process
after 2 s, and the host kills the rest.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

from libra_hpc.errors import OperationError
from libra_hpc.process.reaper import prctl

NOBODY = 65534
"""uid and gid without rights on every Linux (the kernel's overflow id)."""

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


COMPUTE: dict[str, tuple[int, tuple[int, ...]]] = {
    # machine: (AUDIT_ARCH value, system calls).  In the order of the kernel's tables: read write close fstat poll lseek
    # mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn readv writev select sched_yield mremap madvise
    # dup nanosleep getpid exit uname gettimeofday getrusage sysinfo times getuid getgid geteuid getegid getppid
    # sigaltstack gettid futex time sched_getaffinity restart_syscall clock_gettime clock_getres clock_nanosleep
    # exit_group pselect6 ppoll set_robust_list getrandom rseq
    "x86_64": (
        0xC000003E,
        _numbers(
            "0 1 3 5 7 8 9 10 11 12 13 14 15 19 20 23 24 25 28 32 35 39 60 63 96 98 99 100 102 104 107 108 110 "
            "131 186 202 201 204 219 228 229 230 231 270 271 273 318 334"
        ),
    ),
    "aarch64": (
        0xC00000B7,
        _numbers(
            "63 64 57 80 62 222 226 215 214 134 135 139 65 66 124 216 233 23 101 172 93 160 169 165 179 153 174 "
            "176 175 177 173 132 178 98 123 128 113 114 115 94 72 73 99 278 293"
        ),
    ),
}
"""System calls of model-written code: work on memory and on open descriptors. fcntl is absent: F_SETOWN sends signals.
"""


def hide_memory() -> None:
    """Forbid processes of the same user to read or trace this one (/proc/<pid>/mem, environ, ptrace)."""
    prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    """Disable set-uid programs and file capabilities for this process and its children."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit(memory_bytes: int, file_bytes: int) -> None:
    """Limit the address space and the size of written files; no core files."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def drop_root() -> bool:
    """Become `NOBODY` if root, and return whether that happened; clears the parent-death signal (`die_with`)."""
    if os.geteuid() != 0:
        return False
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return True


def compute_only(cpu_s: int) -> None:
    """Last step before model-written code: no processes, ``cpu_s`` seconds of CPU, only `COMPUTE`, else EPERM.

    The filter is a classic BPF program over ``struct seccomp_data {int nr; u32 arch; ...}``. Raises `OperationError`
    when it cannot be installed.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    machine = platform.machine()
    if machine not in COMPUTE:
        raise OperationError(f"no system-call filter for machine type {machine!r}: model-written code is not run here")
    arch, calls = COMPUTE[machine]
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    kill_process, allow, errno_eperm = 0x80000000, 0x7FFF0000, 0x00050001
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, kill_process), (load, 0, 0, 0)]
    program += [(equal, len(calls) - i, 0, number) for i, number in enumerate(calls)]
    program += [(answer, 0, 0, errno_eperm), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    no_new_privileges()
    try:
        prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(buffer))  # 2: SECCOMP_MODE_FILTER
    except OSError as error:
        raise OperationError(
            f"the kernel refuses a system-call filter ({error}): model-written code is not run here"
        ) from error
