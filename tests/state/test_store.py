"""The newest whole state: whole, damaged or unreadable, and how long the last is waited for."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.process import retry
from libra_hpc.process.retry import cannot, patiently
from libra_hpc.state.store import SavedState, newest_whole, resolve, states

from .saved import WEIGHTS, flip, state


def test_the_newest_whole_state_is_taken_and_damaged_ones_have_a_sentence(tmp_path: Path) -> None:
    assert newest_whole(states(tmp_path / "nowhere")) == (None, [])
    older, newer = state(tmp_path, 9), state(tmp_path, 10)
    for name in ("step-000011.damaged", "step-000012.aside-2", "step-000013.start.1.partial", "notes"):
        (tmp_path / name).mkdir()
    assert newest_whole(states(tmp_path)) == (SavedState(10, newer), [])
    flip(newer / WEIGHTS)
    why = f"{WEIGHTS} has not the checksum with which it was written."
    assert newest_whole(states(tmp_path)) == (SavedState(9, older), [(SavedState(10, newer), why)])
    flip(older / "optimizer.safetensors")
    assert newest_whole(states(tmp_path)).whole is None


def test_memory_and_disk_are_one_list_and_of_equal_steps_the_first_counts(tmp_path: Path) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    part = state(memory, 10, name="step-00000010.attempt-1-7")
    newest = state(disk, 10)
    assert newest_whole((*states(memory), *states(disk))).whole == SavedState(10, part)
    flip(part / WEIGHTS)
    assert newest_whole((*states(memory), *states(disk))).whole == SavedState(10, newest)


def test_what_cannot_be_read_is_tried_again_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", pauses.append)
    notes: list[str] = []
    left = [OSError(errno.ESTALE, "Stale file handle", "/run/a")] * 3 + [OSError(errno.EIO, "I/O error", "/run/a")]

    def read() -> int:
        if left:
            raise left.pop(0)
        return 7

    assert patiently(read, 60.0, notes.append) == 7
    assert notes == [
        *["/run/a cannot be read: Stale file handle; it is tried again for 60 s"] * 3,
        "/run/a cannot be read: I/O error; it is tried again for 60 s",
    ]
    assert pauses == [0.5, 1.0, 2.0, 4.0]

    def missing() -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file")

    with pytest.raises(FileNotFoundError):
        patiently(missing, 60.0, notes.append)
    assert len(pauses) == 4, "a missing file is an answer"
    assert cannot(SlurmUnreachable("no controller")) == "no controller", "no file is named where there is none"


def test_a_state_that_was_removed_after_it_was_chosen_gives_way_to_the_newest_whole_one(tmp_path: Path) -> None:
    chosen, newer, newest = (state(tmp_path, step) for step in (10, 20, 30))
    flip(newest / WEIGHTS)
    assert resolve(chosen) == chosen
    assert resolve(tmp_path) == newer
    shutil.rmtree(chosen)
    assert resolve(chosen) == newer
    shutil.rmtree(newer)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        resolve(chosen)
