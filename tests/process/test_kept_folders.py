"""Folders that outlive an agent: kept while all ranks restart, removed with the run or when nobody comes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra_hpc.process import agent_folders
from libra_hpc.process.agent_folders import KEPT_S, OWNER_FILE, hold, kept_folder, orphans, remove_kept


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_folders, "_bases", lambda: (tmp_path, tmp_path))


def test_a_folder_of_a_dead_agent_is_kept_for_a_while(tmp_path: Path) -> None:
    folder = kept_folder(tmp_path / "run", 2)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(hold(folder), 0.01))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kept_folder(tmp_path / "run", 2) == folder
    owner = folder / OWNER_FILE
    os.utime(owner, (1.0, 1.0))
    assert orphans() == [], "its agent lives"
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    owner.write_bytes(dead.stdout)
    assert orphans() == []
    silent = owner.stat().st_mtime - KEPT_S - 1.0
    os.utime(owner, (silent, silent))
    assert orphans() == [folder]


def test_the_end_of_a_run_removes_its_folders_and_no_other_ones(tmp_path: Path) -> None:
    mine, other = kept_folder(tmp_path / "run", 1), kept_folder(tmp_path / "run-2", 1)
    mine.mkdir(), other.mkdir()
    remove_kept(tmp_path / "run")
    assert (mine.exists(), other.exists()) == (False, True)
