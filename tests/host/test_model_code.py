"""Model-written code: what it can do, and that everything else fails as a value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libra_hpc.host.contain import COMPUTE
from libra_hpc.tasks.base import ToolResult
from tests.host.conftest import OpenSandbox

LIMITS = {"tool_timeout_s": 1.0, "tool_memory_mb": 256, "tool_output_bytes": 2000}


async def run_all(sandbox: OpenSandbox, codes: list[str], timeout_s: float = 30.0) -> list[ToolResult]:
    async with sandbox(**{**LIMITS, "tool_timeout_s": timeout_s}) as box:
        return [await box.python(code) for code in codes]


@pytest.mark.parametrize(
    ("codes", "value"),
    [
        (["print(2 + 3)"], "5\n"),
        (["import math, re, itertools, fractions\nprint(math.comb(5, 2), fractions.Fraction(6, 4))"], "10 3/2\n"),
        (["x = 1"], ""),
        (["import sys; print('a'); sys.exit()"], "a\n"),
        # Calls share no state.
        (["import math; math.pi = 3; a = 1", "import math; print(math.pi == 3, 'a' in globals())"], "False False\n"),
        # No descriptor but its own output.
        (["import os\nfor fd in range(3, 500):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"], ""),
        # Without root and without environment.
        (["import os; print(os.getuid() != 0, sorted(os.environ))"], "True ['LC_ALL', 'TMPDIR']\n"),
        # What looks like a frame of the tool process is only text that was printed.
        ([r"print('\x14\x00\x00\x00ToolDone ok 42')"], "\x14\x00\x00\x00ToolDone ok 42\n"),
    ],
)
async def test_prints_are_the_value_and_nothing_else_gets_in_or_out(
    sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch, codes: list[str], value: str
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do not leak")
    result = (await run_all(sandbox, codes))[-1]
    assert (result.outcome, result.value) == ("ok", value)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('text')", 1),
        ("import sys; sys.exit(256)", 0),
        ("1 / 0", 1),
        ("import ctypes; ctypes.string_at(0)", -11),
        ("while True: pass", None),
        ("while True: print('spam')", None),
    ],
)
async def test_exit_code_of_the_program(sandbox: OpenSandbox, code: str, exit_code: int | None) -> None:
    result = (await run_all(sandbox, [code], 1.0 if exit_code is None else 30.0))[0]
    assert result.exit_code == exit_code
    assert (result.outcome == "ok") == (exit_code == 0)


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("print('before'); 1 / 0", "error", "before\n"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("x = (", "error", "SyntaxError"),
        ("def f(): f()\nf()", "error", "RecursionError"),
        ("import sys; sys.exit(3)", "error", ""),
        ("while True: pass", "timeout", ""),
        ("import time; time.sleep(600)", "timeout", ""),
        ("import os; os.close(1); os.close(2)\nwhile True: pass", "timeout", ""),
        ("x = 'x' * 10**10", "error", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "error", "MemoryError"),
        ("while True: print('spam')", "error", "spam"),
        ("import ctypes; ctypes.string_at(0)", "error", "SIGSEGV"),
        ("import os\nwhile True: os.fork()", "error", "PermissionError"),
        ("import os; os.execv('/bin/sh', ['sh'])", "error", "PermissionError"),
        ("open('note', 'w')", "error", "PermissionError"),
        ("open('/etc/passwd').read()", "error", "PermissionError"),
        ("import os; open(f'/proc/{os.getppid()}/mem', 'rb')", "error", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "error", "PermissionError"),
        ("import os; os.unlink('/etc/hostname')", "error", "PermissionError"),
        ("import os; os.setsid()", "error", "PermissionError"),
        ("import socket; socket.socket()", "error", "PermissionError"),
        ("import subprocess", "error", "ModuleNotFoundError"),
        ("import libra_hpc.tasks.base", "error", "ModuleNotFoundError"),
    ],
)
async def test_everything_else_fails_as_a_value(sandbox: OpenSandbox, code: str, outcome: str, text: str) -> None:
    bad, good = await run_all(sandbox, [code, "print('next')"], 1.0 if outcome == "timeout" else 30.0)
    assert (bad.outcome, text in bad.value) == (outcome, True), bad
    assert len(bad.value.encode()) <= LIMITS["tool_output_bytes"]
    assert (good.outcome, good.value) == ("ok", "next\n")


async def test_raw_system_calls_outside_the_list_are_denied(sandbox: OpenSandbox) -> None:
    # prctl could undo the parent-death signal, fcntl(F_SETOWN) could signal others, ptrace and process_vm_readv could
    # read memory, io_uring could open files.
    numbers = {"x86_64": (157, 72, 101, 310, 425, 0x40000000), "aarch64": (167, 25, 117, 270, 425)}[os.uname().machine]
    code = (
        f"import ctypes\nlibc = ctypes.PyDLL(None, use_errno=True)\nfor n in {numbers}: print(libc.syscall(n, 0, 0, 0,"
        " 0), ctypes.get_errno())"
    )
    assert (await run_all(sandbox, [code]))[0].value == "-1 1\n" * len(numbers)
    assert not set(numbers) & set(COMPUTE[os.uname().machine][1])


async def test_timed_out_code_leaves_no_process(sandbox: OpenSandbox) -> None:
    async with sandbox(**LIMITS) as box:
        await box.python("while True: pass")
        pid = box.pids[-1]
        assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""
