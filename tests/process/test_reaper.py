"""Real processes below a subreaper, which is a process of its own in each test: what is ended and what is spared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, subprocess, sys, time
from libra_hpc.process import reaper

reaper.become_subreaper()

def daemon(depth=0):
    # A process in a session of its own whose parent has ended; depth: below it one more of the kind, which outlives it.
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        if depth:
            daemon(depth - 1)
        os.write(writer, b".")
        time.sleep(600)
    os.read(reader, 1)
    os.wait()

def emptied():
    for _ in range(5000):
        if not reaper.end_strangers(known) and not reaper.children() - known:
            return True
        time.sleep(0.001)
    return False
"""


def run(script: str) -> str:
    command = [sys.executable, "-c", BEGIN + script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_daemons_of_daemons_are_ended_with_the_children() -> None:
    script = """
daemon()
daemon(2)
subprocess.Popen(["sleep", "600"])
print(len(reaper.children()) >= 3, reaper.end_children(30.0), reaper.children())
"""
    assert run(script) == "True True set()"


def test_without_children_nothing_is_waited_for() -> None:
    assert run("print(reaper.end_children(0.0))") == "True"


def test_strangers_are_ended_and_own_children_spared() -> None:
    script = """
own = subprocess.Popen(["sleep", "600"], start_new_session=True)
step = subprocess.Popen(["sleep", "600"])
known = {own.pid, step.pid}
daemon(1)
strangers = reaper.children() - known
found = reaper.end_strangers({own.pid})
print(set(found) == strangers != set(), emptied(), own.poll(), step.poll())
known.remove(own.pid)
print(emptied(), step.poll())
step.kill()
"""
    assert run(script) == "True True None None\nTrue None"


def test_a_stranger_that_has_ended_is_reaped() -> None:
    script = """
if os.fork() == 0:
    os.setsid()
    os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
print(reaper.end_strangers(()), reaper.children())
"""
    assert run(script) == "[] set()"


@pytest.mark.parametrize("count", [0, 3])
def test_a_kernel_that_does_not_list_children_is_asked_for_all_parents(count: int) -> None:
    script = f"""
own = {{subprocess.Popen(["sleep", "600"]).pid for _ in range({count})}}
print(reaper._children_by_scan() == own == reaper.children())
reaper.end_children(30.0)
"""
    assert run(script) == "True"
