"""Folders of agents: removed when their agent is gone, and only then; never taken from another user."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libra_hpc.process import agent_folders
from libra_hpc.process.agent_folders import (
    COMPILED,
    KEPT_S,
    OWNER_FILE,
    hold,
    kept_folder,
    make_folders,
    orphans,
    own,
    owned,
    removal,
    remove,
    remove_kept,
    remove_orphans,
)

AGENT = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from pathlib import Path
from libra_hpc.process import agent_folders
agent_folders._bases = lambda: (Path(sys.argv[1]), Path(sys.argv[1]))
print(*agent_folders.make_folders(), flush=True)
sys.stdin.read()
"""
CHILD_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_folders, "_bases", lambda: (tmp_path, tmp_path))


@contextmanager
def agent(base: Path, *before: str) -> Iterator[list[Path]]:
    """The folders of another process that lives meanwhile."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*before, sys.executable, "-c", AGENT, str(base)], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield [Path(name) for name in process.stdout.readline().decode().split()]
        process.stdin.close()
        process.wait()


def hold_for_a_moment(folder: Path) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(hold(folder), 0.01))


@pytest.mark.parametrize("before", [(), CHILD_NAMESPACE], ids=["same namespace", "other PID namespace"])
def test_a_start_leaves_the_folders_of_a_live_agent_and_removes_them_once_it_has_ended(
    tmp_path: Path, before: tuple[str, ...]
) -> None:
    if before and subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces may not be made here")
    with agent(tmp_path, *before) as theirs:
        assert len(theirs) == 2
        for folder in theirs:
            assert folder.stat().st_mode & 0o777 == 0o700
            # In its namespace it may have the id of no process here.
            (folder / OWNER_FILE).write_text("4194303")
        ours = make_folders()
        assert all(folder.is_dir() for folder in (*theirs, *ours))
        assert orphans() == []
    assert orphans() == sorted(theirs)
    remove_orphans()
    assert [folder.exists() for folder in (*theirs, *ours)] == [False, False, True, True]


def test_children_do_not_keep_the_folders_of_an_agent_that_was_killed(tmp_path: Path) -> None:
    folder, _ = make_folders()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        # As the kernel does at the end of this process.
        os.close(agent_folders._locks.pop(folder))
        assert child.poll() is None
        assert orphans() == [folder]


def test_a_folder_without_a_lock_is_no_orphan(tmp_path: Path) -> None:
    (tmp_path / "libra-of-another-version").mkdir()
    (tmp_path / "libra-of-another-version" / "owner.pid").write_text("4194303")
    assert orphans() == []


def test_a_folder_of_an_agent_that_ended_is_kept_for_a_while(tmp_path: Path) -> None:
    folder = kept_folder(tmp_path / "run", "2")
    hold_for_a_moment(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kept_folder(tmp_path / "run", "2") == folder
    owner = folder / OWNER_FILE
    os.utime(owner, (1.0, 1.0))
    assert orphans() == [], "its agent lives"
    os.close(agent_folders._locks.pop(folder))
    assert orphans() == [folder]
    os.utime(owner)
    silent = owner.stat().st_mtime
    assert orphans() == []
    os.utime(owner, (silent - KEPT_S - 1.0, silent - KEPT_S - 1.0))
    assert orphans() == [folder]
    hold_for_a_moment(folder)
    assert orphans() == [], "the next start has it"


def by_command(run: Path) -> None:
    subprocess.run(["sh", "-c", removal(run).replace("/dev/shm", str(run.parent))], check=True)


@pytest.mark.parametrize("end", [remove_kept, by_command])
def test_the_end_of_a_run_removes_its_folders_and_no_other_ones(tmp_path: Path, end: Callable[[Path], None]) -> None:
    mine, other = kept_folder(tmp_path / "run", "1"), kept_folder(tmp_path / "run-2", "1")
    mine.mkdir(), other.mkdir()
    end(tmp_path / "run")
    assert (mine.exists(), other.exists()) == (False, True)


def test_the_command_leaves_what_the_next_start_has_locked(tmp_path: Path) -> None:
    killed, live, link = (kept_folder(tmp_path / "run", place) for place in ("1", "2", "3"))
    for folder in (killed, live):
        own(folder)
    os.close(agent_folders._locks.pop(killed))
    link.symlink_to(killed)
    by_command(tmp_path / "run")
    assert (killed.exists(), live.exists(), link.is_symlink()) == (False, True, True)


def test_a_removed_folder_is_made_again_by_its_owner(tmp_path: Path) -> None:
    folder, other = make_folders()
    shutil.rmtree(folder)
    assert (owned(folder), owned(other)) == (False, True)
    folder.mkdir(mode=0o755)
    own(folder)
    assert owned(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert orphans() == []
    remove(folder)
    assert not folder.exists()
    assert not owned(folder)


def test_a_folder_or_link_that_another_user_made_first_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = kept_folder(tmp_path / "run", "1")
    assert kept_folder(tmp_path / "run", "1") != expected, "nobody can know the name"
    (tmp_path / "target").mkdir()
    expected.symlink_to(tmp_path / "target")
    assert kept_folder(tmp_path / "run", "1") != expected
    with pytest.raises(PermissionError, match="not a folder of this user"):
        own(expected)
    remove_kept(tmp_path / "run")
    expected.unlink()
    expected.mkdir(mode=0o777)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    theirs = expected.with_name(expected.name.replace(f"-{user}-", f"-{user + 1}-"))
    expected.rename(theirs)
    assert kept_folder(tmp_path / "run", "1") != theirs
    with pytest.raises(PermissionError):
        own(theirs)
    assert list(theirs.iterdir()) == []
    assert orphans() == []


def test_compiled_code_is_kept_in_a_folder_that_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = tmp_path / "site" / "compiled"
    monkeypatch.setenv(COMPILED, str(caches))
    make_folders()
    assert caches.stat().st_mode & 0o777 == 0o700
    caches.chmod(0o770)
    with pytest.raises(PermissionError, match="a folder that others can write"):
        make_folders()
