"""A log that grows without end is emptied in place, and its writer goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra_hpc.process import child


def test_a_long_log_is_emptied_and_its_end_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MOST_BYTES", 1000)
    monkeypatch.setattr(child, "KEPT_BYTES", 10)
    path = tmp_path / "host0.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 1000)
        assert not child.cut(path)
        writer.write(b"0123456789")
        assert child.cut(path)
        writer.write(b"next")
    assert path.read_bytes() == b"next"
    assert (tmp_path / "host0.log.old").read_bytes() == b"0123456789"


def test_a_log_that_is_missing_is_short(tmp_path: Path) -> None:
    assert not child.cut(tmp_path / "none.log")


LIMITED = """
import resource, sys
from libra_hpc.errors import error_text
from libra_hpc.process.child import raise_limits
resource.setrlimit(resource.RLIMIT_FSIZE, tuple(map(int, sys.argv[2:])))
files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, files))
print(raise_limits(1))
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(files, 1 << 16)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))
print(raise_limits(1000).partition(" on ")[0])
try:
    for _ in range(2):
        open(sys.argv[1], "ab", buffering=0).write(bytes(2048))
except OSError as error:
    print(error_text(error))
"""


def test_a_limit_of_files_is_raised_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    def said(soft: int, hard: int) -> list[str]:
        command = [sys.executable, "-c", LIMITED, str(tmp_path / "file"), str(soft), str(hard)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert said(1024, -1) == said(1024, child.LEAST_LIMIT) == ["", "ulimit -n allows 1000 open files"]
    first, _, second = said(1024, 1024)
    assert first == f"ulimit -f allows files of 1024 bytes on {os.uname().nodename}, too few for logs and checkpoints"
    assert second == "File too large (ulimit -f: 1024 bytes)"
