"""States as a run leaves them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.facts.rundir import RunDir
from libra_hpc.state import state_folders as folders

WEIGHTS = "policy/model.safetensors"


def state(parent: Path, step: int, position: folders.DataPosition | None = None, name: str = "") -> Path:
    """A whole state in ``parent``."""
    final = parent / (name or f"step-{step:06d}")
    partial = final.with_name(f"{final.name}{folders.TEMPORARY}")
    (partial / folders.POLICY_DIR).mkdir(parents=True)
    (partial / WEIGHTS).write_bytes(bytes([step]) * 4096)
    (partial / "optimizer.safetensors").write_bytes(b"moments")
    (partial / folders.STATE_FILE).write_bytes(msgspec.json.encode(folders.TrainerState(step, step)))
    folders.publish(partial, final, position=position)
    return final


def checkpoint(run: RunDir, step: int, *reports: folders.StepRecord) -> Path:
    return state(run.checkpoints, step, folders.DataPosition(step, 8 * step, (8 * step + 3,), reports))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, times: int, number: int = errno.ESTALE) -> list[int]:
    """Let reads of a file fail so often; returns a list with one entry for each failure."""
    failed: list[int] = []
    read, checksum = Path.read_bytes, folders.file_crc32

    def fail(found: Path) -> None:
        if found == path and len(failed) < times:
            failed.append(number)
            raise OSError(number, "Stale file handle", str(found))

    def read_bytes(found: Path) -> bytes:
        fail(found)
        return read(found)

    def file_crc32(found: Path) -> Any:
        fail(found)
        return checksum(found)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(folders, "file_crc32", file_crc32)
    return failed
